"""Each loss and each join of an elastic run, and what it cost. Pure."""

import math
from bisect import bisect
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shoal.observe.timeline import Timeline
from shoal.spec.event import Event

CAUSE_SECONDS = 10.0
"""How long before its end a worker may have been dealt the blow that ended it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A member that was lost. `time` is when it was hit: killed, frozen, or failed; its end where that is not known.

    recovery_seconds: from then until the first step that was committed without it; None where there was none.
    away_seconds: until another process with its number was let in; None where that never happened.
    slower_seconds: how much longer the steps of that time took than they would have with it.
    """

    worker: int
    id: str
    time: float
    reason: str
    recovery_seconds: float | None
    away_seconds: float | None
    slower_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """A worker that was let into a running World.

    start_seconds: from the start of its process until then. cost_seconds: how much later than usual the step after it
    was committed, by which all members were held up.
    """

    worker: int
    id: str
    time: float
    start_seconds: float | None
    cost_seconds: float | None


def find_losses(events: Sequence[Event], timeline: Timeline) -> tuple[Loss, ...]:
    """Every loss of a member, in order. What happened to workers that were not let in yet cost nobody anything."""
    sizes = {member: len(era.members) for era in timeline.eras for member in era.members}
    lost = [event for event in events if event.kind == "worker_lost" and str(event.data.get("id")) in sizes]
    entries = _entries(timeline)
    hits = _find_hits(events)
    losses = [_loss(event, hits.get(str(event.data["id"]), event), entries, timeline) for event in lost]
    return _with_slower(losses, [sizes[loss.id] for loss in losses], timeline)


def _loss(event: Event, blow: Event, entries: Mapping[int, Sequence[float]], timeline: Timeline) -> Loss:
    worker, hit = event.rank or 0, _hit_time(blow)
    committed = timeline.next_end(timeline.next_start(event.time))
    back = next((moment for moment in entries.get(worker, ()) if moment >= event.time), None)
    return Loss(
        worker=worker,
        id=str(event.data["id"]),
        time=hit,
        reason=_SILENT.get(blow.kind) or str(event.data.get("reason", "")),
        recovery_seconds=None if committed is None else committed - hit,
        away_seconds=None if back is None else back - hit,
    )


def _entries(timeline: Timeline) -> dict[int, list[float]]:
    """When workers of each number were let in."""
    entries: dict[int, list[float]] = {}
    for era in timeline.eras:
        for member in era.joined:
            entries.setdefault(worker_of(member), []).append(era.time)
    return entries


_SILENT = {"worker_frozen": "frozen", "worker_hung": "hung"}


def _find_hits(events: Sequence[Event]) -> dict[str, Event]:
    """For each worker that was lost, the event that tells by what: signal, fault, error, silence, or its end."""
    hits: dict[str, Event] = {}
    blows: dict[int, Event] = {}
    for event in sorted(events, key=lambda event: event.time):
        if event.rank is None:
            continue
        blow = blows.get(event.rank)
        is_old = blow is None or event.time - _hit_time(blow) >= CAUSE_SECONDS
        if event.kind == "worker_started":
            blows.pop(event.rank, None)
        elif event.kind == "worker_lost":
            hits[str(event.data.get("id"))] = event if is_old or blow is None else blow
        elif _is_blow(event) and (is_old or event.kind in _SILENT):
            blows[event.rank] = event
    return hits


def _hit_time(blow: Event) -> float:
    """When the worker was hit by what this event tells of. Silence is noticed later than it began."""
    silent = {"worker_frozen": "silent_seconds", "worker_hung": "waited_seconds"}.get(blow.kind)
    seconds = blow.data.get(silent, 0.0) if silent else 0.0
    return blow.time - (seconds if isinstance(seconds, int | float) else 0.0)


def _is_blow(event: Event) -> bool:
    """Whether this is something that ends a worker."""
    data = event.data
    is_signal = event.kind == "worker_signaled" and data.get("signal") in ("SIGKILL", "SIGTERM", "SIGSTOP")
    is_fault = event.kind == "fault" and data.get("kind") in ("kill", "freeze", "hang", "fail")
    is_error = event.kind == "error" and data.get("is_retryable") is True
    return is_signal or is_fault or is_error or event.kind in _SILENT or event.kind == "worker_exited"


def _with_slower(losses: Sequence[Loss], sizes: Sequence[int], timeline: Timeline) -> tuple[Loss, ...]:
    """Divide what steps took longer among those whose absence made them so."""
    windows = [_window(loss, timeline) for loss in losses]
    num_away = Counter(index for window in windows for index in window)
    told = []
    for loss, size, window in zip(losses, sizes, windows, strict=True):
        more = 0.0
        for index in window:
            turn = timeline.turns[index]
            own = timeline.own_seconds(turn) / turn.num_steps
            more += turn.num_steps * (own - timeline.usual_seconds(size, own)) / num_away[index]
        told.append(replace(loss, slower_seconds=max(0.0, more)))
    return tuple(told)


def _window(loss: Loss, timeline: Timeline) -> range:
    """The turns that were taken while a worker was away."""
    end = math.inf if loss.away_seconds is None else loss.time + loss.away_seconds
    return range(bisect(timeline.ends, loss.time), bisect(timeline.ends, end))


def find_joins(events: Sequence[Event], timeline: Timeline) -> tuple[Join, ...]:
    """Every worker that was let in later, in order."""
    started: dict[int, float] = {}
    joins = []
    for event in sorted(events, key=lambda event: event.time):
        if event.rank is None:
            continue
        if event.kind == "worker_started":
            started[event.rank] = event.time
        elif event.kind == "worker_joined":
            begun = started.get(event.rank)
            joins.append(
                Join(
                    worker=event.rank,
                    id=str(event.data.get("id")),
                    time=event.time,
                    start_seconds=None if begun is None else event.time - begun,
                    cost_seconds=_join_cost(timeline, event.time),
                )
            )
    return tuple(joins)


def _join_cost(timeline: Timeline, moment: float) -> float | None:
    """How much longer than usual it was from the step before this moment to the one after it."""
    index = bisect(timeline.ends, moment)
    if not 0 < index < len(timeline.ends) or timeline.has_loss(timeline.ends[index - 1], timeline.ends[index]):
        return None  # nobody was held up by it, or it cannot be told from what a loss cost
    return max(0.0, timeline.ends[index] - timeline.ends[index - 1] - timeline.own_seconds(timeline.turns[index]))


def worker_of(member: str) -> int:
    """The number of the worker that a member id names; -1 where it names none."""
    number = member.partition(".")[0]
    return int(number) if number.isdecimal() else -1
