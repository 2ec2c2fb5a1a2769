"""A copy that one worker holds as a whole."""

from collections.abc import Callable
from typing import Any

import torch

from shoal.spec.spans import timed
from shoal.train.compute import Compute, uncompiled
from shoal.train.errors import in_user_code
from shoal.train.groups import Groups
from shoal.train.split.split import Forward, Work
from shoal.train.sync.sync import Row


@timed("backward", "compute")
def _backward(total: torch.Tensor, factor: float) -> None:
    # Not `backward(gradient=factor)`: to compare two shapes torch imports sympy, for half a second.
    (total * factor).backward()


class Whole:
    """Piece after piece: forward, backward. `rank` says who this worker is, for errors."""

    idle = 0.0

    def __init__(self, compute: Compute, rank: Callable[[], int], reach: Callable[[str], None]) -> None:
        self._compute, self._rank, self._reach = compute, rank, reach

    def run(self, work: Work) -> None:
        plan, sync, rank = work.plan, work.sync, self._rank()
        rows: list[Row] = []
        for index, (piece, data) in enumerate(zip(plan.pieces, work.pieces, strict=True)):
            is_last = index + 1 == len(plan.pieces)
            with in_user_code(rank, plan.step, data, "loss(model, batch)", self._compute.loss):
                total, factor, row = self._compute.forward(plan, piece, data, work.at_start)
            rows.append(row)
            self._reach("forward")
            if is_last:
                # Before the last backward: so everyone knows what the whole batch weighs when sums are taken.
                sync.post(rows, work.mine, work.standing())
            sync.gradients.open((piece.shards.start, piece.shards.stop), is_last=is_last)
            with in_user_code(rank, plan.step, data, "the backward of the loss"):
                _backward(total, factor)
            sync.gradients.close()
        if not rows:
            sync.post(rows, work.mine, work.standing())

    def use(self, function: Forward, batch: Any) -> Any:
        return function(uncompiled(self._compute.model), batch)

    def meet(self, groups: Groups) -> None:
        """Nobody else holds any of it."""
