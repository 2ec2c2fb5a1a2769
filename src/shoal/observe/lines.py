"""Files that grow by whole lines: appending that outlives a failing disk, and reading what others append."""

import errno
import os
import stat
import threading
from collections.abc import Callable
from typing import BinaryIO

Report = Callable[[str], None]
MAX_LAST_BYTES = 8 << 20
"""Where lines have no end, no more than this is read to find their beginning."""


def say_nothing(text: str) -> None:
    """The report of someone who does not want to know."""


def open_file(path: str) -> BinaryIO:
    """A file to read. Raises OSError for what is none: a pipe or a device could keep its reader for good."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "Not a regular file", path)
    return open(fd, "rb")


class Appender:
    """Appends whole lines to one file, from any thread, next to other processes that do the same.

    Each append is one write to a descriptor opened with O_APPEND, so lines of several processes never mix. It never
    raises: the first failure and the first success after it are reported once each through `report`, and every later
    append tries again. A line that was cut (the disk filled up, or its writer was killed before this one opened the
    file) is ended before the next one starts, so that it damages nothing but itself.
    """

    def __init__(self, path: str, report: Report = say_nothing) -> None:
        self.path = path
        self._report = report
        self._lock = threading.Lock()
        self._fd = -1
        self._is_cut = False
        self._has_failed = False
        self._has_recovered = False

    def append(self, lines: bytes) -> int:
        """Write `lines`, which end with a newline; returns how many of its bytes are safe as whole lines."""
        trouble = ""
        with self._lock:
            try:
                safe = self._write(lines)
            except OSError as error:
                self._close()
                safe, trouble = 0, error.strerror or str(error)
        if safe < len(lines):
            self._say_failed(trouble or "No space left on device")
        elif self._has_failed:
            self._say_recovered()
        return safe

    def close(self) -> None:
        with self._lock:
            self._close()

    def _write(self, lines: bytes) -> int:
        if self._fd < 0:
            self._open()
        start = b"\n" if self._is_cut else b""
        written = os.write(self._fd, start + lines) - len(start)
        if written < 0:
            return 0
        safe = written if written == len(lines) else lines.rfind(b"\n", 0, written) + 1
        self._is_cut = safe < written
        return safe

    def _open(self) -> None:
        self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._fd).st_size
        self._is_cut = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _say_failed(self, trouble: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._report(f"cannot write {self.path}: {trouble}. The run goes on; writing is tried again.")

    def _say_recovered(self) -> None:
        if not self._has_recovered:
            self._has_recovered = True
            self._report(f"writing {self.path} works again.")


class Tail:
    """Reads what was appended to a file since the last look.

    A file that is not there yet has nothing new. A file that became shorter, or was replaced by another one, is read
    again from its start. `read` gives raw bytes as they are; `read_lines` keeps an unfinished last line back until
    its newline arrives.
    """

    def __init__(self, path: str, offset: int = 0) -> None:
        self.path = path
        self.offset = offset
        self._inode = 0
        self._rest = b""

    def read(self, limit: int = 1 << 20) -> bytes:
        """New bytes, at most `limit` of them; empty where there are none."""
        try:
            with open_file(self.path) as file:
                facts = os.fstat(file.fileno())
                if facts.st_size < self.offset or self._inode not in (0, facts.st_ino):
                    self.offset, self._rest = 0, b""
                self._inode = facts.st_ino
                file.seek(self.offset)
                data = file.read(limit)
        except OSError:
            return b""
        self.offset += len(data)
        return data

    def read_lines(self, limit: int = 1 << 20) -> bytes | None:
        """New complete lines as one block that ends with a newline (it may be empty); None where nothing is new."""
        data = self.read(limit)
        if not data:
            return None
        data = self._rest + data
        end = data.rfind(b"\n") + 1
        self._rest = data[end:]
        return data[:end]


def last_lines(path: str, num_lines: int, block_bytes: int = 1 << 16) -> tuple[bytes, int]:
    """The last lines of a file and the offset where it ended, read from the end: cost does not grow with the file."""
    try:
        with open_file(path) as file:
            end = position = file.seek(0, os.SEEK_END)
            data = b""
            # One newline more than lines wanted: the first line of the block may be cut.
            while position > 0 and data.count(b"\n") <= num_lines and len(data) < MAX_LAST_BYTES:
                start = max(0, position - block_bytes)
                file.seek(start)
                data = file.read(position - start) + data
                position = start
    except OSError:
        return b"", 0
    lines = data.splitlines(keepends=True) if b"\r" not in data else _split_on_newlines(data)
    return b"".join(lines[len(lines) - num_lines :] if num_lines < len(lines) else lines), end


def _split_on_newlines(data: bytes) -> list[bytes]:
    # bytes.splitlines also cuts at carriage returns, which progress bars are made of.
    lines = [line + b"\n" for line in data.split(b"\n")]
    if lines[-1] == b"\n":
        lines.pop()
    else:
        lines[-1] = lines[-1][:-1]
    return lines
