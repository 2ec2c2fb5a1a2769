"""Gradients that are added up unit by unit, each worker getting its part of every sum."""

import time
from collections.abc import Callable

import torch

from shoal.comm.group import Group, Op, Work
from shoal.train.sync.sharded_blocks import DROP, FETCH, SUM, Act, Blocks, Tape
from shoal.train.sync.sharded_state import MOST_UNDER_WAY, Shards
from shoal.train.sync.sharded_units import Unit
from shoal.train.tree import Node


class UnitGradients:
    """Takes gradients as they come, and sends those of a unit on when all of it has come.

    With `keeps_all` gradients are added up here over all passes (backwards) of a step, in a buffer as large as the
    model, and travel once. Without, they travel in every pass and no more than a few units are held. Then all copies
    go through equally many passes: who has fewer joins in with zeros. Before each backward they say whether they have
    another, so that everybody knows when the last is over.
    """

    def __init__(self, group: Group, shards: Shards, *, keeps_all: bool, blocks: Blocks | None) -> None:
        self._group, self._shards, self._blocks, self._keeps_all = group, shards, blocks, keeps_all
        layout = shards.flat.layout
        self.unused: set[int] = {index for index, size in enumerate(layout.sizes) if size}
        self.stalled = 0.0
        self._units = [unit for unit in shards.units if unit.size]
        self._unit_of = {index: unit for unit in self._units for index in unit.indices}
        self._buffers: dict[int, torch.Tensor] = {}
        self._under_way: list[tuple[Work, Unit, torch.Tensor, torch.Tensor | None]] = []
        self._more = torch.zeros(1, dtype=torch.int32)
        self._asked: Work | None = None
        self._pass = 0
        self._is_last = False
        self._missing: list[int] = []
        self._next = 0
        self._tape = Tape([], [Act(SUM, unit) for unit in self._units])
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(index))
            for index, parameter in enumerate(shards.flat.parameters)
            if index in self._unit_of
        ]

    def begin(self) -> None:
        """A step begins."""
        self._pass, self.stalled = 0, 0.0
        self._is_over = False
        self._reset()

    def _reset(self) -> None:
        self._missing = [sum(self._shards.flat.layout.sizes[i] > 0 for i in unit.indices) for unit in self._units]
        self._numbers = {unit.number: place for place, unit in enumerate(self._units)}
        self._arrived: set[int] = set()
        self._next = 0

    def open(self, node: Node, *, is_last: bool) -> None:
        """The next backward is a pass of its own."""
        self._is_last = is_last
        self._reset()
        self._turn(has_more=not is_last)

    def _turn(self, *, has_more: bool) -> None:
        if self._blocks is not None:
            self._blocks.turn()
        if not self._keeps_all:
            self._more.fill_(has_more)
            self._asked = self._group.all_reduce(self._more, Op.MAX)

    def close(self) -> None:
        """Backward is over: what it did not reach counts as zero. After the last one, join in those of the others."""
        if self._keeps_all:
            self._clear_missing()
        if self._is_last or not self._keeps_all:
            for unit in self._units[self._next :]:
                self._send(unit)
        self._end_pass()
        if self._is_last:
            self._join_others()

    def _end_pass(self) -> None:
        self._pass += 1
        if self._blocks is not None:
            self._blocks.end_pass()
        if self._asked is not None:
            self._wait(self._asked)
            self._asked = None

    def _join_others(self) -> None:
        while not self._keeps_all and int(self._more):
            self._join_pass()
        self._is_over = True

    def _join_pass(self) -> None:
        """Do what the others do in a pass, with nothing to compute."""
        tape = self._tape if self._blocks is None or self._blocks.tape is None else self._blocks.tape
        for act in tape.forward:
            self._play(act)
        self._turn(has_more=False)
        self._reset()
        for act in tape.backward:
            self._play(act)
        for unit in self._units[self._next :]:
            self._send(unit)
        self._end_pass()

    def _play(self, act: Act) -> None:
        if act.kind == SUM:
            self._send(act.unit)
        elif self._blocks is not None and act.kind == FETCH:
            self._blocks.need(act.unit)
        elif self._blocks is not None and act.kind == DROP:
            self._blocks.drop(act.unit)

    def finish(self) -> None:
        """Have our part of all sums in the shards' gradient."""
        if not self._is_over:
            self._take_part_idly()
        while self._under_way:
            self._settle()

    def _take_part_idly(self) -> None:
        """This worker had nothing to compute in this step."""
        if self._keeps_all:
            self._reset()
            self._clear_missing()
            for unit in self._units:
                self._send(unit)
            return
        self._join_pass()
        self._join_others()

    # One gradient, one unit.

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        unit = self._unit_of[index]
        view = next(place for place, number in enumerate(unit.indices) if number == index)
        offset, size = unit.offsets[view], self._shards.flat.layout.sizes[index]

        def take(parameter: torch.Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            assert gradient is not None
            gradient = (gradient.to_dense() if gradient.is_sparse else gradient).reshape(-1)
            self._put(unit, offset, size, gradient)
            self.unused.discard(index)
            self._arrived.add(index)
            self._missing[self._numbers[unit.number]] -= 1
            if self._is_last or not self._keeps_all:
                self._send_complete()

        return take

    def _put(self, unit: Unit, offset: int, size: int, gradient: torch.Tensor) -> None:
        if not self._keeps_all and size == unit.size:
            self._buffers[unit.number] = gradient  # all of a unit, as it is
            return
        place = self._buffer(unit)[offset : offset + size]
        if self._keeps_all and self._pass:
            place.add_(gradient)
        else:
            place.copy_(gradient)

    def _buffer(self, unit: Unit) -> torch.Tensor:
        if unit.number not in self._buffers:
            self._buffers[unit.number] = torch.zeros_like(self._shards.gradient[:0]).new_zeros(unit.size)
        return self._buffers[unit.number]

    def _clear_missing(self) -> None:
        """In the first pass, what did not come is zero; later it adds nothing."""
        if self._pass == 0:
            for unit in self._units:
                for index, view in self._shards.views(unit, self._buffer(unit)):
                    if index not in self._arrived:
                        view.zero_()

    def _send_complete(self) -> None:
        """In the order of units, which is the same on all copies."""
        while self._next < len(self._units) and not self._missing[self._next]:
            self._send(self._units[self._next])

    def _send(self, unit: Unit) -> None:
        self._next += 1
        if self._blocks is not None:
            self._blocks.note(Act(SUM, unit))
        buffer = self._buffer(unit)
        if not self._keeps_all:
            del self._buffers[unit.number]
        out = self._shards.gradient[unit.at : unit.at + unit.part]
        extra = torch.empty_like(out) if self._pass and not self._keeps_all else None
        work = self._group.reduce_scatter(out if extra is None else extra, buffer)
        self._under_way.append((work, unit, buffer, extra))
        if self._blocks is not None:
            self._blocks.drop(unit)
        while len(self._under_way) > MOST_UNDER_WAY:
            self._settle()

    def _settle(self) -> None:
        work, unit, _, extra = self._under_way.pop(0)
        self._wait(work)
        if extra is not None:
            self._shards.gradient[unit.at : unit.at + unit.part].add_(extra)

    def _wait(self, work: Work) -> None:
        began = time.perf_counter()
        work.wait()
        self.stalled += time.perf_counter() - began

    def detach(self) -> None:
        """Take the hooks off, so that the model can be trained by other means."""
        for hook in self._hooks:
            hook.remove()
