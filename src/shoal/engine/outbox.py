"""The launcher's end of a pipe to one worker."""

import contextlib
import os
from collections import deque

MAX_BYTES = 4 << 20
"""What may wait for a worker that does not read. Far more than one that reads ever has waiting."""


class Outbox:
    """Sends lines without ever waiting for the reader; what the pipe does not take is kept for the next `flush`.

    A reader that is gone, or that has left `MAX_BYTES` unread, gets nothing any more: half a conversation would be
    worse than none.
    """

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self._waiting: deque[bytes] = deque()
        self._num_bytes = 0
        self._is_broken = False

    def put(self, line: bytes) -> bool:
        """Take a line to be sent; False where it will not arrive."""
        if self._num_bytes + len(line) > MAX_BYTES:
            self._give_up()
        if self._is_broken:
            return False
        self._waiting.append(line)
        self._num_bytes += len(line)
        return True

    def flush(self) -> bool:
        """Send what the pipe takes now; True while something is left."""
        try:
            while self._waiting:
                sent = os.write(self.fd, self._waiting[0])
                self._num_bytes -= sent
                rest = self._waiting.popleft()[sent:]
                if rest:
                    self._waiting.appendleft(rest)
        except BlockingIOError:
            return True
        except OSError:
            self._give_up()
        return False

    def close(self) -> None:
        self._give_up()
        if self.fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self.fd)
            self.fd = -1

    def _give_up(self) -> None:
        self._is_broken = True
        self._waiting.clear()
        self._num_bytes = 0
