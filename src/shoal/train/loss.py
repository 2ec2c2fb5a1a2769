"""Calling the user's loss, and understanding what it returns."""

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
            raise _not_a_loss(f"a tuple of {len(result)}")
        total, weight = result
        return _scalar(total), 1.0, float(weight)
    return _scalar(result), float(num_samples), float(num_samples)


def _scalar(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise _not_a_loss(f"a {type(value).__name__}")
    if value.numel() != 1:
        raise _not_a_loss(f"a tensor of shape {tuple(value.shape)}")
    if not value.is_floating_point():
        raise _not_a_loss(f"a tensor of {value.dtype}")
    return value.reshape(())


def _not_a_loss(what: str) -> UserError:
    return UserError(
        f"The loss returned {what}, not a number.",
        why="loss(model, batch) must return one scalar tensor, the mean over the samples, or a pair (sum, weight)",
        hint="reduce it with `.mean()`, or return `(losses.sum(), mask.sum())` where samples weigh differently",
    )


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
