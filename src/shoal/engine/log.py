"""The file in which all that a worker prints is kept."""

import os
from collections.abc import Callable


class Log:
    """Appends to a file. Where that cannot be done any more, the first failure is told, and the rest is lost."""

    def __init__(self, path: str, tell: Callable[[str], None]) -> None:
        """Raises OSError where it cannot be opened."""
        self._path, self._tell = path, tell
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._is_broken = False

    def write(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            if not self._is_broken:
                self._is_broken = True
                self._tell(
                    f"cannot write {self._path}: {error.strerror}. The run goes on; output is shown, not kept."
                )

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
