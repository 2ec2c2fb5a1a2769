"""Runs that somebody looks at: their readers stay open, so that looking again reads only what is new."""

import contextlib
import ctypes
import os
import re
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from shoal.dash.heat import HeatMap
from shoal.observe.journal import JournalReader
from shoal.observe.metrics import decode, decode_past, list_ranks, metrics_path
from shoal.observe.runs import RunInfo
from shoal.observe.segments import SegmentReader
from shoal.observe.series import Series, SeriesReader
from shoal.observe.system import SystemReader
from shoal.spec.event import Event
from shoal.spec.system import SystemSample

MAX_OPEN = 8
IDLE_SECONDS = 60.0
MAX_SAMPLES = 7200
MAX_EVENTS = 50_000

T = TypeVar("T")

Signature = dict[str, tuple[Any, ...]]

_PART_OF = (
    (re.compile(r"run\.json|lock|socket"), "status"),
    (re.compile(r"journal.*"), "events"),
    (re.compile(r"(metrics|points).*"), "series"),
    (re.compile(r"system-.*"), "system"),
    (re.compile(r"checkpoints.*"), "checkpoints"),
)


class OpenRun:
    """The readers of one run folder. Each is made when it is first wanted, and used by one thread at a time."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.used_at = time.monotonic()
        self._series = _Guarded(SeriesReader(path))
        self._heat = _Guarded(_HeatReader(path))
        self._events = _Guarded(_EventReader(path))
        self._system = _Guarded(_Samples(path))

    def names(self) -> list[str]:
        with self._series as reader:
            return reader.names()

    def series(self, names: Sequence[str], max_points: int, first: int | None, last: int | None) -> dict[str, Series]:
        with self._series as reader:
            return reader.read(names, max_points=max_points, first_step=first, last_step=last)

    def heat(self, quantity: str, max_columns: int) -> dict[str, Any]:
        with self._heat as reader:
            return reader.read().grid(quantity, max_columns)

    def events(self) -> Sequence[Event]:
        with self._events as reader:
            return reader.read()

    def system(self) -> Mapping[str, Sequence[SystemSample]]:
        with self._system as samples:
            return samples.read()


class _Guarded(Generic[T]):
    """A reader and the lock that it is used under."""

    def __init__(self, reader: T) -> None:
        self._reader = reader
        self._lock = threading.Lock()

    def __enter__(self) -> T:
        self._lock.acquire()
        return self._reader

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class _HeatReader:
    """Follows the metrics of all ranks, a megabyte at a time: all of them would take much memory."""

    def __init__(self, run_dir: str) -> None:
        self._run_dir = run_dir
        self._files: dict[int, SegmentReader] = {}
        self._heat = HeatMap()

    def read(self) -> HeatMap:
        for rank in list_ranks(self._run_dir):
            file = self._files.setdefault(rank, SegmentReader(metrics_path(self._run_dir, rank)))
            for block in file.read_new():
                if block.is_past:
                    # It holds all that came before, of which some may be known already.
                    self._heat.forget(rank)
                self._heat.add(rank, (decode_past if block.is_past else decode)(block.lines)[0])
        return self._heat


class _EventReader:
    """All events so far."""

    def __init__(self, run_dir: str) -> None:
        self._reader = JournalReader(run_dir)
        self._events: list[Event] = []

    def read(self) -> list[Event]:
        # A new list: whoever got the one before may still go through it in another thread.
        if news := self._reader.read_new():
            self._events = [*self._events, *news][-MAX_EVENTS:]
        return self._events


class _Samples:
    """The newest two hours of every node."""

    def __init__(self, run_dir: str) -> None:
        self._reader = SystemReader(run_dir)
        self._samples: dict[str, deque[SystemSample]] = {}

    def read(self) -> dict[str, list[SystemSample]]:
        for node, samples in self._reader.read_new().items():
            self._samples.setdefault(node, deque(maxlen=MAX_SAMPLES)).extend(samples)
        return {node: list(samples) for node, samples in sorted(self._samples.items())}


class OpenRuns:
    """The runs that were looked at last. Those that nobody looks at any more are let go of, and their memory."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, OpenRun] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, path: str) -> OpenRun:
        with self._lock:
            run = self._open.pop(path, None) or OpenRun(path)
            run.used_at = time.monotonic()
            self._open[path] = run
            while len(self._open) > MAX_OPEN:
                self._open.popitem(last=False)
            return run

    def let_go(self) -> bool:
        """Close what was not used for a minute, and give its memory back; whether something stays open."""
        with self._lock:
            old = [path for path, run in self._open.items() if time.monotonic() - run.used_at > IDLE_SECONDS]
            for path in old:
                del self._open[path]
            stays = bool(self._open)
        if old:
            _give_back()
        return stays


def _give_back() -> None:
    """Have the C library return what is free to the system, where it is one that can."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def sign(run: RunInfo | None, path: str) -> Signature:
    """What a run folder looks like, part by part: where a part's value differs from before, it has news."""
    parts: dict[str, list[tuple[int, ...]]] = {}
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                part = next((part for pattern, part in _PART_OF if pattern.fullmatch(entry.name)), "")
                if part:
                    parts.setdefault(part, []).append(_stamp(entry.path))
    except OSError:
        return {"status": ("gone",)}
    logs = os.path.join(path, "logs")
    try:
        with os.scandir(logs) as entries:
            parts["logs"] = [_stamp(entry.path) for entry in entries if entry.name.endswith(".log")]
    except OSError:
        parts["logs"] = []
    signature: Signature = {part: tuple(sorted(stamps)) for part, stamps in parts.items()}
    signature["status"] = (*signature.get("status", ()), run.status if run else "")
    return signature


def _stamp(path: str) -> tuple[int, ...]:
    try:
        facts = os.stat(path)
    except OSError:
        return ()
    return facts.st_ino, facts.st_size, facts.st_mtime_ns
