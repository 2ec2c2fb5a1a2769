"""Whether what a trainer was given can work together, before anything is started."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shoal.spec.errors import UserError
from shoal.train.flat import named_groups


def check_parts(model: Any, loss: Any, optimizer: Any, scheduler: Any) -> None:
    """Raise UserError for parts that are not what they should be, or that do not belong together."""
    if not isinstance(model, nn.Module):
        raise _wrong("model", model, "a torch.nn.Module", "Trainer(model, loss, optimizer, dataset, batch_size=...)")
    _check_loss(loss)
    if not isinstance(optimizer, torch.optim.Optimizer):
        example = "torch.optim.AdamW(model.parameters(), lr=1e-3)"
        raise _wrong("optimizer", optimizer, "a torch optimizer, made for the model's parameters", example)
    if scheduler is not None and not (hasattr(scheduler, "step") and hasattr(scheduler, "state_dict")):
        example = "torch.optim.lr_scheduler.StepLR(optimizer, 1000)"
        raise _wrong("scheduler", scheduler, "one of torch.optim.lr_scheduler's", example)
    if next(model.parameters(), None) is None:
        raise UserError(
            "The model has no parameters.",
            why="there is nothing to train",
            hint="assign its layers to attributes (`self.layer = nn.Linear(...)`), lists of them as nn.ModuleList",
        )
    _check_closure(optimizer)
    if not any(nn.parameter.is_lazy(parameter) for parameter in model.parameters()):
        named_groups(model, optimizer)


def check_batch(batch: Any, kind: type, *, is_averaged: bool) -> None:
    """Raise UserError for what is not a batch of a trainer's own, or comes when nothing can be trained."""
    if is_averaged:
        raise UserError(
            "The model cannot be trained now.",
            why="inside `with trainer.averaged():` it has averaged parameters, which no step must change",
            hint="end that block before the next step",
        )
    if not isinstance(batch, kind):
        raise UserError(
            f"step() got a {type(batch).__name__}, not a batch of the trainer's.",
            why="a step needs to know which samples of the global batch these are",
            hint="write `for batch in trainer: trainer.step(batch)`, or call `trainer.fit(...)`",
        )


def _check_loss(loss: Any) -> None:
    example = "lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])"
    if not callable(loss):
        raise _wrong("loss", loss, "a function of (model, batch)", example)
    if isinstance(loss, nn.modules.loss._Loss):
        raise UserError(
            f"The loss is a {type(loss).__name__}, which takes predictions and targets.",
            why="shoal calls loss(model, batch), so that any model and any batch will do",
            hint=f"wrap it: `lambda model, batch: nn.{type(loss).__name__}()(model(batch[0]), batch[1])`",
        )
    if _takes(loss, 2) is False:
        raise UserError(
            f"The loss does not take two arguments: {_name(loss)}{inspect.signature(loss)}.",
            why="shoal calls loss(model, batch)",
            hint=f"for example: `loss={example}`",
        )


def _takes(function: Callable[..., Any], count: int) -> bool | None:
    """Whether a function can be called with so many arguments; None where that cannot be told."""
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:
        return None
    return True


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _check_closure(optimizer: torch.optim.Optimizer) -> None:
    # The class's own: a scheduler has put a wrapper of any arguments around the object's.
    if _takes(type(optimizer).step, 1) is False:
        raise UserError(
            f"{type(optimizer).__name__} cannot be used: its step needs a closure.",
            why="it computes the loss several times in a step, and shoal computes it once, divided among the workers",
            hint="use an optimizer that works from one gradient, such as torch.optim.AdamW",
        )


def _wrong(name: str, value: Any, wanted: str, example: str) -> UserError:
    kind = f"the class {value.__name__}" if isinstance(value, type) else f"of type {type(value).__name__}"
    return UserError(f"The {name} is {kind}.", why=f"it must be {wanted}", hint=f"for example: `{example}`")
