"""What the parts of a model must agree on though each adds up only gradients of its own: one norm, one vote."""

import torch

from shoal.comm.group import Group, Op
from shoal.train.cut import Cut
from shoal.train.flat import FlatModel
from shoal.train.summing import square_of


class Across:
    """`group` are all workers, `parts` those of one copy; `cut` says what each of those holds."""

    def __init__(self, group: Group, parts: Group, cut: Cut) -> None:
        self._group, self._parts, self._cut = group, parts, cut

    def square(self, flat: FlatModel, gradient: torch.Tensor) -> float:
        """The sum of squares of the whole gradient, of which this part has some. All parts call it together."""
        mine = [
            square_of(view.reshape(-1))
            for name, view in flat.named(gradient)
            if view.numel() and self._cut.counts(name, self._parts.rank)
        ]
        total = torch.stack(mine).double().sum().cpu() if mine else torch.zeros((), dtype=torch.float64)
        everyone = total.view(1).clone()
        self._parts.all_reduce(everyone).wait()
        return float(everyone)

    def counts(self, name: str) -> bool:
        """Whether this part's values of a parameter count where all parts add up."""
        return self._cut.counts(name, self._parts.rank)

    def add(self, values: torch.Tensor) -> None:
        """Add up over all parts."""
        self._parts.all_reduce(values).wait()

    def largest(self, values: torch.Tensor) -> None:
        """What is the largest on any part, on all parts: for what each would decide on by itself."""
        self._parts.all_reduce(values, Op.MAX).wait()

    def vote(self) -> None:
        """Everybody holds the sums of its part."""
        self._group.barrier()
