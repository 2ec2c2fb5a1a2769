"""Forwards that count their calls in Python: what is written down once would stay what it was in that one."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from shoal.spec.errors import UserError
from shoal.train.split.stages import Program

Numbers = Mapping[str, Mapping[str, Any]]
"""By the name of a module, what it knows besides tensors and other modules."""


def read_numbers(model: nn.Module) -> Numbers:
    return {
        name: {key: value for key, value in vars(module).items() if isinstance(value, int | float | str)}
        for name, module in model.named_modules()
    }


def find_changed(model: nn.Module, before: Numbers) -> dict[str, str]:
    """The modules that a forward has changed such a number of, and which."""
    changed: dict[str, str] = {}
    for name, values in read_numbers(model).items():
        for key, value in before.get(name, {}).items():
            if key in values and values[key] is not value and values[key] != value:
                changed.setdefault(name, key)
    return changed


def check_counting(model: nn.Module, program: Program, changed: Mapping[str, str]) -> None:
    """Layers that are called as they are may count; code that was followed may not."""
    called = program.called()
    for name, key in changed.items():
        if not any(f"{name}.".startswith(f"{layer}.") for layer in called):
            where = f"{name} ({type(model.get_submodule(name)).__name__})" if name else "itself"
            raise UserError(
                f"The model ({type(model).__name__}) cannot be cut into stages: the forward of {where} changes "
                f"`self.{key}`.",
                why="it is written down once, so a number that is another in every call would stay as it is",
                hint="keep it in a buffer (`self.register_buffer(...)`), or move that code into a layer of its own",
            )
