"""Requests to a launcher that is running a job: `shoal resize`, `shoal kill`. One line of JSON in, one out.

The launcher listens on a socket whose name is not in a file system: it is made of the run folder's path and of a
random word in a file that only its owner can read. Nobody but that user (and root) is answered.
"""

import contextlib
import json
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Self

from shoal.spec.errors import UserError

MAX_LINE_BYTES = 16 << 10
MAX_CALLERS = 8
CALLER_SECONDS = 2.0
ANSWER_SECONDS = 5.0

Answer = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class RequestSocket:
    """The launcher's end. Nothing happens between calls of `look`, which never waits for a caller.

    `fileno` becomes readable when there is something to look at. Where the word cannot be kept (a full disk), nobody
    can call, and `problem` says why.
    """

    def __init__(self, run_dir: str) -> None:
        self.problem = ""
        self._word_path = _word_path(run_dir)
        self._selector = selectors.DefaultSelector()
        self._deadlines: dict[socket.socket, float] = {}
        self._listener: socket.socket | None = None
        try:
            self._listener = _listen(socket_name(run_dir, _make_word(self._word_path)))
            self._selector.register(self._listener, selectors.EVENT_READ)
        except OSError as error:
            self.problem = f"`shoal resize` and `shoal kill` will not reach this run: {error.strerror or error}"

    def fileno(self) -> int:
        return self._selector.fileno()

    def look(self, answer: Answer) -> None:
        """Take what callers have said and answer whole requests; `answer` may raise UserError."""
        for key, _ in self._selector.select(0):
            if key.fileobj is self._listener:
                while len(self._deadlines) < MAX_CALLERS and self._accept():
                    pass
            elif isinstance(key.fileobj, socket.socket):
                self._serve(key.fileobj, answer)
        for caller in [caller for caller, deadline in self._deadlines.items() if time.monotonic() > deadline]:
            self._drop(caller)
        self._watch_listener()

    def close(self) -> None:
        for caller in list(self._deadlines):
            self._drop(caller)
        if self._listener is not None:
            self._listener.close()
            with contextlib.suppress(OSError):
                os.unlink(self._word_path)
        self._selector.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> bool:
        assert self._listener is not None
        try:
            caller, _ = self._listener.accept()
        except OSError:
            return False
        if _user_of(caller) not in (os.geteuid(), 0):
            caller.close()
            return True
        caller.setblocking(False)
        self._deadlines[caller] = time.monotonic() + CALLER_SECONDS
        self._selector.register(caller, selectors.EVENT_READ)
        return True

    def _watch_listener(self) -> None:
        """Who finds no room waits in the kernel's queue, and is not looked at until there is some."""
        if self._listener is None:
            return
        is_watched = self._listener in self._selector.get_map()
        if len(self._deadlines) >= MAX_CALLERS and is_watched:
            self._selector.unregister(self._listener)
        elif len(self._deadlines) < MAX_CALLERS and not is_watched:
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _serve(self, caller: socket.socket, answer: Answer) -> None:
        """A request is one line that arrives at once: whoever sends less, or more, is not one of ours."""
        with contextlib.suppress(OSError):
            line = caller.recv(MAX_LINE_BYTES)
            if line.endswith(b"\n"):
                caller.send(json.dumps(_reply(line, answer)).encode() + b"\n")
        self._drop(caller)

    def _drop(self, caller: socket.socket) -> None:
        self._selector.unregister(caller)
        del self._deadlines[caller]
        caller.close()


def _reply(line: bytes, answer: Answer) -> Mapping[str, Any]:
    try:
        request = json.loads(line)
        if not isinstance(request, dict):
            raise UserError("The request is not a JSON object.")
        return {"answer": answer(request)}
    except UserError as error:
        return {"error": {"message": error.message, "why": error.why, "hint": error.hint}}
    except (ValueError, RecursionError):
        return {"error": {"message": "The request is not JSON."}}


def ask(run_dir: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """Ask the launcher of a run for something and return its answer; raises UserError where it refuses."""
    cannot = partial(UserError, f"The launcher of {os.path.basename(run_dir)} cannot be asked.")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as call:
        call.settimeout(ANSWER_SECONDS)
        try:
            call.connect(socket_name(run_dir, _read_word(_word_path(run_dir))))
            call.sendall(json.dumps(request).encode() + b"\n")
            reply = json.loads(_read_line(call) or b"null")
        except TimeoutError:
            raise cannot(
                why=f"it did not answer within {ANSWER_SECONDS:.0f} s",
                hint="if it is paused with Ctrl-Z, let it go on with `fg`",
            ) from None
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it does not speak as we do"
            raise cannot(
                why=f"{reason or error}", hint="ask on the machine and as the user that runs it, while it runs"
            ) from None
    if not isinstance(reply, dict):
        raise cannot(why="it ended the connection without an answer", hint="look at `shoal ps`; it may be over")
    if "error" in reply:
        raise UserError(**reply["error"])
    return dict(reply["answer"])


def _read_line(call: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\n") and (part := call.recv(MAX_LINE_BYTES)):
        data += part
    return data


def socket_name(run_dir: str, word: str) -> str:
    """The name of a run's socket; the leading zero keeps it out of the file system."""
    from hashlib import sha256

    return "\0shoal-" + sha256(f"{os.path.realpath(run_dir)}\0{word}".encode("utf-8", "surrogateescape")).hexdigest()


def _word_path(run_dir: str) -> str:
    return os.path.join(run_dir, "socket")


def _make_word(path: str) -> str:
    word = os.urandom(16).hex()
    # One that a killed launcher left may belong to another user, or be readable for others.
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(word)
    return word


def _read_word(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read(64)


def _listen(name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(name)
        listener.listen(8 * MAX_CALLERS)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def _user_of(caller: socket.socket) -> int:
    """The user at the other end, as the kernel knows it."""
    facts = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", facts)[1])
