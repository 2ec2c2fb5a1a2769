"""How much of each step a worker gets: in proportion to its measured speed, and re-balanced while running.

Everything here is a function of numbers that every worker has, in plain float arithmetic, so all of them come to
the same answer without asking each other.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import sqrt
from statistics import median

from shoal.spec.errors import BugError


def assign(num_shards: int, shares: Sequence[float]) -> tuple[range, ...]:
    """Give each worker a contiguous range of shards, in proportion to its share.

    Every shard is given once. A worker with a share above zero gets at least one as long as there are enough; with
    fewer shards than such workers the largest shares get one each. What proportion leaves over goes to whoever
    lacks most, the lower rank first.
    """
    counts = _count_shards(num_shards, shares)
    ends = list(accumulate(counts))
    return tuple(range(end - count, end) for count, end in zip(counts, ends, strict=True))


def _count_shards(num_shards: int, shares: Sequence[float]) -> list[int]:
    total = float(sum(shares))
    if not total > 0 or min(shares) < 0:
        raise BugError(f"Shares {list(shares)} cannot be handed out: they must be 0 or more, and not all 0.")
    wanted = [num_shards * share / total for share in shares]
    enough = num_shards >= sum(share > 0 for share in shares)
    if not enough:
        largest = sorted(range(len(shares)), key=lambda rank: (-shares[rank], rank))[:num_shards]
        return [int(rank in largest) for rank in range(len(shares))]
    least = [int(share > 0) for share in shares]
    counts = [max(int(want), low) for want, low in zip(wanted, least, strict=True)]
    while (left := num_shards - sum(counts)) != 0:
        step = 1 if left > 0 else -1
        able = [rank for rank, share in enumerate(shares) if share > 0 and (step > 0 or counts[rank] > least[rank])]
        counts[max(able, key=lambda rank: (step * (wanted[rank] - counts[rank]), -rank))] += step
    return counts


MIN_GAIN = 0.03
"""What a step must gain for shares to change. A change costs nothing, so this is only as large as noise is."""


def rebalance(
    shares: Sequence[float],
    seconds_per_sample: Sequence[float | None],
    *,
    num_shards: int,
) -> tuple[float, ...]:
    """New shares from the measured seconds per sample of each worker; None where nothing was measured.

    A step lasts as long as its slowest worker, so the ideal share is inverse to the seconds. Nothing changes unless
    whole shards at the ideal make the step faster by `MIN_GAIN`: less is noise. Shares then move half of the way for
    a gain that might be noise, and all of it for one that cannot be. Unmeasured workers and those with share 0 keep
    what they have. Where nothing changes, the very same shares are returned.
    """
    total = float(sum(shares))
    current = tuple(share / total for share in shares)
    known = [rank for rank, seconds in enumerate(seconds_per_sample) if seconds and current[rank] > 0]
    if len(known) < 2:
        return tuple(shares)
    ideal = _ideal_shares(current, seconds_per_sample, known)
    now = _step_seconds(num_shards, current, seconds_per_sample)
    gain = 1 - _step_seconds(num_shards, ideal, seconds_per_sample) / now
    if gain < MIN_GAIN:
        return tuple(shares)
    damping = min(1.0, gain / (2 * MIN_GAIN))
    return tuple(old + damping * (new - old) for old, new in zip(current, ideal, strict=True))


def _ideal_shares(
    current: tuple[float, ...], seconds: Sequence[float | None], known: Sequence[int]
) -> tuple[float, ...]:
    speeds = {rank: 1 / (seconds[rank] or 1.0) for rank in known}
    scale = sum(current[rank] for rank in known) / sum(speeds.values())
    return tuple(speeds[rank] * scale if rank in speeds else share for rank, share in enumerate(current))


def _step_seconds(num_shards: int, shares: Sequence[float], seconds: Sequence[float | None]) -> float:
    """How long a step takes its slowest measured worker, in shards as they would really be handed out."""
    counts = _count_shards(num_shards, shares)
    return max(count * (each or 0.0) for count, each in zip(counts, seconds, strict=True))


WINDOW_STEPS, FEW_STEPS = 64, 3
SHIFT = 1.25
RARE = 0.1
"""A change of speed is believed at once if no more than this part of the steps before was as slow, or as fast."""
DOUBTS = 2.0
"""By how many times its uncertainty a speed must have changed to be told anew."""


class Speed:
    """A worker's seconds per sample: the median of its last steps, so that one hiccup does not count.

    A few steps in a row that are all much slower or all much faster than was usual are no hiccup: what was before is
    forgotten. What is told changes only by more than the steps leave in doubt: on a busy machine they differ so much
    that shares would change all the time, and mostly for the worse.
    """

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._told: float | None = None

    def add(self, seconds: float, num_samples: int) -> None:
        if not num_samples:
            return
        self._recent.append(seconds / num_samples)
        rates = list(self._recent)
        before, last = sorted(rates[:-FEW_STEPS]), rates[-FEW_STEPS:]
        if len(before) >= FEW_STEPS and _is_shift(before, last):
            self._recent.clear()
            self._recent.extend(last)

    def clear(self) -> None:
        self._recent.clear()
        self._told = None

    def seconds_per_sample(self) -> float | None:
        """None until a few steps were measured."""
        if len(self._recent) < FEW_STEPS:
            return None
        now = median(self._recent)
        doubt = median(abs(one - other) for one, other in pairwise(self._recent)) / sqrt(len(self._recent))
        if self._told is None or abs(now - self._told) > DOUBTS * doubt:
            self._told = now
        return self._told


def _is_shift(before: Sequence[float], last: Sequence[float]) -> bool:
    """Whether the last steps took as long as few of those before, which are sorted; and not just a little longer."""
    usual, rare = before[len(before) // 2], int(RARE * len(before))
    is_slower = min(last) > max(SHIFT * usual, before[-1 - rare])
    return is_slower or max(last) < min(usual / SHIFT, before[rare])


Division = Callable[[int], tuple[range, ...]]
"""(step, counted from the first one of these shares) -> the shards of each rank."""


def alike(num_shards: int, shares: Sequence[float]) -> Division:
    """The same shards in every step: shares are as fine as one step's shards."""
    ranges = assign(num_shards, shares)
    return lambda step: ranges


PERIOD_SHARDS = 1024
"""Dithering repeats itself after about so many shards: shares are that fine."""


def dithered(num_shards: int, shares: Sequence[float]) -> Division:
    """Shards of a fixed size in proportion over many steps: in one step a worker may have none, one or several.

    Within a period each worker is always less than one shard away from its share of those handed out so far.
    """
    num_steps = max(16, PERIOD_SHARDS // num_shards)
    order = _take_turns(_count_shards(num_steps * num_shards, shares))
    steps: list[tuple[range, ...]] = []
    for start in range(0, len(order), num_shards):
        counts = [order[start : start + num_shards].count(rank) for rank in range(len(shares))]
        ends = list(accumulate(counts))
        steps.append(tuple(range(end - count, end) for count, end in zip(counts, ends, strict=True)))
    return lambda step: steps[step % num_steps]


def _take_turns(counts: Sequence[int]) -> list[int]:
    """An order in which each rank comes so many times, as evenly as can be.

    Of those who would not be ahead with one more, the one who falls behind first is next: Tijdeman's answer to the
    chairman assignment problem.
    """
    total, busy = sum(counts), [rank for rank, count in enumerate(counts) if count]
    slack = 1 / max(1, 2 * len(busy) - 2)
    given = [0] * len(counts)
    order: list[int] = []
    for number in range(1, total + 1):
        # A little less than the slack, for what floats leave over.
        due = [rank for rank in busy if number * counts[rank] / total - given[rank] >= slack - 1e-9]
        chosen = min(due, key=lambda rank: ((given[rank] + 1 - slack) / counts[rank], rank))
        given[chosen] += 1
        order.append(chosen)
    return order


class Schedule:
    """Which shards are whose, step by step: a function of the step that changes only in the future.

    Workers plan steps ahead, some further than others. A change therefore names the step it begins with, beyond what
    any worker can have planned (the current step + loader depth + 1), and all workers make the same change.
    `divide` says what shares come to in a step.
    """

    def __init__(
        self,
        num_shards: int,
        shares: Sequence[float],
        divide: Callable[[int, Sequence[float]], Division] = alike,
    ) -> None:
        self.num_shards = num_shards
        self._divide = divide
        self._starts = [0]
        self._shares = [tuple(shares)]
        self._divisions = [divide(num_shards, shares)]
        self._asked = -1

    def at(self, step: int) -> tuple[range, ...]:
        """The shards of each rank in this step."""
        self._asked = max(self._asked, step)
        number = bisect_right(self._starts, step) - 1
        return self._divisions[number](step - self._starts[number])

    def shares_at(self, step: int) -> tuple[float, ...]:
        return self._shares[bisect_right(self._starts, step) - 1]

    def change(self, step: int, shares: Sequence[float]) -> None:
        """Use other shares from this step on. A step that was already planned cannot change any more."""
        if step <= max(self._asked, self._starts[-1] if len(self._starts) > 1 else -1):
            raise BugError(f"Shares cannot change at step {step}: step {self._asked} was planned with the old ones.")
        self._divisions.append(self._divide(self.num_shards, shares))
        self._shares.append(tuple(shares))
        self._starts.append(step)
