"""A run of the loss in which layers are cut in name only: it shows where each cut would lead."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from shoal.train.split.tensor_elements import fact, name_of
from shoal.train.split.tensor_portion import Layout, Portion, Stuck
from shoal.train.split.tensor_rules import RULES


class Rehearsal:
    """`sources` are layers whose outputs are taken as cut, into so many blocks; `whole` are layers that are not.

    Each part is all there is, so nothing is said to anybody and every rule can be tried. A source is good if all that
    is made of its outputs ends in `rows`: layers that add up over what is cut. `failures` says why another is not;
    in `met_whole` are those that may have failed only because something that they met was not cut.
    """

    num_parts, part = 1, 0

    def __init__(self, sources: Mapping[str, int], whole: frozenset[str]) -> None:
        self.sources, self.whole = sources, whole
        self.rows: dict[str, set[tuple[frozenset[str], int]]] = defaultdict(set)
        self.sizes: dict[str, set[int]] = defaultdict(set)
        self.failures: dict[str, str] = {}
        self.met_whole: dict[str, str] = {}
        self.called: set[str] = set()
        self.used_outside: set[str] = set()
        self._emitted: set[str] = set()
        self._active: set[str] = set()
        self._last: frozenset[str] = frozenset()

    # What rules ask.

    def enter(self, whole: torch.Tensor) -> torch.Tensor:
        return whole

    def gather(self, portion: Portion, why: Stuck) -> torch.Tensor:
        """Here a cut ends that should not."""
        self._fail(portion.sources, str(why), is_first_hand=not why.met_whole)
        return portion.local

    def admit(self, whole: torch.Tensor, like: Portion) -> None:
        """A whole tensor that meets a part costs a sum of its gradients: only small ones are worth it."""
        if not isinstance(whole, nn.Parameter) and 2 * whole.numel() > prod(like.whole):
            raise Stuck("it meets a large tensor that is not cut", met_whole=True)

    def divide(self, size: int, portion: Portion) -> None:
        for source in portion.sources:
            self.sizes[source].add(size)

    def look(self, portions: Sequence[Portion]) -> None:
        self._last = portions[0].sources
        if not torch.is_grad_enabled() and any(each.has_grad for each in portions):
            raise Stuck("it is computed without gradients, as in a function with a backward of its own")

    def _fail(self, sources: frozenset[str], why: str, *, is_first_hand: bool = True) -> None:
        for source in sources:
            (self.failures if is_first_hand else self.met_whole).setdefault(source, why)

    # Running.

    def run(self, model: nn.Module, layers: Mapping[str, nn.Module], forward: Callable[[], object]) -> None:
        """Run the loss, with these linear layers watched."""
        owners = {id(p): name for name, layer in layers.items() for p in layer.parameters(recurse=False)}
        with self._watching(layers), _Uses(owners, self._active, self.used_outside):
            try:
                forward()
            except Exception as error:  # the user's code cannot do with a part
                if not self._last:
                    raise
                self._fail(self._last, f"{type(error).__name__}: {error}")
        self._fail(frozenset(self.used_outside), "its weight is used outside of it")
        self._judge()

    @contextmanager
    def _watching(self, layers: Mapping[str, nn.Module]) -> Iterator[None]:
        kept: dict[str, Any] = {name: vars(layer).get("forward") for name, layer in layers.items()}
        for name, layer in layers.items():
            layer.forward = partial(self._call, name, layer.forward)
        try:
            yield
        finally:
            for name, layer in layers.items():
                del layer.forward
                if kept[name] is not None:
                    layer.forward = kept[name]

    def _call(self, name: str, forward: Callable[[Any], torch.Tensor], input: torch.Tensor) -> torch.Tensor:
        self.called.add(name)
        self._active.add(name)
        try:
            if isinstance(input, Portion) and input.cut.dim == len(input.whole) - 1:
                if name in self.whole:
                    self._fail(input.sources, f"{name} is to be whole")
                self.rows[name].add((input.sources, input.cut.blocks))
                return forward(input.local)
            result = forward(input)
            if isinstance(input, Portion) or name not in self.sources:
                return result
            self._emitted.add(name)
            return Portion(result, Layout(result.dim() - 1, self.sources[name]), self, frozenset({name}))
        finally:
            self._active.discard(name)

    def _judge(self) -> None:
        """A source must end in rows; a row must be one, and the same, whenever it is called."""
        for name, calls in self.rows.items():
            reached = frozenset().union(*(sources for sources, _ in calls))
            if len({blocks for _, blocks in calls}) > 1 or name in self._emitted or name in self.used_outside:
                self._fail(reached | ({name} & self._emitted), f"{name} is used in different ways")
            bad = reached & (set(self.failures) | set(self.met_whole))
            if bad:
                self._fail(reached, f"it meets the outputs of {min(bad)} in {name}", is_first_hand=False)
        used = frozenset().union(*(sources for calls in self.rows.values() for sources, _ in calls))
        for name in self._emitted - used - set(self.met_whole):
            self._fail(frozenset({name}), "no layer adds up over its outputs")


class _Uses(TorchFunctionMode):
    """Finds parameters of layers that are used outside of these: such layers cannot be cut."""

    def __init__(self, owners: Mapping[int, str], active: set[str], found: set[str]) -> None:
        super().__init__()
        self._owners, self._active, self._found = owners, active, found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in args:
            if isinstance(value, nn.Parameter) and id(value) in self._owners and RULES.get(name_of(func)) is not fact:
                name = self._owners[id(value)]
                if name not in self._active:
                    self._found.add(name)
        return func(*args, **(kwargs or {}))
