"""Calling the user's loss, and understanding what it returns."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from shoal.spec.errors import UserError

Loss = Callable[[nn.Module, Any], Any]
"""(model, batch) -> the mean over the batch's samples, or (sum, weight) where samples weigh differently."""


def as_sum(result: Any, num_samples: int) -> tuple[torch.Tensor, float, float]:
    """(tensor to differentiate, factor that makes it a sum over samples, weight of that sum)."""
    if isinstance(result, tuple):
        if len(result) != 2:
            raise _not_a_loss(f"a tuple of {len(result)}", _ONE_OR_TWO, "return the loss alone, or (sum, weight)")
        total, weight = result
        return _scalar(total), 1.0, _weight(weight)
    return _scalar(result), float(num_samples), float(num_samples)


_ONE_OR_TWO = "loss(model, batch) must return one number, the mean over the samples, or a pair (sum, weight)"


def _scalar(value: Any) -> torch.Tensor:
    if value is None:
        raise _not_a_loss("nothing (None)", _ONE_OR_TWO, "end the loss function with `return`")
    if not isinstance(value, torch.Tensor):
        why, hint = "gradients flow through tensors only", "return the tensor itself, without `.item()` or `float()`"
        raise _not_a_loss(f"a {type(value).__name__}, not a tensor", why, hint)
    if value.numel() != 1:
        hint = "reduce it with `.mean()`, or return `(losses.sum(), mask.sum())` where samples weigh differently"
        raise _not_a_loss(f"a tensor of shape {tuple(value.shape)}, not one number", _ONE_OR_TWO, hint)
    if not value.is_floating_point():
        why, hint = (
            "only floating-point numbers have gradients",
            "compute it from the model's output, or use `.float()`",
        )
        raise _not_a_loss(f"a tensor of {value.dtype}", why, hint)
    return value.reshape(())


def _weight(value: Any) -> float:
    try:
        weight = float(value)
    except (TypeError, ValueError, RuntimeError):
        weight = math.nan
    if not 0 <= weight < math.inf:
        shown = describe(value) if isinstance(value, torch.Tensor) and value.numel() != 1 else repr(value)[:60]
        why = "the second of the pair (sum, weight) is what the sum is divided by: one number of 0 or more"
        raise _not_a_loss(f"the weight {shown}", why, "return how many samples or tokens were counted: `mask.sum()`")
    return weight


def _not_a_loss(what: str, why: str, hint: str) -> UserError:
    return UserError(f"The loss returned {what}.", why=why, hint=hint)


def check_differentiable(value: torch.Tensor) -> None:
    if not value.requires_grad:
        raise UserError(
            "The loss does not depend on any trainable parameter.",
            why="it carries no gradient: it was detached, computed under no_grad, or made from plain numbers",
            hint="compute it from the model's output, without `.detach()`, `.item()` or `torch.no_grad()`",
        )


def describe(batch: Any) -> str:
    """The shapes in a batch, for error messages."""
    if isinstance(batch, torch.Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')}{list(batch.shape)}"
    if isinstance(batch, Mapping):
        return "{" + ", ".join(f"{key}: {describe(value)}" for key, value in list(batch.items())[:8]) + "}"
    if isinstance(batch, list | tuple):
        return "(" + ", ".join(describe(value) for value in batch[:8]) + ")"
    return type(batch).__name__


def count_values(batch: Any) -> int:
    """How many numbers the tensors of a batch have: how much data it is, where samples are not alike."""
    if isinstance(batch, torch.Tensor):
        return batch.numel()
    if isinstance(batch, Mapping):
        return sum(map(count_values, batch.values()))
    return sum(map(count_values, batch)) if isinstance(batch, list | tuple) else 0


def move(batch: Any, device: torch.device) -> Any:
    """A batch on the device; tensors inside lists, tuples and dicts too."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: move(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(move(value, device) for value in batch)
    return batch
