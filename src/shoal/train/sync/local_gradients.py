"""Gradients of a copy that learns by itself: they stay where backward puts them, for nobody else adds them up."""

from collections.abc import Sequence

import torch
from torch import nn

from shoal.train.flat import CHUNK
from shoal.train.summing import square_of
from shoal.train.tree import Node


class OwnGradients:
    """The gradients of one inner batch, which may come in several pieces. Nothing is copied."""

    stalled = 0.0

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self.unused = set(range(len(parameters)))

    def begin(self) -> None:
        """The next backwards belong to another batch."""
        self.detach()

    def open(self, node: Node, *, is_last: bool) -> None:
        """Whichever piece it is, torch adds it to those before."""

    def close(self) -> None:
        if self.unused:
            self.unused -= {index for index, each in enumerate(self._parameters) if each.grad is not None}

    def take(self) -> list[torch.Tensor]:
        """One flat tensor for each parameter, zeros for what no sample reached. They are ours alone from here on."""
        return [_flat(parameter) for parameter in self._parameters]

    def detach(self) -> None:
        """Give their memory back."""
        for parameter in self._parameters:
            parameter.grad = None


def _flat(parameter: nn.Parameter) -> torch.Tensor:
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter).detach().view(-1)
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    return dense.detach().contiguous().view(-1)


def scale(gradients: Sequence[torch.Tensor], factor: float) -> list[float]:
    """Multiply gradients; returns the sum of squares of each afterwards. Both in one pass over memory."""
    found: list[torch.Tensor] = []
    for gradient in gradients:
        squares = [square_of(chunk.mul_(factor)) for chunk in gradient.split(CHUNK)]
        found.append(torch.stack(squares).sum() if squares else gradient.new_zeros((), dtype=torch.float32))
    return list(torch.stack(found).tolist())
