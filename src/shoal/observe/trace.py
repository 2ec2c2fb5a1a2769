"""A run as trace events, for Perfetto and chrome://tracing. Pure: events and metrics in, plain dictionaries out.

The format is Google's "Trace Event Format": `X` is a slice, `i` an instant, `C` a counter, `b` and `e` the ends of
something that may overlap with others, `s` and `f` those of an arrow, `M` a name. Times are microseconds since the
first event of the run, by the launcher's clock.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from shoal.observe.clean import one_line
from shoal.observe.clocks import Clocks, find_clocks
from shoal.observe.history import tell_history
from shoal.observe.timeline import find_eras
from shoal.observe.turns import Turn, merge_turns, step_seconds
from shoal.spec.event import Event, StepMetrics
from shoal.spec.system import SystemSample

RUN_PID = 1
FIRST_RANK_PID = 2
FIRST_NODE_PID = 1_000_000
STEPS, INSIDE, PROCESS, EVENTS, WORLDS, BESIDE = range(1, 7)
"""Threads, as viewers call the lines of a process."""

ARROW_SHARE = 0.05
"""Waits that take a smaller part of their step get no arrow: every step has some."""

_SHOWN_OTHERWISE = frozenset({"checkpoint_saved", "world", "worker_started", "worker_exited", "clock", "progress"})
_FOR_ALL = frozenset({"fault", "alert", "worker_lost", "worker_hung", "worker_frozen", "error", "run_ended"})

TraceEvent = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """What a run folder has. `spans` are what ranks recorded inside of steps, `samples` what machines measured of
    themselves, by name."""

    name: str
    events: Sequence[Event]
    metrics: Mapping[int, Sequence[StepMetrics]]
    spans: Mapping[int, Sequence["Span"]] = field(default_factory=dict)
    samples: Mapping[str, Sequence[SystemSample]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something a rank did inside of a step, by its own clock. `kind` is its sort: wait, bucket, forward, ..."""

    name: str
    kind: str
    start: float
    seconds: float
    step: int
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Window:
    """The steps that are wanted, from `first` to before `last`; None is without bound."""

    first: int | None = None
    last: int | None = None

    @property
    def is_all(self) -> bool:
        return self.first is None and self.last is None

    def has(self, step: int) -> bool:
        return (self.first is None or step >= self.first) and (self.last is None or step < self.last)


def trace_run(material: Material, window: Window | None = None) -> Iterator[TraceEvent]:
    """Everything that is known of a run, or of the time of some of its steps."""
    window = window or Window()
    clocks = find_clocks(material.events)
    events = [clocks.align(event) for event in material.events]
    every = {rank: clocks.align_steps(rank, rows) for rank, rows in material.metrics.items()}
    metrics = {rank: [row for row in rows if window.has(row.step)] for rank, rows in every.items()}
    turns = merge_turns(every, events)
    scale = _make_scale(events, metrics, window, clocks)
    yield from _names(material)
    yield from _lives(events, scale)
    yield from _worlds(events, turns, scale)
    yield from _instants(events, scale)
    yield from _checkpoints(events, scale)
    for rank, rows in metrics.items():
        yield from _steps(rank, rows, scale)
    yield from _arrows(metrics, scale)
    for rank, spans in material.spans.items():
        yield from _spans(rank, [span for span in spans if window.has(span.step)], scale)
    yield from _curves([turn for turn in turns if window.has(turn.step)], scale)
    for number, (_, samples) in enumerate(sorted(material.samples.items())):
        yield from _counters(FIRST_NODE_PID + number, samples, scale)


@dataclass(frozen=True, slots=True)
class _Scale:
    """From seconds since 1970 to the microseconds of the trace; and what of it is wanted."""

    zero: float
    begin: float
    end: float
    clocks: Clocks

    def at(self, moment: float) -> float:
        return micros(moment - self.zero)

    def has(self, begin: float, end: float | None = None) -> bool:
        """Whether something that lasted from `begin` to `end`, in microseconds, is to be seen."""
        low, high = micros(self.begin - self.zero), micros(self.end - self.zero)
        return begin <= high and (begin if end is None else end) >= low


def micros(seconds: float) -> float:
    return round(1e6 * seconds, 3)


def _make_scale(
    events: Sequence[Event], metrics: Mapping[int, Sequence[StepMetrics]], window: Window, clocks: Clocks
) -> _Scale:
    """Time begins with the first event, or the first step; wanted is everything, or the time of some steps."""
    moments = [event.time for event in events]
    starts = [row.time - step_seconds(row) for rows in metrics.values() for row in rows]
    ends = [row.time for rows in metrics.values() for row in rows]
    zero = min([*moments, *starts], default=0.0)
    if window.is_all:
        return _Scale(zero, zero, max([*moments, *ends], default=zero), clocks)
    return _Scale(zero, min(starts, default=zero), max(ends, default=zero), clocks)


def _names(material: Material) -> Iterator[TraceEvent]:
    yield from _name(RUN_PID, one_line(material.name), 0, {WORLDS: "Worlds", EVENTS: "events"})
    ranks = {*material.metrics, *material.spans, *(e.rank for e in material.events if e.rank is not None)}
    ranks |= {rank for samples in material.samples.values() for sample in samples[-1:] for rank in sample.workers}
    for rank in sorted(ranks):
        threads = {STEPS: "steps", PROCESS: "process", EVENTS: "events"}
        spans = material.spans.get(rank, ())
        threads |= {INSIDE: "inside steps"} if spans else {}
        threads |= {
            BESIDE + n: f"beside steps: {one_line(name)}" for n, name in enumerate(_threads_of(spans)) if name
        }
        yield from _name(FIRST_RANK_PID + rank, f"rank {rank}", 1 + rank, threads)
    for number, node in enumerate(sorted(material.samples)):
        yield from _name(FIRST_NODE_PID + number, f"node {one_line(node)}", FIRST_NODE_PID + number, {})


def _name(pid: int, name: str, place: int, threads: Mapping[int, str]) -> Iterator[TraceEvent]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": place}}
    for tid, text in threads.items():
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": text}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}


def _slice(
    name: str, kind: str, begin: float, end: float, pid: int, tid: int, args: Mapping[str, Any] | None = None
) -> TraceEvent:
    event = {"ph": "X", "name": name, "cat": kind, "ts": begin, "dur": round(max(0.0, end - begin), 3)}
    return {**event, "pid": pid, "tid": tid, **({"args": args} if args else {})}


def _steps(rank: int, rows: Sequence[StepMetrics], scale: _Scale) -> Iterator[TraceEvent]:
    """The steps of a rank, each with its parts, in the order in which they come; none overlaps the one before."""
    pid, last = FIRST_RANK_PID + rank, -math.inf
    for row in sorted(rows, key=lambda each: each.time):
        end = scale.at(row.time)
        begin = max(last, end - micros(step_seconds(row) - row.load))
        if row.load > 0 and (loading := max(last, begin - micros(row.load))) < begin:
            yield _slice("load", "load", loading, begin, pid, STEPS)
        yield _slice(_title(row), "step", begin, end, pid, STEPS, _facts(row))
        yield from _parts(row, begin, end, pid)
        last = max(last, end)


def _title(row: StepMetrics) -> str:
    """Steps of long ago may have been merged into one row."""
    return f"step {row.step}" if row.num_steps == 1 else f"{row.num_steps} steps to step {row.step}"


def _parts(row: StepMetrics, begin: float, end: float, pid: int) -> Iterator[TraceEvent]:
    """Their lengths were measured; of waiting and communicating, which take turns, each is shown in one piece."""
    wait = "wait" if row.waited_for is None else f"wait for rank {row.waited_for}"
    named = (
        ("compute", "compute", row.compute),
        (wait, "wait", row.wait - row.bubble),
        ("bubble", "bubble", row.bubble),
        ("communicate", "communicate", row.communicate),
    )
    for name, kind, seconds in named:
        stop = min(end, begin + micros(seconds))
        if stop > begin:
            yield _slice(name, kind, begin, stop, pid, STEPS)
        begin = max(begin, stop)


def _facts(row: StepMetrics) -> dict[str, Any]:
    names = ("epoch", "loss", "lr", "grad_norm", "num_samples", "global_samples", "waited_for", "other")
    return {name: finite(getattr(row, name)) for name in names if getattr(row, name) is not None}


def finite(value: Any) -> Any:
    """A value as JSON has it."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _arrows(metrics: Mapping[int, Sequence[StepMetrics]], scale: _Scale) -> Iterator[TraceEvent]:
    """From where a rank that was waited for had computed, to where the waiting ended.

    Only the newest turn of a step has some: which of several a rank waited in is not known.
    """
    newest = {rank: {row.step: row for row in rows} for rank, rows in metrics.items()}
    numbers = count(1)
    for rank, rows in newest.items():
        for row in rows.values():
            late = newest.get(-1 if row.waited_for is None else row.waited_for, {}).get(row.step)
            if late is None or late is row or row.wait - row.bubble < ARROW_SHARE * step_seconds(row):
                continue
            assert row.waited_for is not None
            begin = scale.at(late.time) - micros(late.communicate + late.wait + late.other) - 1.0
            end = scale.at(row.time) - micros(row.communicate + row.other) - 1.0
            if begin <= end:
                number = next(numbers)
                yield _arrow("s", number, begin, FIRST_RANK_PID + row.waited_for)
                yield {**_arrow("f", number, end, FIRST_RANK_PID + rank), "bp": "e"}


def _arrow(phase: str, number: int, moment: float, pid: int) -> TraceEvent:
    return {
        "ph": phase,
        "name": "waited for",
        "cat": "wait",
        "id": number,
        "ts": moment,
        "pid": pid,
        "tid": STEPS,
    }


def _spans(rank: int, spans: Iterable[Span], scale: _Scale) -> Iterator[TraceEvent]:
    """What a rank recorded inside of steps, in each of its threads; one is inside of another there, or after it."""
    spans = list(spans)
    for number, name in enumerate(_threads_of(spans)):
        mine = [span for span in spans if _thread_of(span) == name]
        yield from _line_of_spans(rank, mine, BESIDE + number if name else INSIDE, scale)


def _thread_of(span: Span) -> str:
    return str(span.args.get("thread", ""))


def _threads_of(spans: Iterable[Span]) -> list[str]:
    """The main one is first, and has no name."""
    return sorted({"", *map(_thread_of, spans)})


def _line_of_spans(rank: int, spans: Iterable[Span], tid: int, scale: _Scale) -> Iterator[TraceEvent]:
    open_ends: list[float] = []
    for span in sorted(spans, key=lambda each: (each.start, -each.seconds)):
        begin = scale.at(scale.clocks.common(rank, span.start))
        end = begin + micros(span.seconds)
        while open_ends and open_ends[-1] <= begin:
            open_ends.pop()
        end = min([end, *open_ends[-1:]])
        open_ends.append(end)
        args = {"step": span.step, **{name: finite(value) for name, value in span.args.items()}}
        yield _slice(one_line(span.name), one_line(span.kind), begin, end, FIRST_RANK_PID + rank, tid, args)


def _lives(events: Iterable[Event], scale: _Scale) -> Iterator[TraceEvent]:
    """The processes that each rank had, one after the other."""
    begun: dict[int, Event] = {}
    last = micros(scale.end - scale.zero)
    for event in events:
        if event.rank is None or event.kind not in ("worker_started", "worker_exited"):
            continue
        if (start := begun.pop(event.rank, None)) is not None:
            yield from _life(start, scale.at(event.time), scale, event.data.get("code"))
        if event.kind == "worker_started":
            begun[event.rank] = event
    for start in begun.values():
        yield from _life(start, max(last, scale.at(start.time)), scale, None)


def _life(start: Event, end: float, scale: _Scale, code: object) -> Iterator[TraceEvent]:
    begin, pid = scale.at(start.time), FIRST_RANK_PID + (start.rank or 0)
    args = {**start.data, **({} if code is None else {"exit_code": code})}
    if scale.has(begin, end):
        yield _slice(f"process {start.data.get('pid')}", "process", begin, end, pid, PROCESS, args)


def _worlds(events: Sequence[Event], turns: Sequence[Turn], scale: _Scale) -> Iterator[TraceEvent]:
    """Of an elastic run: its Worlds, how many took part, and what every loss and every join took."""
    last = micros(scale.end - scale.zero)
    for era in find_eras(events, turns):
        begin = scale.at(era.time)
        end = max(begin, last) if era.seconds is None else scale.at(era.time + era.seconds)
        if scale.has(begin, end):
            args = {"members": era.members, "joined": era.joined, "reason": era.reason, "steps": era.num_steps}
            name = f"World {era.generation}: {len(era.members)} workers"
            yield _slice(name, "world", begin, end, RUN_PID, WORLDS, args)
            yield _counter("workers", begin, {"workers": len(era.members)}, RUN_PID)
    history = tell_history(events, turns)
    numbers = count(1)
    for loss in history.losses if history is not None else ():
        begin, facts = scale.at(loss.time), {"reason": loss.reason, "id": loss.id}
        titles = {f"recovery from the loss of rank {loss.worker}": loss.recovery_seconds}
        titles[f"rank {loss.worker} is away"] = loss.away_seconds
        for title, seconds in titles.items():
            if seconds is not None:
                yield from _lasting(
                    title, "loss", begin, begin + micros(seconds), RUN_PID, next(numbers), scale, facts
                )
    for join in history.joins if history is not None else ():
        end = scale.at(join.time)
        if join.start_seconds is not None:
            title, begin = f"rank {join.worker} starts", end - micros(join.start_seconds)
            yield from _lasting(title, "join", begin, end, RUN_PID, next(numbers), scale, {"id": join.id})


def _lasting(
    name: str, kind: str, begin: float, end: float, pid: int, number: int, scale: _Scale, args: Mapping[str, Any]
) -> Iterator[TraceEvent]:
    """Something that may overlap with others of its kind."""
    if scale.has(begin, end):
        both = {"name": name, "cat": kind, "id": f"{kind}-{pid}-{number}", "pid": pid, "tid": EVENTS}
        yield {"ph": "b", "ts": begin, **both, "args": args}
        yield {"ph": "e", "ts": max(begin, end), **both}


def _checkpoints(events: Iterable[Event], scale: _Scale) -> Iterator[TraceEvent]:
    numbers = count(1)
    for event in events:
        seconds = event.data.get("seconds")
        if event.kind == "checkpoint_saved" and isinstance(seconds, int | float):
            end, pid = scale.at(event.time), RUN_PID if event.rank is None else FIRST_RANK_PID + event.rank
            args = {"step": event.step, **event.data}
            begin = end - micros(max(0.0, float(seconds)))
            yield from _lasting("save a checkpoint", "checkpoint", begin, end, pid, next(numbers), scale, args)


def _instants(events: Iterable[Event], scale: _Scale) -> Iterator[TraceEvent]:
    """Everything else that happened, each with all that is known of it."""
    for event in events:
        moment = scale.at(event.time)
        if event.kind in _SHOWN_OTHERWISE or not scale.has(moment):
            continue
        pid = RUN_PID if event.rank is None else FIRST_RANK_PID + event.rank
        what = event.data.get({"fault": "kind", "alert": "rule", "error": "type"}.get(event.kind, ""))
        yield {
            "ph": "i",
            "name": one_line(event.kind if what is None else f"{event.kind}: {what}")[:80],
            "cat": "event",
            "ts": moment,
            "pid": pid,
            "tid": EVENTS,
            "s": "g" if event.kind in _FOR_ALL else "p",
            "args": {"step": event.step, "generation": event.generation, **event.data},
        }


def _curves(turns: Iterable[Turn], scale: _Scale) -> Iterator[TraceEvent]:
    """What is the same for all ranks, step by step."""
    for turn in turns:
        row, seconds = turn.lead, turn.seconds
        moment = scale.at(row.time)
        values = {"loss": row.loss, "lr": row.lr, "grad_norm": row.grad_norm}
        values["samples_per_second"] = row.global_samples / seconds if seconds > 0 else None
        for name, value in values.items():
            if value is not None and math.isfinite(value):
                yield _counter(name, moment, {name: value}, RUN_PID)


def _counter(name: str, moment: float, values: Mapping[str, float], pid: int) -> TraceEvent:
    return {"ph": "C", "name": name, "ts": moment, "pid": pid, "tid": 0, "args": values}


def _counters(pid: int, samples: Iterable[SystemSample], scale: _Scale) -> Iterator[TraceEvent]:
    """What a machine was doing, and beside each rank's steps what its process was."""
    for sample in samples:
        # Its machine's clock is that of the ranks on it.
        at = scale.at(scale.clocks.common(min(sample.workers, default=None), sample.time))
        if not scale.has(at):
            continue
        machine: dict[str, dict[str, float]] = {
            "cpu": {"busy cores": sample.cpu},
            "memory": {"used": sample.memory_used},
            "network": {"in": sample.net_in, "out": sample.net_out},
            "disk": {"read": sample.disk_read, "written": sample.disk_write},
        }
        yield from (_counter(name, at, values, pid) for name, values in machine.items())
        for rank, worker in sample.workers.items():
            own: dict[str, dict[str, float]] = {"cpu": {"busy cores": worker.cpu}, "memory": {"rss": worker.rss}}
            own["kept from running"] = {"throttled": worker.throttled, "waiting for a core": worker.run_delay}
            yield from (_counter(name, at, values, FIRST_RANK_PID + rank) for name, values in own.items())
