"""One forward of the user's loss, on one piece of a step."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shoal.data.ledger import Piece, StepPlan
from shoal.spec.spans import timed
from shoal.train.faulty import FaultPlan
from shoal.train.loss import Loss, as_sum, check_differentiable, move
from shoal.train.settings import Settings
from shoal.train.sync.sync import Row
from shoal.train.traits import ChangingBuffers, seed_of


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")


def uncompiled(model: nn.Module) -> nn.Module:
    """The module that `torch.compile` wrapped, whose parameters have their own names."""
    inner = getattr(model, "_orig_mod", model)
    assert isinstance(inner, nn.Module)
    return inner


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """What a forward needs. `is_random`: the model draws random numbers, so every piece gets a seed of its own."""

    model: nn.Module
    loss: Loss
    buffers: ChangingBuffers
    settings: Settings
    device: torch.device
    is_random: bool
    faults: FaultPlan | None

    @timed("forward", "compute")
    def forward(
        self, plan: StepPlan, piece: Piece, data: Any, at_start: torch.Tensor | None
    ) -> tuple[torch.Tensor, float, Row]:
        """The loss of one piece: what to differentiate, the factor that makes it a sum, and what to tell others."""
        self.prepare(plan, piece, at_start)
        with autocast(self.settings.precision, self.device):
            result = self.loss(self.model, move(data, self.device))
        return self.conclude(result, plan, piece, has_buffers=at_start is not None)

    def prepare(self, plan: StepPlan, piece: Piece, at_start: torch.Tensor | None) -> None:
        """Let the piece be computed as if it were the only one: same random numbers, same buffers."""
        if self.is_random:
            torch.manual_seed(seed_of(self.settings.seed, plan.step, piece.shards.start))
        if at_start is not None:
            self.buffers.write(at_start)

    def conclude(
        self, result: Any, plan: StepPlan, piece: Piece, *, has_buffers: bool
    ) -> tuple[torch.Tensor, float, Row]:
        """What the loss returned, checked, as a sum over samples."""
        total, factor, weight = as_sum(result, piece.num_samples)
        if self.faults is not None:
            total = self.faults.spoil(total, plan.step)
        check_differentiable(total)
        row = Row(
            shard=piece.shards.start,
            weight=weight,
            loss=float(total.detach()) * factor,
            num_samples=piece.num_samples,
            buffers=self.buffers.read() if has_buffers else None,
        )
        return total, factor, row
