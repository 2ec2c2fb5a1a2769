"""The file in which all that a worker prints is kept: bounded, its beginning and its newest part."""

import contextlib
import os
import stat
from collections.abc import Callable, Mapping

from shoal.engine.fit import parse_bytes
from shoal.spec.errors import UserError
from shoal.spec.log_file import sealed_starts

LIMIT_BYTES = 256 << 20
LEAST_BYTES = 1 << 20
NUM_PARTS = 8


class Log:
    """Appends to a file. Where that cannot be done any more, the first failure is told, and the rest is lost.

    A file that is as large as an eighth of the limit is renamed to PATH.START, where START counts all bytes that were
    printed before it, and the next one begins; between two lines, unless there is no end to one. Of these the first
    and the newest are kept: what is removed lies in between, and the numbers tell how much it was.
    """

    def __init__(self, path: str, tell: Callable[[str], None], limit_bytes: int = LIMIT_BYTES) -> None:
        """Raises OSError where it cannot be opened."""
        self._path, self._tell = path, tell
        self._part_bytes = limit_bytes // NUM_PARTS
        self._is_broken = False
        self._fd = -1
        self._open()

    def write(self, data: bytes) -> None:
        cut = 0
        if self._is_file and self._size + len(data) >= self._part_bytes:  # a device is never renamed
            cut = data.rfind(b"\n") + 1
            if cut or self._size >= 2 * self._part_bytes:
                self._append(data[:cut])
                self._seal()
        self._append(data[cut:])

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> None:
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self.close()
        found = os.fstat(fd)
        self._fd, self._size, self._is_file = fd, found.st_size, stat.S_ISREG(found.st_mode)

    def _append(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:
                num_written = os.write(self._fd, rest)
                self._size += num_written
                rest = rest[num_written:]
        except OSError as error:
            if not self._is_broken:
                self._is_broken = True
                self._tell(
                    f"cannot write {self._path}: {error.strerror}. The run goes on; output is shown, not kept."
                )

    def _seal(self) -> None:
        """Begin the next part, and remove what is too much. Where that fails, this one grows on."""
        with contextlib.suppress(OSError):
            folder, name = os.path.split(self._path)
            starts = sealed_starts(os.listdir(folder or "."), name)
            start = starts[-1] + os.stat(f"{self._path}.{starts[-1]}").st_size if starts else 0
            os.rename(self._path, f"{self._path}.{start}")
            self._open()
            # The first, the newest, and the one that has just begun.
            for middle in [*starts, start][1 : -(NUM_PARTS - 2)]:
                os.unlink(f"{self._path}.{middle}")


def limit_of(options: Mapping[str, str]) -> int:
    """What `-o engine.log_limit` says. Raises UserError for what is too little to be cut into parts."""
    if "engine.log_limit" not in options:
        return LIMIT_BYTES
    limit = parse_bytes(options["engine.log_limit"])
    if limit < LEAST_BYTES:
        raise UserError(
            f"engine.log_limit is {options['engine.log_limit']!r}.",
            why="it is kept in eight parts, which should hold some lines each",
            hint="give it 1MB or more, such as `-o engine.log_limit=64MB`",
        )
    return limit
