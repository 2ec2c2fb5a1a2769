"""Whether a model that was cut computes what it computed as a whole: layer by layer, and gradient by gradient."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shoal.spec.errors import ShoalError, UserError
from shoal.train.cut import Cut, Slice
from shoal.train.split.tensor_portion import Portion, slice_of
from shoal.train.split.tensor_trial import Trial

TOLERANCE = 1e-3
"""Of the largest number in a tensor. Sums in another order differ by far less, wrong plans by about one."""

HALF_TOLERANCE = 0.1
"""And in a type of 16 bits, which is that of the model itself: the run's own precision is left out here."""

Outputs = list[tuple[str, list[torch.Tensor]]]


class Comparison:
    """Made of a whole model, which it runs once; `check` runs it again when it has been cut."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._outputs: Outputs = []
        with trial.undisturbed(), _listening(trial.model, self._note):
            trial.forward("float32").backward()
            self._gradients = _gradients(trial.model)

    def _note(self, name: str, tensors: list[torch.Tensor]) -> None:
        self._outputs.append((name, [tensor.detach().clone() for tensor in tensors]))

    def check(self, cut: Cut, part: int) -> None:
        """Raise UserError for the first layer whose outputs, or the first parameter whose gradient, is another."""
        self._left = iter(self._outputs)
        self._inside = ""
        with self._trial.undisturbed(), _listening(self._trial.model, self._compare, self._begin):
            try:
                self._trial.forward("float32").backward()
            except ShoalError:
                raise
            except Exception as error:
                raise _differs(self._inside, f"it fails: {type(error).__name__}: {error}") from error
            self._compare_gradients(_gradients(self._trial.model), cut, part)
        self._outputs, self._gradients = [], {}

    def _begin(self, name: str) -> None:
        self._inside = name

    def _compare(self, name: str, tensors: list[torch.Tensor]) -> None:
        expected, wholes = next(self._left, ("", []))
        if expected != name or len(wholes) != len(tensors):
            raise _differs(name, "layers are called in another order")
        for found, whole in zip(tensors, wholes, strict=True):
            if tuple(found.shape) != tuple(whole.shape):
                raise _differs(name, f"its output is {list(found.shape)} instead of {list(whole.shape)}")
            if isinstance(found, Portion):
                whole = slice_of(found.cut, whole.shape[found.cut.dim], found.region).of(whole)
                found = found.local
            if not _is_close(found.detach(), whole, _largest(whole)):
                raise _differs(name, "its output is another")

    def _compare_gradients(self, found: Mapping[str, torch.Tensor], cut: Cut, part: int) -> None:
        most = max((_largest(gradient) for gradient in self._gradients.values()), default=0.0)
        for name, whole in self._gradients.items():
            held = cut.holding(name, part)
            mine = held.of(whole) if isinstance(held, Slice) else whole
            # Some gradients are zero but for rounding, as that of a bias before a softmax.
            scale = max(_largest(whole), _tolerance(whole) * most)
            if name not in found or not _is_close(found[name], mine, scale):
                raise _differs(name.rpartition(".")[0], f"the gradient of {name} is another")


def _tolerance(values: torch.Tensor) -> float:
    return TOLERANCE if values.element_size() > 2 else HALF_TOLERANCE


def _is_close(found: torch.Tensor, whole: torch.Tensor, scale: float) -> bool:
    if not whole.is_floating_point():
        return torch.equal(found, whole)
    most = _tolerance(whole) * scale
    return bool(torch.allclose(found.double(), whole.double(), rtol=0, atol=most, equal_nan=True))


def _largest(values: torch.Tensor) -> float:
    finite = values[values.isfinite()] if values.is_floating_point() else values
    return float(finite.abs().max()) if finite.numel() else 0.0


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.detach() for name, p in model.named_parameters() if p.grad is not None}


@contextmanager
def _listening(model: nn.Module, tell: Any, begin: Any = lambda name: None) -> Iterator[None]:
    """Inside, every module tells its outputs when it has computed them."""
    hooks = []
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(lambda _, __, name=name: begin(name)))
        hooks.append(module.register_forward_hook(lambda _, __, out, name=name: tell(name, list(_tensors(out)))))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _differs(name: str, what: str) -> UserError:
    return UserError(
        f"The model computes something else when it is cut: in layer {name or 'the model'!r}, {what}.",
        why="its code needs the whole of a layer that was cut, such as the shape of a weight",
        hint=f"keep that layer whole: `shoal.tensor(..., plan={{'{name or '*'}*': 'replicate'}})`",
    )
