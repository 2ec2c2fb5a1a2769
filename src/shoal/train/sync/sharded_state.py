"""What a worker keeps where state is divided among copies that exchange messages."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from shoal.comm.group import Group, Work
from shoal.train.chunked import ChunkedOptimizer
from shoal.train.flat import FlatModel, named_tensors
from shoal.train.sync.sharded_route import first_order
from shoal.train.sync.sharded_units import Unit, cut_by_size, plan_units

BUCKET_ELEMENTS = 2**20
"""Parameters that need not come and go with a module travel in buckets of this size."""


MOST_UNDER_WAY = 2
"""Units that travel at a time, besides the one that is being sent: transports may make copies of each."""


class Shards:
    """This worker's part of the parameters, of their gradient, of the optimizer's state and of the moving average.

    With `is_resident` every worker has all parameters besides, as far as steps of the others have changed them: the
    optimizer updates its part where it is, and `spread` gives it to the others. Without it, parameters of a unit are
    there between `fetch` and `drop` only; at other times the model's tensors read as NaN.
    """

    def __init__(
        self,
        group: Group,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        blocks: Mapping[str, Sequence[str]] | None,
        source: int,
        ema_decay: float | None,
    ) -> None:
        self._group, self._decay = group, ema_decay
        self.is_resident = blocks is None
        self.flat = FlatModel(model, optimizer, lambda size, dtype: torch.empty(0, dtype=dtype))
        self.units = plan_units(self.flat.layout, self._divide(blocks), group.rank, group.size)
        self._device = self.flat.parameters[0].device
        self._nothing = torch.full((), torch.nan, dtype=self.flat.dtype, device=self._device)
        num_kept = sum(unit.part for unit in self.units)
        self.gradient = self._make(num_kept)
        self.wholes = [self._make_whole(unit) for unit in self.units]
        # Where all parameters are here, what is kept of them is a part of those.
        self._kept = self._make(0 if self.is_resident else num_kept)
        self.flat.values = self.wholes[0] if self.is_resident else self._kept
        self._shown: list[torch.Tensor] | None = None
        self._is_average = False
        for unit in self.units:
            self._place(unit, source)
        self.average: torch.Tensor | None = None
        if ema_decay is not None:
            self.average = self._make(num_kept)
            for unit in self.units:
                self._of(self.average, unit).copy_(self.mine(unit))
        chunks = [(unit, chunk) for unit in self.units for chunk in unit.chunks]
        self._values = [self.mine(unit)[c.start - unit.at : c.stop - unit.at] for unit, c in chunks]
        self._chunks = [chunk for _, chunk in chunks]
        self.optimizer = ChunkedOptimizer(
            optimizer, self.flat, self._chunks, [self.gradient[c.start : c.stop] for c in self._chunks], self._values
        )

    def _divide(self, blocks: Mapping[str, Sequence[str]] | None) -> list[tuple[str, list[int]]]:
        """Units in the order in which backward fills them, as far as that is known."""
        layout = self.flat.layout
        order = first_order(layout, self.flat.model)
        if blocks is None:
            return cut_by_size(layout.sizes, order, BUCKET_ELEMENTS)
        home = {name: block for block, names in blocks.items() for name in names}
        found: dict[str, list[int]] = {}
        for index in order:
            found.setdefault(home[layout.names[index]], []).append(index)
        return list(found.items())

    def _make_whole(self, unit: Unit) -> torch.Tensor:
        whole = self._make(unit.size)
        if not self.is_resident:
            whole.untyped_storage().resize_(0)
        return whole

    def _make(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=self.flat.dtype, device=self._device)

    def _place(self, unit: Unit, source: int) -> None:
        """Move a unit's parameters into its buffer, with the source's values."""
        whole = self.wholes[unit.number]
        whole.untyped_storage().resize_(whole.numel() * whole.element_size())
        if self._group.rank == source:
            for index, view in self.views(unit, whole):
                view.copy_(self.flat.parameters[index].detach())
        if unit.size:
            self._group.broadcast(whole, root=source).wait()
        self._point(unit, whole)
        if not self.is_resident:
            self._of(self._kept, unit).copy_(self._part_of(whole, unit))
            self.drop(unit)

    # Where things are.

    def views(self, unit: Unit, flat: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """The parameters' numbers and their places in a buffer of a whole unit."""
        for index, offset in zip(unit.indices, unit.offsets, strict=True):
            parameter = self.flat.parameters[index]
            yield index, flat[offset : offset + self.flat.layout.sizes[index]].view(parameter.shape)

    def mine(self, unit: Unit) -> torch.Tensor:
        """The part of a unit's parameters that this worker updates."""
        if self.is_resident:
            return self._part_of(self.wholes[unit.number], unit)
        return self._of(self._kept, unit)

    def _of(self, kept: torch.Tensor, unit: Unit) -> torch.Tensor:
        return kept[unit.at : unit.at + unit.part]

    def _part_of(self, whole: torch.Tensor, unit: Unit) -> torch.Tensor:
        return whole[self._group.rank * unit.part : (self._group.rank + 1) * unit.part]

    def _point(self, unit: Unit, whole: torch.Tensor) -> None:
        for index, view in self.views(unit, whole):
            self.flat.parameters[index].data = view

    # Parameters that come and go.

    def fetch(self, unit: Unit) -> Work:
        """Begin to gather a unit's parameters; they may be used after `take` of it."""
        whole = self.wholes[unit.number]
        whole.untyped_storage().resize_(whole.numel() * whole.element_size())
        return self._group.all_gather(whole, self._of(self._kept, unit))

    def take(self, unit: Unit, work: Work) -> None:
        """The unit's parameters have come: let the model have them."""
        work.wait()
        self._point(unit, self.wholes[unit.number])

    def drop(self, unit: Unit) -> None:
        """Give the memory of a unit's parameters back. Tensors on it are good again after the next `fetch`."""
        self._hide(unit)
        self.wholes[unit.number].untyped_storage().resize_(0)

    def _hide(self, unit: Unit) -> None:
        for index in unit.indices:
            parameter = self.flat.parameters[index]
            parameter.data = self._nothing.expand(parameter.shape)

    def assemble(self) -> None:
        """Let the model have all its parameters until the next step. All members call it together.

        They get memory of their own: a script may keep views of it, and what comes and goes in steps must have none.
        """
        if not self.is_resident and self._shown is None:
            self._show(self.average if self._is_average and self.average is not None else self._kept)

    def dismiss(self) -> None:
        """A step begins: only what comes and goes is there from here on."""
        if self._shown is not None:
            self._shown = None
            for unit in self.units:
                self._hide(unit)

    def _show(self, kept: torch.Tensor) -> None:
        """Let the model see all of what is kept, in memory of its own."""
        shown = [self._make(unit.size) for unit in self.units]
        for unit in self.units:
            if unit.size:
                self._group.all_gather(shown[unit.number], self._of(kept, unit)).wait()
            self._point(unit, shown[unit.number])
        self._shown = shown

    # A step.

    def update(self) -> None:
        """Apply `gradient` to what is kept here."""
        self.optimizer.step(lambda: torch.zeros_like(self.gradient))
        if self.average is not None and self._decay is not None:
            for chunk, values in zip(self._chunks, self._values, strict=True):
                self.average[chunk.start : chunk.stop].lerp_(values, 1 - self._decay)

    def spread(self) -> None:
        """Give everybody what this worker has updated, where all have all parameters."""
        under_way: list[Work] = []
        for unit in self.units if self.is_resident else ():
            if unit.size:
                under_way.append(self._group.all_gather(self.wholes[unit.number], self.mine(unit)))
            while len(under_way) > MOST_UNDER_WAY:
                under_way.pop(0).wait()
        for work in under_way:
            work.wait()

    def show(self, *, is_average: bool) -> None:
        """Let the model see the moving average, or its parameters again. All members call it together."""
        if self.average is None or is_average == self._is_average:
            return
        self._is_average = is_average
        if is_average or not self.is_resident:
            self._show(self.average if is_average else self._kept)
            return
        self._shown = None
        for unit in self.units:
            self._point(unit, self.wholes[unit.number])

    # What must survive.

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All state, whole, on the first copy; the others only send theirs. One unit travels at a time."""
        names, found = self.flat.layout.names, {}
        for unit in self.units:
            found.update(self._collect(unit, self.mine(unit)))
        if self._group.rank == 0:
            yield from self._model_tensors(found)
        for key, state in self.optimizer.state.items():
            for unit in self.units:
                for index, tensor in self._collect(unit, self._of(state, unit)).items():
                    yield f"optimizer/{names[index]}/{key}", tensor
        for unit in self.units if self.average is not None else ():
            assert self.average is not None
            for index, tensor in self._collect(unit, self._of(self.average, unit)).items():
                yield f"ema/{names[index]}", tensor

    def _model_tensors(self, found: Mapping[int, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """By all names that the model has for them; tied weights have several."""
        numbers = {id(parameter): index for index, parameter in enumerate(self.flat.parameters)}
        for name, value in named_tensors(self.flat.model):
            index = numbers.get(id(value))
            yield f"model/{name}", value.detach() if index is None else found[index]

    def _collect(self, unit: Unit, part: torch.Tensor) -> dict[int, torch.Tensor]:
        """A unit as a whole, by the numbers of its parameters, on the first copy."""
        if self._group.rank != 0:
            if unit.size:
                self._group.send(part.contiguous(), 0).wait()
            return {}
        whole = part.new_empty(unit.size)
        whole[: unit.part] = part
        for rank in range(1, self._group.size if unit.size else 1):
            self._group.recv(whole[rank * unit.part : (rank + 1) * unit.part], rank).wait()
        return dict(self.views(unit, whole))

    def scalars(self) -> list[dict[str, float]]:
        """What the optimizer counts, per parameter group."""
        return self.optimizer.scalars()

    def restore(self, tensors: Mapping[str, torch.Tensor], scalars: Sequence[Mapping[str, float]]) -> None:
        """Take this worker's part of whole tensors. All members must do this and meet before they go on."""
        prefix = "optimizer/"
        held = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        self.optimizer.restore(held, scalars, lambda: torch.zeros_like(self.gradient))
        names = self.flat.layout.names
        for unit in self.units:
            for segment in unit.segments:
                name, span = names[segment.index], slice(segment.at, segment.at + segment.stop - segment.start)
                for key, flat in self.optimizer.state.items():
                    _copy(flat[span], tensors.get(f"optimizer/{name}/{key}"), segment.start)
                if self.average is not None:
                    _copy(self.average[span], tensors.get(f"ema/{name}"), segment.start)
                if not self.is_resident:
                    _copy(self._kept[span], tensors.get(f"model/{name}"), segment.start)
            self._restore_whole(unit, tensors)
        rest = {id(parameter) for parameter in self.flat.parameters}
        for name, value in named_tensors(self.flat.model):
            if f"model/{name}" in tensors and id(value) not in rest:
                value.detach().copy_(tensors[f"model/{name}"])

    def _restore_whole(self, unit: Unit, tensors: Mapping[str, torch.Tensor]) -> None:
        wholes = self.wholes if self.is_resident else self._shown
        if wholes is not None:
            for index, view in self.views(unit, wholes[unit.number]):
                name = f"model/{self.flat.layout.names[index]}"
                if name in tensors:
                    view.copy_(tensors[name])

    def release(self) -> None:
        """Give every parameter that is here memory of its own again."""
        self.flat.release()


def _copy(out: torch.Tensor, whole: torch.Tensor | None, start: int) -> None:
    """Fill `out` with what begins there in a flat view of a whole tensor."""
    if whole is not None:
        out.copy_(whole.reshape(-1)[start : start + out.numel()])
