"""A worker's line to its launcher: events as JSON lines through an inherited pipe."""

import contextlib
import os
import select
import threading
import time

from shoal.observe.journal import encode
from shoal.spec.event import Event

PATIENCE_SECONDS = 10.0
# What a pipe takes whole or not at all (PIPE_BUF on Linux).
_ATOMIC_BYTES = 4096


class ControlPipe:
    """The write end of the pipe. A launcher that does not read cannot stop the worker; one that is gone is left.

    We hold a copy of `fd`: the original stays for the next one who is told its number.
    """

    def __init__(self, fd: int) -> None:
        self._fd = -1
        self._lock = threading.Lock()
        # A child of the worker that kept it open would make the launcher wait for the child.
        with contextlib.suppress(OSError):
            self._fd = os.dup(fd)
            os.set_blocking(self._fd, False)
            os.set_inheritable(fd, False)

    def offer(self, event: Event) -> bool:
        """Send the event if the pipe has room now; False where it was dropped."""
        line = encode(event, _ATOMIC_BYTES) + b"\n"
        with self._lock:
            return self._fd >= 0 and self._write(line) > 0

    def send(self, event: Event) -> bool:
        """Send the event whole, waiting for room; False only where the launcher is gone or stuck for 10 s."""
        rest = memoryview(encode(event) + b"\n")
        deadline = time.monotonic() + PATIENCE_SECONDS
        with self._lock:
            while rest and self._fd >= 0:
                sent = self._write(rest)
                rest = rest[sent:]
                if not sent and not self._wait_for_room(deadline - time.monotonic()):
                    break
        return not rest

    def close(self) -> None:
        with self._lock:
            self._drop()

    def _write(self, data: bytes | memoryview) -> int:
        try:
            return os.write(self._fd, data)
        except BlockingIOError:
            return 0
        except OSError:
            self._drop()
            return 0

    def _wait_for_room(self, seconds: float) -> bool:
        if self._fd < 0 or seconds <= 0:
            return False
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        return bool(poll.poll(seconds * 1000))

    def _drop(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)
