"""The Split protocol: forward and backward of a copy's part of a step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from shoal.data.ledger import StepPlan
from shoal.train.groups import Groups
from shoal.train.sync.sync import Standing, Sync

Forward = Callable[[nn.Module, Any], Any]
"""(model, batch) -> whatever the caller wants of it: a loss, or answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A copy's part of one step: `pieces` are the data of `plan.pieces`, `mine` the shards they come from.

    `at_start` is what the changing buffers were before the step. `standing` tells the others where this worker
    stands, at the moment in which it is called.
    """

    plan: StepPlan
    pieces: tuple[Any, ...]
    mine: range
    at_start: torch.Tensor | None
    sync: Sync
    standing: Callable[[], Standing]


class Split(Protocol):
    """Computes gradients of one copy of the model. All workers that hold a part of the copy call it together.

    `idle` is how long the last `run` makes every worker wait by its schedule, as a part of what each computes.
    """

    @property
    def idle(self) -> float: ...

    def run(self, work: Work) -> None:
        """Forward and backward of all pieces: gradients go to `work.sync.gradients`, rows are posted to the sync."""
        ...

    def use(self, function: Forward, batch: Any) -> Any:
        """`function(model, batch)` without gradients, with the same result on every part."""
        ...

    def meet(self, groups: Groups) -> None:
        """The parts of this copy are held by these from here on. What was under way with others is forgotten."""
        ...
