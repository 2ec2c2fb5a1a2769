"""Put weights from elsewhere into a model: first decide by names and shapes, then copy."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from shoal.checkpoint.names import plain_names
from shoal.spec.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What must fit for a weight to be copied."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def takes(self, other: "Shape") -> bool:
        """Whether `other` can be copied here: same shape, and numbers that stay the same kind of number."""
        return self.shape == other.shape and torch.can_cast(other.dtype, self.dtype)

    def __str__(self) -> str:
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """A layer that is in both but does not fit."""

    name: str
    model: Shape
    weights: Shape

    def __str__(self) -> str:
        return f"{self.name}: the model has {self.model}, the weights have {self.weights}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """What became of each name: copied, only in the model, only in the weights, or in both but not fitting."""

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[Mismatch, ...]

    @property
    def is_complete(self) -> bool:
        return not (self.missing or self.unexpected or self.mismatched)

    def report(self) -> str:
        """The same as text, one fact a line."""
        total = len(self.loaded) + len(self.missing) + len(self.mismatched)
        lines = [f"{len(self.loaded)} of {total} tensors of the model were taken over"]
        lines += [f"  does not fit, kept as it was: {item}" for item in self.mismatched]
        lines += [f"  not in the weights, kept as it was: {name}" for name in self.missing]
        lines += [f"  not in the model, left out: {name}" for name in self.unexpected]
        return "\n".join(lines)


def transfer(model: torch.nn.Module, weights: Mapping[str, torch.Tensor], strict: bool = True) -> Transfer:
    """Copy `weights` into `model` where name and shape agree, and say what was done.

    With `strict` anything that does not agree is a UserError that names each layer with both shapes, and the model is
    not touched. Without it, what fits is copied and the rest stays as it was. Wrappers' prefixes (`module.`,
    `_orig_mod.`) do not matter on either side; floating-point types are converted to the model's.
    """
    targets = _targets(model)
    sources = {plain: weights[name] for name, plain in plain_names(weights).items()}
    decided = match(_shapes(targets), _shapes(sources), _tied(targets))
    if strict and not decided.is_complete:
        raise _does_not_fit(decided)
    with torch.no_grad():
        for name in decided.loaded:
            if name in sources:
                targets[name].copy_(sources[name])
    return decided


def match(model: Mapping[str, Shape], weights: Mapping[str, Shape], tied: Iterable[frozenset[str]] = ()) -> Transfer:
    """Decide by names and shapes alone. A name missing in the weights counts as loaded if one it is tied to is."""
    fitting = {name for name, want in model.items() if name in weights and want.takes(weights[name])}
    loaded = fitting.union(*(group for group in tied if group & fitting))
    mismatched = [
        Mismatch(name=name, model=want, weights=weights[name])
        for name, want in model.items()
        if name in weights and name not in fitting
    ]
    return Transfer(
        loaded=tuple(name for name in model if name in loaded and (name in fitting or name not in weights)),
        missing=tuple(name for name in model if name not in loaded and name not in weights),
        unexpected=tuple(name for name in weights if name not in model),
        mismatched=tuple(mismatched),
    )


def _targets(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The model's own tensors by plain name; writing to them writes to the model."""
    tensors = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    for name, tensor in tensors.items():
        if torch.nn.parameter.is_lazy(tensor):
            raise UserError(
                f"The model's {name!r} has no shape yet, so nothing can be copied into it.",
                why="it belongs to a lazy layer that has not seen data",
                hint="run the model once on a batch before loading weights into it",
            )
    return {plain: tensors[name] for name, plain in plain_names(tensors).items()}


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, Shape]:
    return {name: Shape(shape=tuple(tensor.shape), dtype=tensor.dtype) for name, tensor in tensors.items()}


def _tied(tensors: Mapping[str, torch.Tensor]) -> list[frozenset[str]]:
    """Groups of names that are one tensor, as with an output layer that shares the embedding's weight."""
    groups: dict[tuple[object, ...], set[str]] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            key = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride())
            groups.setdefault(key, set()).add(name)
    return [frozenset(group) for group in groups.values() if len(group) > 1]


def _does_not_fit(decided: Transfer) -> UserError:
    problems = [str(item) for item in decided.mismatched]
    problems += [f"{name}: is not in the weights" for name in decided.missing]
    problems += [f"{name}: is not in the model" for name in decided.unexpected]
    return UserError(
        f"The weights do not fit the model: {len(problems)} of their layers differ.",
        why="; ".join(problems),
        hint="use the same model, or `strict=False` to take over what fits and keep the rest",
    )
