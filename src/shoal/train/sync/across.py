"""What the parts of a model must agree on though each adds up only gradients of its own: one norm, one vote.

On the same way they find out who of them is waited for.
"""

import time

import torch

from shoal.comm.clocked import Clock
from shoal.comm.group import Group, Op
from shoal.train.cut import Cut
from shoal.train.flat import FlatModel
from shoal.train.summing import square_of
from shoal.train.sync.stopwatch import Arrivals


class Across:
    """`group` are all workers, `parts` those of one copy; `cut` says what each of those holds, and `clock` how long
    we were held up by them.
    """

    def __init__(self, group: Group, parts: Group, cut: Cut, clock: Clock) -> None:
        self._group, self._parts, self._cut, self._clock = group, parts, cut, clock
        self._arrivals, self._stalled = Arrivals(parts.rank), 0.0
        self._late: dict[int, float] = {}

    def square(self, flat: FlatModel, gradient: torch.Tensor, waited: float = 0.0) -> float:
        """The sum of squares of the whole gradient, of which this part has some. See `add`."""
        mine = [
            square_of(view.reshape(-1))
            for name, view in flat.named(gradient)
            if view.numel() and self._cut.counts(name, self._parts.rank)
        ]
        return self.add(float(torch.stack(mine).double().sum()) if mine else 0.0, waited)

    def counts(self, name: str) -> bool:
        """Whether this part's values of a parameter count where all parts add up."""
        return self._cut.counts(name, self._parts.rank)

    def add(self, value: float, waited: float = 0.0) -> float:
        """The sum over all parts, which call it together once for each update.

        Each also tells how long it was busy since the last time; `waited` is for how long other copies held it up.
        """
        told = torch.zeros(1 + self._parts.size, dtype=torch.float64)
        idle = self._clock.seconds - self._stalled + waited
        told[0], told[1 + self._parts.rank] = value, self._arrivals.arrive(time.perf_counter() - idle)
        self._parts.all_reduce(told).wait()
        self._arrivals.done(time.perf_counter())
        stalled, self._stalled = self._clock.seconds - self._stalled, self._clock.seconds
        total, *busy = told.tolist()
        late, last = self._arrivals.judge(busy, stalled)
        if last is not None:
            self._late[last] = self._late.get(last, 0.0) + late
        return float(total)

    def take_late(self) -> tuple[float, int | None]:
        """How long we have waited since the last call for the part that was busy longest, and which one that was."""
        late, self._late = self._late, {}
        last = max(late, key=late.__getitem__, default=None)
        return (0.0, None) if last is None else (late[last], last)

    def largest(self, values: torch.Tensor) -> None:
        """What is the largest on any part, on all parts: for what each would decide on by itself."""
        self._parts.all_reduce(values, Op.MAX).wait()

    def vote(self) -> None:
        """Everybody holds the sums of its part."""
        self._group.barrier()
