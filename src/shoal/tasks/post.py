"""The launcher's side of the lines to workers: one socket and one cell a process."""

import contextlib
import os
import pickle
import selectors
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from shoal.tasks.cell import Cell, make_cell
from shoal.tasks.packing import Packed
from shoal.tasks.serve import serve
from shoal.tasks.wire import Inbox, Outbox, frame, receive


class Ready:
    """A pickle inside a pickle: it is loaded where the outer one is."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self._data,)


@dataclass(slots=True)
class Line:
    """The line to one process. `fds` are those it inherits; they are closed here once it has them."""

    worker: int
    incarnation: int
    channel: socket.socket
    cell: Cell
    fds: list[int]
    inbox: Inbox = field(default_factory=Inbox)
    is_told_later: bool = False
    is_over: bool = False
    outbox: Outbox = field(init=False)

    def __post_init__(self) -> None:
        self.outbox = Outbox(self.channel)


class Post:
    """All lines of a map. `fileno` becomes readable when there is something to `collect` or to send."""

    def __init__(self, header: bytes, function: bytes) -> None:
        self._header, self._function = header, function
        self._selector = selectors.DefaultSelector()
        self._lines: dict[int, Line] = {}
        self._nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)

    def fileno(self) -> int:
        return self._selector.fileno()

    def open(
        self, worker: int, incarnation: int, faults_dir: str | None = None
    ) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """A line to a process that is about to start: what `worker.py` is to run, and what it must inherit."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        cell_fd, call_fd = make_cell(), os.memfd_create("shoal-call")
        line = Line(worker, incarnation, ours, Cell(cell_fd), [theirs.detach(), cell_fd, call_fd])
        self._lines[worker] = line
        self._selector.register(ours, selectors.EVENT_READ, line)
        call: tuple[Any, ...] = (serve, (line.fds[0], cell_fd, Ready(self._function), worker, faults_dir), {})
        _write(call_fd, self._header + b"\n" + pickle.dumps(call, protocol=5))
        return ("call", str(call_fd), str(self._nowhere)), (*line.fds, self._nowhere)

    def started(self, worker: int) -> None:
        """The process has its ends of the line."""
        fds, self._lines[worker].fds = self._lines[worker].fds, []
        for fd in fds:
            os.close(fd)

    def send(self, worker: int, items: Iterable[tuple[int, Packed]]) -> None:
        """Send items; those with large buffers one by one."""
        line, small = self._lines[worker], []
        for number, packed in items:
            if packed.fd < 0:
                small.append((number, packed.data))
                continue
            line.outbox.put(frame(("item", number, packed.data, packed.spans), has_fd=True), packed.fd)
        if small:
            line.outbox.put(frame(("items", small)))
        self._flush(line)

    def take_back(self, worker: int) -> None:
        line = self._lines[worker]
        line.outbox.put(frame(("back",)))
        self._flush(line)

    def collect(self) -> Iterator[tuple[Line, Any, int]]:
        """What workers have said: the line, the message, and a descriptor or -1."""
        for key, events in self._selector.select(0):
            line: Line = key.data
            if events & selectors.EVENT_WRITE:
                self._flush(line)
            if events & selectors.EVENT_READ:
                yield from self._read(line)

    def close_line(self, worker: int) -> Iterator[tuple[Line, Any, int]]:
        """The last words of a process that has ended; then its line is gone."""
        line = self._lines.pop(worker, None)
        if line is None:
            return
        try:
            while (found := _receive(line)) is not None and found[0]:
                yield from ((line, message, fd) for message, fd in line.inbox.feed(*found))
        finally:
            self._close(line)

    def look(self) -> Iterator[tuple[Line, int | None, float]]:
        """The item each process is in, and since when."""
        for line in self._lines.values():
            yield line, *line.cell.read()

    def running(self, worker: int) -> tuple[int | None, int]:
        """The item that a process was in when it ended, and which process it was."""
        line = self._lines[worker]
        return line.cell.read()[0], line.incarnation

    def hang_up(self) -> None:
        """Let workers end: they see that nothing more comes."""
        for line in self._lines.values():
            line.outbox.close()
            with contextlib.suppress(OSError):
                line.channel.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for worker in list(self._lines):
            self._close(self._lines.pop(worker))
        self._selector.close()
        os.close(self._nowhere)

    def _read(self, line: Line) -> Iterator[tuple[Line, Any, int]]:
        found = _receive(line)
        if found is not None and found[0]:
            yield from ((line, message, fd) for message, fd in line.inbox.feed(*found))
        elif found is not None:
            # Its end will be reported by the engine; until then it would only keep us awake.
            line.is_over = True
            self._selector.unregister(line.channel)

    def _flush(self, line: Line) -> None:
        is_waiting = line.outbox.flush()
        if is_waiting != line.is_told_later and not line.is_over:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if is_waiting else 0)
            self._selector.modify(line.channel, events, line)
            line.is_told_later = is_waiting

    def _close(self, line: Line) -> None:
        if not line.is_over:
            self._selector.unregister(line.channel)
        line.outbox.close()
        line.inbox.close()
        line.channel.close()
        line.cell.close()
        for fd in line.fds:
            os.close(fd)


def _receive(line: Line) -> tuple[bytes, list[int]] | None:
    """What has arrived, nothing (no bytes) where nothing more will, None where nothing has."""
    try:
        return receive(line.channel)
    except BlockingIOError:
        return None
    except OSError:
        return b"", []


def _write(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]
