"""When copies that train by themselves agree: rounds, fragments, how long what they say may travel. Pure functions.

Everything here is a function of numbers that all workers have, so all of them come to the same answer.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from shoal.spec.errors import UserError
from shoal.spec.strategy import Local
from shoal.train.flat import FlatLayout

FIRST_STEPS = 8
"""Steps of the first round where a round is a time: nobody knows yet how long a step takes."""

MOST_STEPS = 100_000

MARGIN = 1.25
"""What travels is expected after so many times the seconds that it took before."""

NO_TIME = 0.1
"""Of a step: what travels in less is waited for at once."""

Span = tuple[int, int]
"""[start, stop) of the flat buffer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """`length` steps from before step `start` on. Fragments leave one after the other, the last at its end.

    What left is taken in `delay` steps later, before the next fragment leaves.
    """

    start: int
    length: int
    num_fragments: int
    delay: int

    @property
    def end(self) -> int:
        return self.start + self.length

    def leaves(self, fragment: int) -> int:
        """The step before which this fragment leaves."""
        return self.start + (fragment + 1) * self.length // self.num_fragments

    def leaving(self, step: int, left: Sequence[int]) -> int | None:
        """The fragment that leaves before this step, which has just been reached; None if none does.

        `left` says before which step each left the last time. One whose step has passed without it leaves late.
        """
        for fragment, before in enumerate(left):
            if before < self.leaves(fragment) <= step:
                return fragment
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What was measured: how long a step takes the slowest worker, and how long a fragment travels; 0 if unknown."""

    step_seconds: float = 0.0
    travel_seconds: float = 0.0


def first_round(sync: Local, step: int) -> Round:
    """The round in which a run is that begins or goes on before `step`. Rounds of steps begin at their multiples."""
    length = sync.every if sync.every is not None else max(FIRST_STEPS, _least_steps(sync))
    start = step // sync.every * sync.every if sync.every is not None else step
    return Round(start=start, length=length, num_fragments=sync.fragments, delay=choose_delay(sync, length, Pace()))


def next_round(sync: Local, ended: Round, pace: Pace) -> Round:
    """The round after one that has ended, given what was measured in it."""
    length = choose_length(sync, ended, pace)
    delay = choose_delay(sync, length, pace)
    return Round(start=ended.end, length=length, num_fragments=sync.fragments, delay=delay)


def choose_length(sync: Local, ended: Round, pace: Pace) -> int:
    """How many steps a round has: as asked for, or as many as take that long."""
    if sync.every is not None:
        return sync.every
    if sync.seconds is None or not pace.step_seconds:
        return ended.length
    # What is under way when the length is chosen arrives before anything else leaves.
    least = max(_least_steps(sync), sync.fragments * (ended.delay + 1))
    return min(MOST_STEPS, max(least, round(sync.seconds / pace.step_seconds)))


def _least_steps(sync: Local) -> int:
    return sync.fragments * ((sync.overlap or 0) + 1)


def choose_delay(sync: Local, length: int, pace: Pace) -> int:
    """How many steps what leaves may travel: as asked for; else as long as it did before, and a little longer."""
    if sync.overlap is not None:
        return sync.overlap
    longest = length // sync.fragments - 1
    if not pace.step_seconds or not pace.travel_seconds:
        return longest // 4
    if pace.travel_seconds < NO_TIME * pace.step_seconds:
        return 0
    return min(longest, math.ceil(MARGIN * pace.travel_seconds / pace.step_seconds))


def cut_fragments(layout: FlatLayout, num_fragments: int) -> tuple[Span, ...]:
    """Runs of whole parameters, neighbours in the layout, about equally large."""
    starts = sorted({at for at, size in zip(layout.offsets, layout.sizes, strict=True) if size})
    if num_fragments > len(starts):
        raise UserError(
            f"A model of {len(starts)} trainable parameters cannot travel in {num_fragments} fragments.",
            why="a fragment is one parameter at least",
            hint=f"use fragments={len(starts)} or fewer",
        )
    ends = [0]
    for fragment in range(1, num_fragments):
        wanted = layout.total * fragment / num_fragments
        # Leave a parameter at least to each fragment before and after this one.
        able = starts[fragment : len(starts) - (num_fragments - fragment) + 1]
        ends.append(min((at for at in able if at > ends[-1]), key=lambda at: abs(at - wanted)))
    return tuple(pairwise([*ends, layout.total]))
