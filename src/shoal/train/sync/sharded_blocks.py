"""Parameters that are there only while a block of layers computes: gathered before, given back after."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from shoal.comm.group import Work
from shoal.train.sync.sharded_state import Shards
from shoal.train.sync.sharded_units import Unit

FETCH, DROP, SUM = "fetch", "drop", "sum"


class Act(NamedTuple):
    """Something that all copies do together in a pass, always in the same order."""

    kind: str
    unit: Unit


class Saved(NamedTuple):
    """A view of a unit's parameters that backward will need, without the memory behind it."""

    unit: Unit
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(slots=True)
class Tape:
    """What is done in a pass before its backward begins, and after."""

    forward: list[Act]
    backward: list[Act]


class Blocks:
    """Sees to it that the parameters of a unit are there while its module is called, and while backward needs them.

    Forward: fetched before the module is called, dropped after it. Backward: what autograd has kept of parameters is
    kept as a description, and they are fetched when it is looked at, so this holds for outputs of any form; they are
    dropped when their gradients are summed. Activation checkpoints call modules in the middle of backward; nothing is
    dropped after those calls.

    The first pass is written down. From then on, whenever a unit is waited for, the next one is fetched already. And
    a worker that has nothing to compute can go through the same acts, so that the others get what they need of it.
    """

    def __init__(self, shards: Shards, model: nn.Module) -> None:
        self._shards = shards
        self._always = [unit for unit in shards.units if not unit.home and unit.size]
        self._here: set[int] = set()
        self._coming: dict[int, Work] = {}
        self._by_storage = {
            whole.untyped_storage()._cdata: unit for unit, whole in zip(shards.units, shards.wholes, strict=True)
        }
        self._contexts: list[saved_tensors_hooks | None] = []
        self._is_running = self._is_backward = False
        self.tape: Tape | None = None
        self._log = Tape([], [])
        self._at = 0
        self.waited = 0.0
        modules = dict(model.named_modules())
        self._hooks = [
            hook
            for unit in shards.units
            if unit.home and unit.size
            for hook in (
                modules[unit.home].register_forward_pre_hook(self._entering(unit), prepend=True),
                modules[unit.home].register_forward_hook(self._leaving(unit), always_call=True),
            )
        ]

    def begin(self) -> None:
        """A step begins: only what is always needed is there."""
        self._contexts.clear()
        self.waited = 0.0
        self._shards.dismiss()
        self._here = {unit.number for unit in self._always}
        for unit in self._always:
            self._wait(unit, self._shards.fetch(unit))
        self._is_running = True
        self.begin_pass()

    def begin_pass(self) -> None:
        self._is_backward, self._log, self._at = False, Tape([], []), 0

    def turn(self) -> None:
        """Forward is over, backward begins."""
        self._is_backward, self._at = True, 0

    def end_pass(self) -> None:
        """Backward is over: nothing but what is always needed stays."""
        for unit in self._shards.units:
            if unit.number in self._coming:  # fetched ahead for a call that did not come
                self._wait(unit, self._coming.pop(unit.number))
                self._here.add(unit.number)
            if unit.home and unit.number in self._here:
                self.drop(unit)
        if self.tape is None:
            self.tape = self._log
        self.begin_pass()

    def end(self) -> None:
        """The step is over: its update has made all that is here old."""
        self._is_running = False
        for unit in self._always:
            self._shards.drop(unit)

    # Acts.

    def need(self, unit: Unit) -> None:
        """Have a unit's parameters, and let the next ones come already."""
        if unit.number in self._here:
            return
        self.note(Act(FETCH, unit))
        work = self._coming.pop(unit.number, None)
        self._wait(unit, work if work is not None else self._shards.fetch(unit))
        self._here.add(unit.number)
        following = self._next_fetch()
        if following is not None and following.number not in self._here and not self._coming:
            self._coming[following.number] = self._shards.fetch(following)

    def drop(self, unit: Unit) -> None:
        if unit.home and unit.number in self._here:
            self.note(Act(DROP, unit))
            self._here.discard(unit.number)
            self._shards.drop(unit)

    def note(self, act: Act) -> None:
        """Something is done now that all copies do."""
        (self._log.backward if self._is_backward else self._log.forward).append(act)
        self._at += 1

    def _next_fetch(self) -> Unit | None:
        if self.tape is None:
            return None
        acts = self.tape.backward if self._is_backward else self.tape.forward
        return next((act.unit for act in acts[self._at :] if act.kind == FETCH), None)

    def _wait(self, unit: Unit, work: Work) -> None:
        began = time.perf_counter()
        self._shards.take(unit, work)
        self.waited += time.perf_counter() - began

    # Modules and autograd.

    def _entering(self, unit: Unit) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any) -> None:
            context = None
            if self._is_running:
                self.need(unit)
                context = saved_tensors_hooks(self._pack, self._unpack)
                context.__enter__()
            self._contexts.append(context)

        return enter

    def _leaving(self, unit: Unit) -> Callable[..., None]:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            context = self._contexts.pop() if self._contexts else None
            if context is not None:
                context.__exit__()
                if not self._is_backward:
                    self.drop(unit)

        return leave

    def _pack(self, tensor: torch.Tensor) -> Any:
        unit = self._by_storage.get(tensor.untyped_storage()._cdata)
        if unit is None or not unit.home:
            return tensor
        return Saved(unit, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _unpack(self, saved: Any) -> torch.Tensor:
        if not isinstance(saved, Saved):
            assert isinstance(saved, torch.Tensor)
            return saved
        self.need(saved.unit)
        whole = self._shards.wholes[saved.unit.number]
        return torch.as_strided(whole, saved.size, saved.stride, saved.offset)

    def detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._is_running = False
