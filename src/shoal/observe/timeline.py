"""The steps of an elastic run beside its Worlds. Pure."""

from bisect import bisect, bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from shoal.observe.breakdown import changes_in, is_disturbed, median
from shoal.observe.turns import Turn
from shoal.spec.event import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Era:
    """The time of one World. `members` are WORKER.INCARNATION; `seconds` is None while it lasts."""

    generation: int
    time: float
    seconds: float | None
    members: tuple[str, ...]
    joined: tuple[str, ...]
    reason: str
    num_steps: int = 0


def find_eras(events: Iterable[Event], turns: Sequence[Turn]) -> list[Era]:
    """The Worlds in their order, with the steps that were committed in each, later undone or not."""
    worlds = sorted((e for e in events if e.kind == "world"), key=lambda e: e.time)
    times = [event.time for event in worlds]
    counts = [0] * len(worlds)
    for turn in turns:
        if (index := bisect(times, turn.end)) > 0:
            counts[index - 1] += turn.num_steps
    return [
        Era(
            generation=_whole(event.data.get("generation")),
            time=event.time,
            seconds=times[index + 1] - event.time if index + 1 < len(times) else None,
            members=_texts(event.data.get("members")),
            joined=_texts(event.data.get("joined")),
            reason=str(event.data.get("reason", "")),
            num_steps=counts[index],
        )
        for index, event in enumerate(worlds)
    ]


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0


def _texts(value: object) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list | tuple) else ()


class Timeline:
    """Turns beside Worlds: `kept` are those that count, `ends` when each of all was committed; what a step
    usually takes with so many members, and which steps were disturbed.

    There is at least one World.
    """

    def __init__(self, events: Sequence[Event], turns: Sequence[Turn]) -> None:
        self.eras = find_eras(events, turns)
        self.turns = list(turns)
        self.kept = [turn for turn in turns if not turn.is_undone]
        self.ends = [turn.end for turn in self.turns]
        self._starts = [era.time for era in self.eras]
        self._changes = changes_in(events)
        self._lost = {str(event.data.get("id")) for event in events if event.kind == "worker_lost"}
        usual: dict[int, list[float]] = {}
        for turn in self.turns:
            if not self.is_interrupted(turn):
                usual.setdefault(self.num_members(turn.end), []).append(turn.seconds / turn.num_steps)
        self._medians = {size: median(seconds) for size, seconds in usual.items()}

    def era(self, moment: float) -> Era:
        return self.eras[max(0, bisect(self._starts, moment) - 1)]

    def num_members(self, moment: float) -> int:
        return len(self.era(moment).members)

    def usual_seconds(self, num_members: int, default: float) -> float:
        """What an undisturbed step takes with so many members; `default` where there was none."""
        return self._medians.get(num_members, default)

    def is_interrupted(self, turn: Turn) -> bool:
        """Whether the World changed while the step was under way; of merged steps nobody knows."""
        return turn.num_steps == 1 and is_disturbed(turn.end - turn.seconds, turn.end, self._changes)

    def own_seconds(self, turn: Turn) -> float:
        """A step without what was lost in it."""
        if not self.is_interrupted(turn):
            return turn.seconds
        without = turn.seconds - turn.lead.other
        return min(turn.seconds, self.usual_seconds(self.num_members(turn.end), without))

    def eras_between(self, start: float, end: float) -> list[Era]:
        """The Worlds that came after `start`, up to `end`."""
        return self.eras[bisect(self._starts, start) : bisect(self._starts, end)]

    def has_loss(self, start: float, end: float) -> bool:
        """Whether a World that came in this time lacks a member because that was lost."""
        eras = [self.era(start), *self.eras_between(start, end)]
        gone = (member for before, after in pairwise(eras) for member in {*before.members} - {*after.members})
        return any(member in self._lost for member in gone)

    def next_start(self, moment: float) -> float:
        """When the first World from `moment` on began; `moment` itself where there was none."""
        index = bisect_left(self._starts, moment)
        return self._starts[index] if index < len(self._starts) else moment

    def next_end(self, moment: float) -> float | None:
        """When the first step after `moment` was committed."""
        index = bisect(self.ends, moment)
        return self.ends[index] if index < len(self.ends) else None
