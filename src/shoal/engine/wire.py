"""The connection between a launcher and its agents: frames that nobody else can make, and a secret that stays home.

Whoever can start workers can run anything, so each side proves that it knows the token before the other listens to
it, and every frame carries a code that depends on the token, on its direction and on its number. What is sent can be
read by whoever listens on the network; it cannot be changed, repeated or made up.
"""

import contextlib
import hmac
import os
import secrets
import socket
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import msgspec

MAX_FRAME_BYTES = 2 << 30
CODE_BYTES = 16
HANDSHAKE_SECONDS = 10.0
CONNECT_SECONDS = 4.0
READ_BYTES = 1 << 18
_HEAD = struct.Struct("!I")
_HELLO = b"shoal-agent-1\n"


class Refused(Exception):
    """The other side is not who it should be, or does not speak as we do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """How an agent finds its launcher: where it listens, and what proves that both belong to one run."""

    host: str
    port: int
    token: str

    @staticmethod
    def new(host: str, port: int) -> "Invitation":
        return Invitation(host=host, port=port, token=secrets.token_hex(32))


class Line:
    """A connection whose other side has proved who it is. Messages are lists of plain values and bytes.

    `put` and `flush` may be called by any thread, and by a signal handler in the middle of themselves: messages wait
    as they are, and become frames one after the other, when they are sent.
    """

    def __init__(self, connection: socket.socket, send_key: bytes, receive_key: bytes) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._send_key, self._receive_key = send_key, receive_key
        self._num_sent = self._num_received = 0
        self.num_heard_bytes = 0
        self._waiting: deque[bytes] = deque()
        self._frame = memoryview(b"")
        self._sending = threading.Lock()
        self._rest = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def address(self) -> str:
        """Our own address, as the other side sees it."""
        return str(self._socket.getsockname()[0])

    @property
    def peer_address(self) -> str:
        return str(self._socket.getpeername()[0])

    @property
    def num_waiting_bytes(self) -> int:
        """What was put and not sent, without what frames add."""
        return len(self._frame) + sum(map(len, list(self._waiting)))

    def put(self, message: list[Any]) -> None:
        """Take a message to be sent with the next `flush`. Never waits."""
        self._waiting.append(msgspec.msgpack.encode(message))

    def flush(self) -> bool:
        """Send what the network takes now; True while something is left. Raises OSError where the peer is gone."""
        while self._frame or self._waiting:
            if not self._sending.acquire(blocking=False):
                return True  # whoever sends goes on until nothing is left
            try:
                if not self._send_some():
                    return True
            finally:
                self._sending.release()
        return False

    def _send_some(self) -> bool:
        """Send a part of the oldest message; False where the network takes nothing."""
        if not self._frame:
            if not self._waiting:
                return True
            body = self._waiting.popleft()
            self._frame = memoryview(_HEAD.pack(len(body)) + _code(self._send_key, self._num_sent, body) + body)
            self._num_sent += 1
        try:
            sent = self._socket.send(self._frame)
        except BlockingIOError:
            return False
        self._frame = self._frame[sent:]
        return True

    def receive(self) -> list[list[Any]]:
        """Messages that have arrived, of so many bytes at most that nobody else has to wait for long.

        Raises EOFError at the end, Refused where something is not the other side's.
        """
        try:
            data = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return []
        if not data:
            raise EOFError
        self.num_heard_bytes += len(data)
        self._rest += data
        return self._cut()

    def _cut(self) -> list[list[Any]]:
        messages, place = [], 0
        head = _HEAD.size + CODE_BYTES
        while len(self._rest) - place >= head:
            (size,) = _HEAD.unpack_from(self._rest, place)
            if size > MAX_FRAME_BYTES:
                raise Refused(f"a frame of {size} bytes")
            if len(self._rest) - place < head + size:
                break
            code = bytes(self._rest[place + _HEAD.size : place + head])
            body = bytes(self._rest[place + head : place + head + size])
            if not hmac.compare_digest(code, _code(self._receive_key, self._num_received, body)):
                raise Refused("a frame that the other side did not send")
            self._num_received += 1
            place += head + size
            messages.append(msgspec.msgpack.decode(body))
        del self._rest[:place]
        return messages

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()


def _code(key: bytes, number: int, body: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + body, "sha256")[:CODE_BYTES]


class Greeting:
    """The launcher's side of a handshake, which never waits: call `step` whenever something can be read."""

    def __init__(self, connection: socket.socket, token: str) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self._token = connection, token.encode()
        self._nonce = os.urandom(32)
        self._heard = b""
        self.until = time.monotonic() + HANDSHAKE_SECONDS
        connection.send(_HELLO + self._nonce)

    def step(self) -> Line | None:
        """The line, once the other side has proved itself. Raises Refused, EOFError or OSError."""
        try:
            data = self.socket.recv(len(_HELLO) + 64 - len(self._heard))
        except BlockingIOError:
            return None
        if not data:
            raise EOFError
        self._heard += data
        if not _HELLO.startswith(self._heard[: len(_HELLO)]):
            raise Refused("it is no agent of this version")
        if len(self._heard) < len(_HELLO) + 64:
            return None
        theirs, proof = self._heard[len(_HELLO) : -32], self._heard[-32:]
        both = self._nonce + theirs
        if not hmac.compare_digest(proof, hmac.digest(self._token, b"agent" + both, "sha256")):
            raise Refused("it does not know the token of this run")
        self.socket.send(hmac.digest(self._token, b"launcher" + both, "sha256"))
        return Line(self.socket, _key(self._token, b"down", both), _key(self._token, b"up", both))


def call_launcher(invitation: Invitation, timeout_seconds: float = HANDSHAKE_SECONDS) -> Line:
    """The agent's side: connect, prove that we were invited, and see that the launcher invited us.

    Raises OSError where nobody can be reached, Refused where it is somebody else.
    """
    token, nonce = invitation.token.encode(), os.urandom(32)
    deadline = time.monotonic() + timeout_seconds
    connection = socket.create_connection((invitation.host, invitation.port), timeout=CONNECT_SECONDS)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello = _read(connection, len(_HELLO) + 32, deadline)
        if not hello.startswith(_HELLO):
            raise Refused("there is no launcher of this version of shoal")
        both = hello[len(_HELLO) :] + nonce
        connection.sendall(_HELLO + nonce + hmac.digest(token, b"agent" + both, "sha256"))
        if not hmac.compare_digest(_read(connection, 32, deadline), hmac.digest(token, b"launcher" + both, "sha256")):
            raise Refused("the launcher does not know the token of this run")
        return Line(connection, _key(token, b"up", both), _key(token, b"down", both))
    except BaseException:
        connection.close()
        raise


def _read(connection: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        part = connection.recv(size - len(data))
        if not part:
            raise Refused("the launcher hung up: is the token the one of this run?")
        data += part
    return data


def _key(token: bytes, direction: bytes, both: bytes) -> bytes:
    return hmac.digest(token, direction + both, "sha256")
