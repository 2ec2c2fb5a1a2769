"""The worker's side of `shoal.map`: items come, the function is called, results go."""

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shoal.spec.errors import Retryable, ShoalError
from shoal.tasks.cell import Cell
from shoal.tasks.packing import Packed, cannot_send, pack, unpack
from shoal.tasks.wire import Inbox, frame, receive

if TYPE_CHECKING:
    from shoal.train.faulty import FaultPlan

FLUSH_SECONDS = 0.005
"""Results wait for each other this long at most, and never while there is nothing else to do."""

OK, ERROR, RETRY = 0, 1, 2


def serve(channel_fd: int, cell_fd: int, function: Callable[[Any], Any], worker: int, faults_dir: str | None) -> None:
    """Call the function for every item that comes until the launcher hangs up.

    `faults_dir` is the run folder where something is to go wrong on purpose; else None.
    Items are worked on in the main thread. Another one takes the mail meanwhile, so that a worker that is busy can
    give back what it has not begun, and tell what it has done.
    """
    for fd in (channel_fd, cell_fd):
        os.set_inheritable(fd, False)
    with socket.socket(fileno=channel_fd) as channel:
        cell = Cell(cell_fd)
        os.close(cell_fd)
        desk = Desk(channel, cell, function, _read_faults(worker, faults_dir) if faults_dir else None)
        threading.Thread(target=desk.take_mail, name="shoal-mail", daemon=True).start()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the launcher needs nothing more
            desk.work()
        cell.close()


def _read_faults(worker: int, run_dir: str) -> "FaultPlan | None":
    from dataclasses import replace

    from shoal.engine.env import read_worker
    from shoal.train.faulty import read_faults

    return read_faults(replace(read_worker(), rank=worker), run_dir)


class Desk:
    """What has come and is not begun, and what is done and not sent."""

    def __init__(
        self, channel: socket.socket, cell: Cell, function: Callable[[Any], Any], faults: "FaultPlan | None"
    ) -> None:
        self._channel, self._cell, self._function, self._faults = channel, cell, function, faults
        self._todo: queue.SimpleQueue[tuple[int, Packed] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._done: list[tuple[int, int, Any]] = []
        self._seconds = 0.0
        self._send(frame(("ready",)))

    def work(self) -> None:
        flushed = time.monotonic()
        while (task := self._next()) is not None:
            begun = time.monotonic()
            outcome = self._run(*task, begun)
            now = time.monotonic()
            self._keep(task[0], outcome, now - begun)
            if now - flushed > FLUSH_SECONDS:
                self._flush()
                flushed = now

    def take_mail(self) -> None:
        inbox = Inbox()
        with contextlib.suppress(OSError):
            while (mail := receive(self._channel))[0]:
                for message, fd in inbox.feed(*mail):
                    self._read(message, fd)
        inbox.close()
        self._todo.put(None)

    def _read(self, message: Any, fd: int) -> None:
        if message[0] == "items":
            for number, data in message[1]:
                self._todo.put((number, Packed(data)))
        elif message[0] == "item":
            _, number, data, spans = message
            self._todo.put((number, Packed(data, spans, fd)))
        else:
            self._give_back()

    def _give_back(self) -> None:
        numbers = []
        with contextlib.suppress(queue.Empty):
            while (task := self._todo.get_nowait()) is not None:
                numbers.append(task[0])
                task[1].close()
        self._flush()
        self._send(frame(("returned", tuple(numbers))))

    def _next(self) -> tuple[int, Packed] | None:
        try:
            return self._todo.get_nowait()
        except queue.Empty:
            self._flush()
            return self._todo.get()

    def _run(self, number: int, packed: Packed, begun: float) -> tuple[int, Any]:
        """Call the function for one item: how that went, and what is to be sent."""
        self._cell.enter(number, begun)
        try:
            try:
                item = unpack(packed)
            finally:
                packed.close()
            if self._faults is not None:
                self._faults.reach("start", number)
                self._faults.reach("forward", number)
            value = self._function(item)
            if self._faults is not None:
                self._faults.reach("updated", number)
        except Retryable as error:
            return RETRY, f"{type(error).__name__}: {error}"
        except (Exception, SystemExit) as error:
            return ERROR, _describe(error)
        try:
            return OK, pack(value)
        except Exception as error:
            return ERROR, _describe(cannot_send(f"The {type(value).__name__} that was returned", error))

    def _keep(self, number: int, outcome: tuple[int, Any], seconds: float) -> None:
        kind, value = outcome
        is_large = kind == OK and value.fd >= 0
        with self._lock:
            self._seconds += seconds
            if not is_large:
                self._done.append((number, kind, value.data if kind == OK else value))
                # Whoever finds us dead from here on need not blame this item, only do it again.
                self._cell.leave()
        if is_large:
            self._send(frame(("large", number, value.data, value.spans), has_fd=True), value.fd)
            self._cell.leave()
            value.close()

    def _flush(self) -> None:
        with self._lock:
            done, self._done = self._done, []
            seconds, self._seconds = self._seconds, 0.0
            if done:
                self._write(frame(("done", done, seconds)))

    def _send(self, data: bytes, fd: int = -1) -> None:
        with self._lock:
            self._write(data, fd)

    def _write(self, data: bytes, fd: int = -1) -> None:
        rest = memoryview(data)
        if fd >= 0:
            rest = rest[socket.send_fds(self._channel, [rest], [fd]) :]
        self._channel.sendall(rest)


def _describe(error: BaseException) -> dict[str, Any]:
    """An error as facts, with the exception itself where it can be sent."""
    from shoal.spec.where import format_error, place_of

    facts: dict[str, Any] = {
        "type": type(error).__qualname__,
        "message": _text(error)[:4000],
        "where": place_of(error),
        "traceback": format_error(error)[-20000:],
        "pickle": None,
    }
    if isinstance(error, ShoalError):
        facts |= {"why": error.why, "hint": error.hint, "is_ours": True, "where": error.where or facts["where"]}
    with contextlib.suppress(Exception):  # one that cannot be pickled is told in words
        error.__traceback__ = None
        packed = pack(error)
        facts["pickle"] = packed.data if packed.fd < 0 else None
        packed.close()
    return facts


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as failure:  # a user's __str__ may do anything
        return f"<no text: {type(failure).__name__}>"
