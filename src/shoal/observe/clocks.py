"""The clocks of a run's machines, and one clock for all of them. Pure.

Each process stamps what it does with the clock of its machine. The launcher measures how far those are off its own,
and writes that down as events of kind `clock`; where there are none, all is on one machine.
"""

from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from shoal.spec.event import Event, StepMetrics

LAUNCHER_KINDS = frozenset(
    {"run_started", "worker_started", "world", "worker_lost", "worker_joined", "worker_frozen", "worker_hung"}
    | {"worker_went_on", "worker_signaled", "waiting_for_workers", "going_on_with_few", "resized", "items_done"}
    | {"item_retried", "item_failed", "worker_exited", "run_ended", "clock", "alert"}
)
"""Events that are stamped by the launcher, though they may be about a rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offset:
    """A clock at one moment of the launcher's: ahead of it by so many seconds, give or take `error` seconds."""

    time: float
    node: str
    seconds: float
    error: float


@dataclass(frozen=True, slots=True)
class Clocks:
    """What was measured, by rank and in order; a rank without anything has the launcher's clock."""

    offsets: dict[int, list[Offset]] = field(default_factory=dict)

    def common(self, rank: int | None, moment: float) -> float:
        """The launcher's time at a moment of a rank's clock. Between two measurements clocks drift evenly."""
        offsets = self.offsets.get(-1 if rank is None else rank)
        if not offsets:
            return moment
        index = bisect(offsets, moment - offsets[0].seconds, key=lambda each: each.time)
        before, after = offsets[max(0, index - 1)], offsets[min(index, len(offsets) - 1)]
        if before.node != after.node or after.time <= before.time:
            return moment - before.seconds
        part = (moment - before.seconds - before.time) / (after.time - before.time)
        return moment - before.seconds - min(1.0, max(0.0, part)) * (after.seconds - before.seconds)

    def align(self, event: Event) -> Event:
        """An event with the time that the launcher's clock had."""
        if event.kind in LAUNCHER_KINDS or event.rank not in self.offsets:
            return event
        return replace(event, time=self.common(event.rank, event.time))

    def align_steps(self, rank: int, rows: Sequence[StepMetrics]) -> Sequence[StepMetrics]:
        """The steps of a rank with the times that the launcher's clock had."""
        if rank not in self.offsets:
            return rows
        return [replace(row, time=self.common(rank, row.time)) for row in rows]


def find_clocks(events: Iterable[Event]) -> Clocks:
    """All that the journal knows of clocks."""
    offsets: dict[int, list[Offset]] = {}
    for event in events:
        ranks, seconds = event.data.get("ranks"), event.data.get("offset_seconds")
        if event.kind != "clock" or not isinstance(ranks, list) or not isinstance(seconds, int | float):
            continue
        offset = Offset(
            time=event.time,
            node=str(event.data.get("node", "")),
            seconds=float(seconds),
            error=abs(float(event.data.get("error_seconds") or 0.0)),
        )
        for rank in ranks:
            if isinstance(rank, int):
                offsets.setdefault(rank, []).append(offset)
    ordered = {rank: sorted(known, key=lambda each: each.time) for rank, known in offsets.items()}
    return Clocks({rank: sharpen(known) for rank, known in ordered.items()})


def sharpen(offsets: Sequence[Offset]) -> list[Offset]:
    """Measurements of one clock, the blurred ones replaced by sharper ones that they do not contradict.

    So a clock seems to have moved only where it surely has.
    """
    sharp = list(offsets)
    pairs = [(place, place + 1) for place in range(len(sharp) - 1)]
    for blurred, clear in [*reversed(pairs), *((after, before) for before, after in pairs)]:
        one, other = sharp[blurred], sharp[clear]
        may_be_same = abs(one.seconds - other.seconds) <= one.error + other.error
        if one.node == other.node and other.error < one.error and may_be_same:
            sharp[blurred] = replace(one, seconds=other.seconds, error=other.error)
    return sharp
