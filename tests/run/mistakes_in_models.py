"""Mistakes in the loss, the model and the optimizer."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from mistakes import INPUTS, TARGETS, Mistake, fit, make_model, mean_loss
from torch import nn


def after(num_calls: int, value: Callable[[torch.Tensor], Any]) -> Callable[[nn.Module, Any], Any]:
    """A loss that goes wrong after some calls, the first of which is the trial."""
    calls = iter(range(1000))

    def loss(model: nn.Module, batch: Any) -> Any:
        mean = mean_loss(model, batch)
        return mean if next(calls) < num_calls else value(mean)

    return loss


LOSSES = [
    Mistake(
        did="the loss is one number a sample",
        act=lambda: fit(loss=lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none")),
        error="The loss returned a tensor of shape (2,), not one number.",
        do="reduce it with `.mean()`",
        step=0,
    ),
    Mistake(
        did="the loss is a plain float (`.item()`)",
        act=lambda: fit(loss=lambda m, b: mean_loss(m, b).item()),
        error="The loss returned a float, not a tensor.",
        do="without `.item()` or `float()`",
        step=0,
    ),
    Mistake(
        did="the loss is an integer tensor",
        act=lambda: fit(loss=lambda m, b: (m(b[0]).argmax(1) == b[1]).sum()),
        error="The loss returned a tensor of torch.int64.",
        do="compute it from the model's output",
        step=0,
    ),
    Mistake(
        did="the loss is detached from the model",
        act=lambda: fit(loss=lambda m, b: mean_loss(m, b).detach()),
        error="The loss does not depend on any trainable parameter.",
        do="without `.detach()`, `.item()` or `torch.no_grad()`",
        step=0,
    ),
    Mistake(
        did="the loss function has no `return`",
        act=lambda: fit(loss=lambda m, b: None),
        error="The loss returned nothing (None).",
        do="end the loss function with `return`",
        step=0,
    ),
    Mistake(
        did="the loss is a tuple of three",
        act=lambda: fit(loss=lambda m, b: (mean_loss(m, b), 1.0, 2.0)),
        error="The loss returned a tuple of 3.",
        do="return the loss alone, or (sum, weight)",
        step=0,
    ),
    Mistake(
        did="the weight of a (sum, weight) pair is nan",
        act=lambda: fit(loss=after(3, lambda mean: (mean, float("nan")))),
        error="The loss returned the weight nan.",
        do="`mask.sum()`",
        step=2,
    ),
    Mistake(
        did="all weights of a batch are 0",
        act=lambda: fit(loss=after(2, lambda mean: (mean, 0.0))),
        error="The weights of the whole batch add up to zero.",
        do="check the mask",
        step=1,
    ),
    Mistake(
        did="the loss becomes nan",
        act=lambda: fit(loss=after(3, lambda mean: mean * float("nan")), not_finite="error"),
        error="The loss is nan for samples 39, 1, 21, 12 and 6 more (rank 0, shard 0).",
        do="lower the learning rate",
        step=2,
    ),
    Mistake(
        did="the loss is nan three times in a row",
        act=lambda: fit(loss=after(3, lambda mean: mean * float("nan")), steps=8),
        error="The loss is nan for samples 4, 33, 6, 16 and 6 more (rank 0, shard 0).",
        do="lower the learning rate",
        step=4,
    ),
    Mistake(
        did="the loss becomes infinite",
        act=lambda: fit(loss=after(2, lambda mean: mean / 0), microbatch_size=5, not_finite="error"),
        error="The loss is inf for samples 3, 4, 25, 33 and 1 more (rank 0, shard 5).",
        do="lower the learning rate",
        step=0,
    ),
    Mistake(
        did="a sample holds nan",
        act=lambda: fit(
            data=(INPUTS.clone().index_fill_(0, torch.tensor([17]), torch.nan), TARGETS), steps=4, not_finite="error"
        ),
        error="The loss is nan for samples 39, 1, 21, 12 and 6 more (rank 0, shard 0).",
        do="look at `dataset[17]`",
        step=2,
    ),
    Mistake(
        did="the gradient is nan though the loss is a number",
        act=lambda: fit(loss=lambda m, b: mean_loss(m, b) + (m[0].bias * 0).sum().sqrt(), not_finite="error"),
        error="The gradient is nan, though the loss is a number: in 0.bias.",
        do="look for a square root, logarithm or division at 0",
        step=0,
    ),
    Mistake(
        did="`nn.CrossEntropyLoss()` passed as the loss",
        act=lambda: fit(loss=nn.CrossEntropyLoss()),
        error="The loss is a CrossEntropyLoss, which takes predictions and targets.",
        do="wrap it: `lambda model, batch: ",
    ),
    Mistake(
        did="loss and optimizer exchanged",
        act=lambda: fit(loss=torch.optim.SGD(make_model().parameters(), 0.1)),
        error="The loss is of type SGD.",
        do="for example: `lambda model, batch: ",
    ),
    Mistake(
        did="a loss that takes other arguments",
        act=lambda: fit(loss=lambda model, inputs, targets: None),
        error="The loss does not take two arguments: <lambda>(model, inputs, targets).",
        do="for example: `loss=lambda model, batch: ",
    ),
]


class WithSpare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.used(inputs)


def two_parameters_over_one_memory() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(model[0].weight.data)
    return model


def of_two_types() -> nn.Module:
    model = make_model()
    model[2].double()
    return model


def with_optimizer(make_optimizer: Callable[[nn.Module], Any]) -> None:
    model = make_model()
    fit(model=model, optimizer=make_optimizer(model))


MODELS = [
    Mistake(
        did="a layer that is never used",
        act=lambda: fit(model=WithSpare()),
        error="2 parameter(s) got no gradient: spare.bias, spare.weight.",
        do="pass unused='zero'",
        step=0,
    ),
    Mistake(
        did="two Parameters over one memory",
        act=lambda: fit(model=two_parameters_over_one_memory()),
        error="Parameters '0.weight' and '1.weight' share memory but are two Parameter objects.",
        do="`decoder.weight = encoder.weight`",
    ),
    Mistake(
        did="an optimizer made for another model",
        act=lambda: with_optimizer(lambda model: torch.optim.SGD(make_model().parameters(), 0.1)),
        error="The optimizer holds 4 parameter(s) that are not in the model.",
        do="make the optimizer from `model.parameters()`",
    ),
    Mistake(
        did="an optimizer for a part of the model",
        act=lambda: with_optimizer(lambda model: torch.optim.SGD(model[0].parameters(), 0.1)),
        error="The optimizer does not hold 2 trainable parameter(s): 2.weight, 2.bias.",
        do="freeze them with `parameter.requires_grad_(False)`",
    ),
    Mistake(
        did="an optimizer class instead of an optimizer",
        act=lambda: with_optimizer(lambda model: torch.optim.SGD),
        error="The optimizer is the class SGD.",
        do="torch.optim.AdamW(model.parameters(), lr=1e-3)",
    ),
    Mistake(
        did="an optimizer that needs a closure",
        act=lambda: with_optimizer(lambda model: torch.optim.LBFGS(model.parameters())),
        error="LBFGS cannot be used: its step needs a closure.",
        do="torch.optim.AdamW",
    ),
    Mistake(
        did="everything frozen",
        act=lambda: fit(model=make_model().requires_grad_(False)),
        error="The optimizer has nothing to train.",
        do="unfreeze a layer",
    ),
    Mistake(
        did="parameters of several types",
        act=lambda: fit(model=of_two_types()),
        error="The model's trainable parameters have several types: torch.float32, torch.float64.",
        do="`model.float()`",
    ),
    Mistake(
        did="a model without parameters",
        act=lambda: fit(model=nn.ReLU(), optimizer=torch.optim.SGD(make_model().parameters(), 0.1)),
        error="The model has no parameters.",
        do="assign its layers to attributes",
    ),
]
