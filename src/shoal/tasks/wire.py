"""Messages over a socket pair: a length, a pickle, and at most one descriptor beside it."""

import contextlib
import os
import pickle
import socket
from collections import deque
from collections.abc import Iterator
from struct import Struct
from typing import Any

_HEAD = Struct("<QB")
READ_BYTES = 1 << 18
_MAX_FDS = 16


def frame(message: Any, *, has_fd: bool = False) -> bytes:
    body = pickle.dumps(message, protocol=5)
    return _HEAD.pack(len(body), has_fd) + body


def receive(channel: socket.socket) -> tuple[bytes, list[int]]:
    """What has arrived, with the descriptors beside it; no bytes: the other side is gone."""
    data, fds, _, _ = socket.recv_fds(channel, READ_BYTES, _MAX_FDS, socket.MSG_CMSG_CLOEXEC)
    return data, fds


class Inbox:
    """Puts messages together from pieces of any size."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._fds: deque[int] = deque()

    def feed(self, data: bytes, fds: list[int]) -> Iterator[tuple[Any, int]]:
        """Whole messages, each with its descriptor or -1, which now is the caller's."""
        self._data += data
        self._fds += fds
        while len(self._data) >= _HEAD.size:
            size, has_fd = _HEAD.unpack_from(self._data)
            end = _HEAD.size + size
            if len(self._data) < end:
                return
            with memoryview(self._data) as view, view[_HEAD.size : end] as body:
                message = pickle.loads(body)
            del self._data[:end]
            # A descriptor comes with the first byte of its message, so it is here.
            yield message, self._fds.popleft() if has_fd else -1

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()


class Outbox:
    """Sends messages without waiting for the reader; what the socket does not take is kept for the next `flush`."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._waiting: deque[tuple[memoryview, int]] = deque()

    def put(self, data: bytes, fd: int = -1) -> None:
        """`fd` stays the caller's; a copy of it waits here."""
        self._waiting.append((memoryview(data), os.dup(fd) if fd >= 0 else -1))

    def flush(self) -> bool:
        """Send what the socket takes now; True while something is left. A reader that is gone gets nothing."""
        try:
            while self._waiting:
                rest, fd = self._waiting[0]
                sent = self._send(rest, fd)
                self._waiting.popleft()
                if sent < len(rest):
                    self._waiting.appendleft((rest[sent:], -1))
        except BlockingIOError:
            return True
        except OSError:
            self.close()
        return False

    def _send(self, rest: memoryview, fd: int) -> int:
        if fd < 0:
            return self._channel.send(rest)
        sent = socket.send_fds(self._channel, [rest], [fd])
        os.close(fd)
        return sent

    def close(self) -> None:
        for _, fd in self._waiting:
            if fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(fd)
        self._waiting.clear()
