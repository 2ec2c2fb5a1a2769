"""What `shoal top` shows, read from run folders again and again at a cost that does not grow with them."""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from shoal.observe import journal, metrics
from shoal.observe.log_parts import last_log_lines, log_path
from shoal.observe.ps import newest_items, newest_members
from shoal.observe.runs import RunInfo, is_held, list_logs, read_run
from shoal.observe.segments import newest_lines
from shoal.observe.turns import step_seconds
from shoal.spec.event import Event, StepMetrics

MAX_ENDED = 100
"""Of runs that are over, the newest so many are read; the others are only counted."""
LOOK_AGAIN = 64
"""How many of the others are looked at each time, in case one was resumed."""
TAIL_STEPS = 24
TAIL_BYTES = 1 << 13
"""What is read of each rank's metrics, at a time."""
PARTS = ("compute", "communicate", "wait", "load")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLine:
    """What a rank did last. Durations are means over its last steps, `shares` parts of them.

    `cpu` is how many cores it keeps busy and `rss` its memory in bytes, where that is known.
    """

    rank: int
    step: int
    time: float
    step_seconds: float
    shares: Mapping[str, float]
    num_samples: int
    waited_for: int | None
    is_member: bool = True
    cpu: float | None = None
    rss: int | None = None
    node: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLine:
    """A machine, as it said last. `cpu` is in cores, everything else in bytes, or bytes a second."""

    node: str
    time: float
    cores: float | None = None
    cpu: float | None = None
    memory_used: float | None = None
    memory_total: float | None = None
    net_in: float | None = None
    net_out: float | None = None
    disk_free: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLine:
    """One run now. `step` is how many steps are done; `since` how many seconds ago the newest was, and `history` how
    long the newest ones took."""

    run: RunInfo
    seconds: float | None = None
    step: int | None = None
    loss: float | None = None
    step_seconds: float | None = None
    samples_per_second: float | None = None
    since: float | None = None
    ranks: tuple[RankLine, ...] = ()
    nodes: tuple[NodeLine, ...] = ()
    members: tuple[str, ...] | None = None
    items: tuple[int, int | None] | None = None
    history: tuple[float, ...] = ()

    @property
    def is_running(self) -> bool:
        return self.run.status == "running"

    @property
    def memory(self) -> float | None:
        """Bytes that its workers have."""
        known = [rank.rss for rank in self.ranks if rank.rss is not None]
        return float(sum(known)) if known else None

    @property
    def network(self) -> float | None:
        """Bytes a second that its machines receive and send."""
        known = [(node.net_in or 0.0) + (node.net_out or 0.0) for node in self.nodes if node.net_in is not None]
        return sum(known) if known else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All runs at one moment, those that run first. `num_older` are over, and not looked at."""

    home: str
    time: float
    runs: tuple[RunLine, ...] = ()
    num_older: int = 0


@dataclass(slots=True)
class _Known:
    """A run folder as it was when it was last looked at. `stamp` tells whether run.json is still the same."""

    path: str
    stamp: tuple[int, int] = (0, 0)
    info: RunInfo | None = None
    is_held: bool = False
    journal_size: int = -1
    members: tuple[str, ...] | None = None
    items: tuple[int, int | None] | None = None
    tails: dict[int, tuple[int, list[StepMetrics]]] = field(default_factory=dict)
    line: RunLine | None = None

    def look(self) -> bool:
        """Whether it has begun or ended, or is another run than it was."""
        stamp = _stamp(os.path.join(self.path, "run.json"))
        if stamp == self.stamp and not self.is_held:
            return False
        was_held, self.is_held = self.is_held, is_held(self.path)
        is_other = stamp != self.stamp or was_held != self.is_held
        self.stamp = stamp
        if is_other:
            self.info = self.line = None
        return is_other


class Reader:
    """Reads the runs under `home`. The first look costs some microseconds a run, later ones only what has changed."""

    def __init__(self, home: str, also: str | None = None) -> None:
        """`also` is the path of a run that may be elsewhere."""
        self.home = home
        self._also = also if also and os.path.dirname(os.path.realpath(also)) != _runs_of(home) else None
        self._known: dict[str, _Known] = {}
        self._listed_at = (0, 0)
        self._live: list[_Known] = []
        self._ended: list[_Known] = []
        self._next = 0

    def read(self, now: float | None = None) -> Snapshot:
        now = time.time() if now is None else now
        folder = os.path.join(self.home, "runs")
        stamp = _stamp(folder)
        if self._look_again() or stamp != self._listed_at:
            self._listed_at = stamp
            self._list(folder)
        shown = (*self._live, *self._ended[:MAX_ENDED])
        lines = [line for known in shown if (line := _read_line(known, now)) is not None]
        num_older = max(0, len(self._ended) - MAX_ENDED)
        return Snapshot(home=self.home, time=now, runs=tuple(sort_runs(lines, "newest")), num_older=num_older)

    def _list(self, folder: str) -> None:
        try:
            names = set(os.listdir(folder))
        except OSError:
            names = set()
        if self._also is not None:
            names.add(self._also)  # joined to the folder, an absolute path is itself
        for name in self._known.keys() - names:
            del self._known[name]
        for name in names - self._known.keys():
            self._known[name] = known = _Known(os.path.join(folder, name))
            known.look()
        self._live = [known for known in self._known.values() if known.is_held]
        self._ended = [known for known in self._known.values() if not known.is_held]
        self._ended.sort(key=lambda known: known.stamp, reverse=True)

    def _look_again(self) -> bool:
        """See whether those that run still do, and whether some of the others run again; True where one changed."""
        begin = self._next if self._next < len(self._ended) else MAX_ENDED
        self._next = begin + LOOK_AGAIN
        others = (*self._ended[:MAX_ENDED], *self._ended[begin : self._next])
        changed = [known for known in (*self._live, *others) if known.look()]
        return bool(changed)


def _runs_of(home: str) -> str:
    return os.path.realpath(os.path.join(home, "runs"))


def _stamp(path: str) -> tuple[int, int]:
    try:
        facts = os.stat(path)
    except OSError:
        return 0, 0
    return facts.st_mtime_ns, facts.st_ino


def _read_line(known: _Known, now: float) -> RunLine | None:
    """A run that is over is read once; one that runs, every time."""
    if known.line is not None and not known.is_held:
        return known.line
    if known.info is None:
        known.info = read_run(known.path)
    if known.info is None:
        return None
    known.line = read_line(known.info, now, known)
    return known.line


def read_line(info: RunInfo, now: float, known: _Known | None = None) -> RunLine:
    """What a run folder says now. `known` keeps what need not be read again."""
    known = known or _Known(info.path)
    size = _size(os.path.join(info.path, "journal.jsonl"))
    if size != known.journal_size:
        known.journal_size = size
        known.members = newest_members(info.path) if info.max_workers is not None else None
        known.items = newest_items(info.path) if info.command.startswith("shoal.map ") else None
    rows_of = _newest_rows(info.path, known.tails)
    nodes, workers = _read_nodes(info.path)
    is_running = info.status == "running"
    ended = now if is_running else info.ended
    newest = max((rows[-1] for rows in rows_of.values()), key=lambda row: (row.step, row.time), default=None)
    lead = max(rows_of.values(), key=lambda rows: (rows[-1].time, len(rows)), default=[])
    pace = _pace(lead)
    return RunLine(
        run=info,
        seconds=None if ended is None else max(0.0, ended - info.created),
        step=None if newest is None else newest.step + 1,
        loss=None if newest is None else newest.loss,
        step_seconds=pace,
        samples_per_second=newest.global_samples / pace if newest is not None and pace else None,
        since=max(0.0, now - newest.time) if newest is not None and is_running else None,
        ranks=tuple(_rank_line(rank, rows, known.members, workers) for rank, rows in sorted(rows_of.items())),
        nodes=tuple(nodes),
        members=known.members,
        items=known.items,
        history=tuple(step_seconds(row) for row in lead[-60:]),
    )


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _newest_rows(run_dir: str, tails: dict[int, tuple[int, list[StepMetrics]]]) -> dict[int, list[StepMetrics]]:
    """The newest steps of each rank; `tails` keeps those of files that have not grown."""
    for rank in metrics.list_ranks(run_dir):
        path = metrics.metrics_path(run_dir, rank)
        size = _size(path)
        if rank not in tails or tails[rank][0] != size:
            tails[rank] = size, metrics.decode(newest_lines(path, TAIL_STEPS, block_bytes=TAIL_BYTES))[0]
    return {rank: rows for rank, (_, rows) in tails.items() if rows}


def _pace(rows: Sequence[StepMetrics]) -> float | None:
    """Seconds from one step to the next, over the newest ones: what is between steps counts, long pauses do not."""
    rows = rows[-20:]
    if len(rows) < 2:
        return step_seconds(rows[0]) if rows else None
    gaps = sorted(after.time - before.time for before, after in pairwise(rows))
    middle = gaps[len(gaps) // 2]
    return middle if middle > 0 else None


def _rank_line(
    rank: int,
    rows: Sequence[StepMetrics],
    members: Sequence[str] | None,
    workers: Mapping[int, tuple[str, Mapping[str, Any]]],
) -> RankLine:
    rows = rows[-20:]
    total = sum(map(step_seconds, rows))
    node, facts = workers.get(rank, ("", {}))
    late = [row.waited_for for row in rows if row.waited_for is not None]
    return RankLine(
        rank=rank,
        step=rows[-1].step + 1,
        time=rows[-1].time,
        step_seconds=total / len(rows),
        shares={name: sum(getattr(row, name) for row in rows) / total if total > 0 else 0.0 for name in PARTS},
        num_samples=rows[-1].num_samples,
        waited_for=max(set(late), key=late.count) if late else None,
        is_member=members is None or any(each.partition(".")[0] == str(rank) for each in members),
        cpu=_number(facts.get("cpu")),
        rss=None if (rss := _number(facts.get("rss"))) is None else int(rss),
        node=node,
    )


def _read_nodes(run_dir: str) -> tuple[list[NodeLine], dict[int, tuple[str, Mapping[str, Any]]]]:
    """The newest that each machine has said of itself, and of the workers on it."""
    nodes: list[NodeLine] = []
    workers: dict[int, tuple[str, Mapping[str, Any]]] = {}
    for sample in _newest_samples(run_dir):
        node = str(sample.get("node", ""))
        values = {name: _number(sample.get(name)) for name in NodeLine.__slots__ if name not in ("node", "time")}
        nodes.append(NodeLine(node=node, time=_number(sample.get("time")) or 0.0, **values))
        own = sample.get("workers")
        for rank, facts in own.items() if isinstance(own, dict) else ():
            if str(rank).isdecimal() and isinstance(facts, dict):
                workers[int(rank)] = node, facts
    return nodes, workers


def _newest_samples(run_dir: str) -> Iterator[Mapping[str, Any]]:
    try:
        names = sorted(name for name in os.listdir(run_dir) if name.startswith("system-") and name.endswith(".jsonl"))
    except OSError:
        return
    for name in names:
        lines = newest_lines(os.path.join(run_dir, name), 2, block_bytes=4096)
        for line in reversed(lines.split(b"\n")):
            try:
                sample = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(sample, dict):
                yield sample
                break


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and value - value == 0 else None


def newest_events(run_dir: str, num_events: int) -> list[Event]:
    """The last things that happened in a run, the oldest first."""
    lines = newest_lines(os.path.join(run_dir, "journal.jsonl"), num_events)
    return [event for line in lines.split(b"\n") if line and (event := journal.decode(line)) is not None]


def newest_log(run_dir: str, num_lines: int, rank: int | None = None) -> list[tuple[int, str]]:
    """The last lines that each rank printed, rank by rank; a rank has its part of the lines."""
    ranks = [each for each in list_logs(run_dir) if rank is None or each == rank]
    each_has = max(1, num_lines // max(1, len(ranks)))
    found: list[tuple[int, str]] = []
    for number in ranks:
        data, _ = last_log_lines(log_path(run_dir, number), each_has)
        found += [(number, line.decode("utf-8", "replace")) for line in data.rstrip(b"\n").split(b"\n") if line]
    return found[-max(0, num_lines) :] if num_lines else []


def sort_runs(lines: Iterable[RunLine], order: str) -> list[RunLine]:
    """Runs by what matters; those that run always stand before those that are over."""
    value = _ORDERS[order]
    return sorted(lines, key=lambda line: (not line.is_running, -(value(line) or 0.0), line.run.name))


_ORDERS: dict[str, Callable[[RunLine], float | None]] = {
    "newest": lambda line: line.run.created,
    "name": lambda line: 0.0,
    "step time": lambda line: line.step_seconds,
    "speed": lambda line: line.samples_per_second,
    "memory": lambda line: line.memory,
}
ORDERS = tuple(_ORDERS)
