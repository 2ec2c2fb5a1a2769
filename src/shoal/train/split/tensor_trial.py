"""The loss on the first samples, again and again, with nothing left behind."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shoal.train.compute import Compute, autocast
from shoal.train.loss import as_sum, move
from shoal.train.traits import keeping_buffers


@dataclass(frozen=True, slots=True)
class Trial:
    """Every forward draws the same random numbers."""

    compute: Compute
    samples: Any

    @property
    def model(self) -> nn.Module:
        return self.compute.model

    def forward(self, precision: str | None = None) -> torch.Tensor:
        """The loss, as a number that can be differentiated; in another precision than the run's, if asked to."""
        settings, device = self.compute.settings, self.compute.device
        torch.manual_seed(settings.seed)
        with autocast(precision or settings.precision, device):
            return as_sum(self.compute.loss(self.model, move(self.samples, device)), 1)[0]

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Inside, the model may be run; afterwards it is as before."""
        gradients = [(parameter, parameter.grad) for parameter in self.model.parameters()]
        for parameter, _ in gradients:
            parameter.grad = None
        try:
            with keeping_buffers(self.model), torch.random.fork_rng(devices=[]), torch.enable_grad():
                yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
