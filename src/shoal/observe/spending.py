"""Where the time of a run went from its first step to its last: in steps, for checkpoints, for recovering. Pure."""

from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from shoal.observe.breakdown import changes_in, is_disturbed, median
from shoal.observe.turns import Turn, waits_in
from shoal.spec.event import Event

PARTS = ("compute", "communicate", "wait", "load", "other", "checkpoint", "recover", "between")
"""Of steps, the mean over ranks: compute, communication that was not hidden, waiting for others, waiting for data,
the rest. Then what held up training to save a checkpoint, to go on after a loss or a join, and anything else."""
NUM_PERIODS = 24
MAX_RANKS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Period:
    """A stretch of the run, in seconds since its first step began. `parts` add up to 1, or are 0 where nothing was.

    `waited_for` is who was waited for most, for `waited_seconds` by all others together; `own_seconds` is what each
    rank's own part of a step took, of up to 64 ranks.
    """

    start: float
    end: float
    parts: Mapping[str, float]
    num_steps: int = 0
    waited_for: int | None = None
    waited_seconds: float = 0.0
    own_seconds: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spending:
    """`parts` of `wall_seconds`, which add up to 1; the same over time; and for whom ranks waited, in seconds.

    `checkpoint_seconds` is how long saving held up training, not how long it took in the background.
    """

    wall_seconds: float
    parts: Mapping[str, float]
    checkpoint_seconds: float
    recover_seconds: float
    num_checkpoints: int
    waited_for: Mapping[int, float]
    periods: tuple[Period, ...]


@dataclass(frozen=True, slots=True)
class _Stretch:
    """From the end of one step to the end of the next, and what it went into, in seconds."""

    begin: float
    end: float
    parts: Mapping[str, float]
    turn: Turn


def spend(turns: Sequence[Turn], events: Iterable[Event]) -> Spending | None:
    """Add up where the time went; None where there was no step. Costs about 10 µs a step and rank."""
    if not turns:
        return None
    events = list(events)
    stretches = list(_cut(turns, events))
    start, end = stretches[0].begin, max(stretch.end for stretch in stretches)
    wall = max(end - start, 1e-9)
    totals = {part: sum(stretch.parts[part] for stretch in stretches) for part in PARTS}
    spent = sum(totals.values()) or 1e-9
    return Spending(
        wall_seconds=end - start,
        parts={part: seconds / spent for part, seconds in totals.items()},
        checkpoint_seconds=totals["checkpoint"],
        recover_seconds=totals["recover"],
        num_checkpoints=sum(event.kind == "checkpoint_saved" for event in events),
        waited_for=dict(_waited(turns)),
        periods=tuple(_divide(stretches, start, wall)),
    )


def _cut(turns: Sequence[Turn], events: Sequence[Event]) -> Iterator[_Stretch]:
    changes = changes_in(events)
    saved = {event.step for event in events if event.kind in ("checkpoint_saved", "checkpoint_failed")}
    begins = [turns[0].end - turns[0].seconds, *(before.end for before in turns[:-1])]
    gaps = [max(0.0, after.end - after.seconds - before.end) for before, after in pairwise(turns)]
    usual = median([gap for gap, turn in zip(gaps, turns[1:], strict=True) if turn.step not in saved])
    for begin, turn in zip(begins, turns, strict=True):
        length = max(0.0, turn.end - begin)
        is_changed = is_disturbed(begin, turn.end, changes)
        own = 0.0 if turn.is_undone else turn.seconds - (turn.lead.other if is_changed else 0.0)
        own = min(length, own)
        parts = dict.fromkeys(PARTS, 0.0) | _of_step(turn, own, is_changed=is_changed)
        rest = length - own
        if turn.is_undone or is_changed:
            parts["recover"] += rest
        elif turn.step in saved:
            parts["between"] += min(rest, usual)
            parts["checkpoint"] += max(0.0, rest - usual)
        else:
            parts["between"] += rest
        yield _Stretch(begin, turn.end, parts, turn)


def _of_step(turn: Turn, own: float, *, is_changed: bool) -> dict[str, float]:
    """What a step went into, the mean over its ranks, as parts of the time that it took by itself."""
    names = PARTS[: 4 if is_changed else 5]
    rows = turn.metrics.values()
    sums = {name: sum(float(getattr(row, name)) for row in rows) for name in names}
    total = sum(sums.values())
    return {name: own * value / total for name, value in sums.items()} if total > 0 else {"other": own}


def _waited(turns: Sequence[Turn]) -> Counter[int]:
    """For each rank, how long others waited for it, all of them added up."""
    waited: Counter[int] = Counter()
    for turn in turns:
        for _, last, seconds in () if turn.is_undone else waits_in(turn):
            waited[last] += seconds  # type: ignore[assignment]  # a Counter of seconds
    return waited


def _divide(stretches: Sequence[_Stretch], start: float, wall: float) -> Iterator[Period]:
    """The run in equal periods; what lies in several of them is divided among these."""
    length = wall / NUM_PERIODS
    sums = [dict.fromkeys(PARTS, 0.0) for _ in range(NUM_PERIODS)]
    turns: list[list[Turn]] = [[] for _ in range(NUM_PERIODS)]
    borders = [start + length * (index + 1) for index in range(NUM_PERIODS)]
    for stretch in stretches:
        last = min(NUM_PERIODS - 1, bisect(borders, stretch.end))
        turns[last].append(stretch.turn)
        whole = stretch.end - stretch.begin
        for index in range(min(last, bisect(borders, stretch.begin)), last + 1):
            inside = min(stretch.end, borders[index]) - max(stretch.begin, borders[index] - length)
            part = max(0.0, inside) / whole if whole > 0 else 0.0
            for name, seconds in stretch.parts.items():
                sums[index][name] += seconds * part
    for index, (parts, taken) in enumerate(zip(sums, turns, strict=True)):
        yield _period(index * length, (index + 1) * length, parts, taken)


def _period(start: float, end: float, parts: Mapping[str, float], turns: Sequence[Turn]) -> Period:
    total = sum(parts.values())
    waited = _waited(turns).most_common(1)
    own: dict[int, list[float]] = {}
    for turn in turns:
        for rank, row in turn.metrics.items():
            own.setdefault(rank, []).append(row.compute + row.load + row.other)
    return replace(
        Period(
            start=start, end=end, parts={name: value / total if total > 0 else 0.0 for name, value in parts.items()}
        ),
        num_steps=len(turns),
        waited_for=waited[0][0] if waited else None,
        waited_seconds=waited[0][1] if waited else 0.0,
        own_seconds={rank: sum(own[rank]) / len(own[rank]) for rank in sorted(own)[:MAX_RANKS]},
    )
