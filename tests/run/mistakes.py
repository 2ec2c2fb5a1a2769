"""A trainer that works, for scripts and tests that make a mistake with it. docs/errors.md has a row for each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import shoal

INPUTS = torch.linspace(-1, 1, 160).reshape(40, 4)
TARGETS = torch.arange(40) % 3


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """`act` does what the user `did`; `error` is the first line they are told, `do` a part of the advice."""

    did: str
    act: Callable[[], object]
    error: str
    do: str
    step: int | None = None


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def mean_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def make(model: Any = None, loss: Any = mean_loss, optimizer: Any = None, data: Any = None, **settings: Any) -> Any:
    """A trainer that works, but for what is given."""
    model = make_model() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), 0.1) if optimizer is None else optimizer
    data = (INPUTS, TARGETS) if data is None else data
    return shoal.Trainer(model, loss, optimizer, data, **{"batch_size": 10, **settings})


def fit(steps: int = 3, **parts: Any) -> None:
    with make(**parts) as trainer:
        trainer.fit(steps=steps)


def use(action: Callable[[Any], object], **parts: Any) -> None:
    with make(**parts) as trainer:
        action(trainer)
