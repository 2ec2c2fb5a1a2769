"""Where in a model each parameter is used: the module that is being called whenever it is needed."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


class _Watch(TorchFunctionMode):
    """Notes which modules are being called when a function of torch is given a parameter."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.calls: list[str] = []
        self.stacks: dict[str, tuple[str, ...]] = {}

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if _has_tensor(result):  # else it was asked for its shape, or the like
            for tensor in _tensors([*args, *(kwargs or {}).values()]):
                if (name := self._names.get(id(tensor))) is not None:
                    self._note(name)
        return result

    def _note(self, name: str) -> None:
        before = self.stacks.get(name, tuple(self.calls))
        pairs = zip(before, self.calls, strict=False)
        self.stacks[name] = tuple(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _has_tensor(result: Any) -> bool:
    return next(_tensors([result]), None) is not None


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


@contextmanager
def watching_homes(model: nn.Module) -> Iterator[dict[str, tuple[str, ...]]]:
    """Gives, after a forward inside, each parameter's home: the modules, from the outermost on, that are being called
    whenever it is used.

    That need not be the modules it belongs to: nn.MultiheadAttention uses the weights of its `out_proj` without
    calling it, and weights that are tied are used in several places. What is not used at all has no home.
    """
    watch = _Watch(model)
    homes: dict[str, tuple[str, ...]] = {}
    hooks: list[Any] = []
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(_push(watch.calls, name), prepend=True))
        hooks.append(module.register_forward_hook(_pop(watch.calls), always_call=True))
    try:
        with watch:
            yield homes
    finally:
        for hook in hooks:
            hook.remove()
    homes.update(watch.stacks)


def _push(calls: list[str], name: str) -> Callable[..., None]:
    return lambda module, args: calls.append(name)


def _pop(calls: list[str]) -> Callable[..., None]:
    def pop(module: nn.Module, args: Any, output: Any) -> None:
        calls.pop()

    return pop


def choose_blocks(
    sizes: Mapping[str, int], homes: Mapping[str, Sequence[str]], limit: int, smallest: int
) -> dict[str, list[str]]:
    """Which parameters come and go together: by the module whose calls they are needed for; "" is always.

    The outermost module is chosen in whose calls no more than the limit is needed, or else the innermost. Blocks too
    small to be worth a message of their own are always there.
    """
    inside: Counter[str] = Counter()
    for name, size in sizes.items():
        for module in homes.get(name, ()):
            inside[module] += size
    blocks: dict[str, list[str]] = {"": []}
    for name in sizes:
        home = ("", *homes.get(name, ()))
        block = next((module for module in home if module and inside[module] <= limit), home[-1])
        blocks.setdefault(block, []).append(name)
    for block in [b for b, names in blocks.items() if b and sum(sizes[n] for n in names) < smallest]:
        blocks[""] += blocks.pop(block)
    return {block: names for block, names in blocks.items() if names}
