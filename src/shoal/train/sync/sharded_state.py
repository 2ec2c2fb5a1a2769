"""What a worker keeps where state is divided among copies that exchange messages."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from shoal.comm.group import DONE, Group, Work
from shoal.train.chunked import ChunkedOptimizer
from shoal.train.flat import FlatModel, named_tensors
from shoal.train.inherit import Give
from shoal.train.sync.sharded_route import first_order
from shoal.train.sync.sharded_units import Unit, cut_by_size, plan_units

BUCKET_ELEMENTS = 2**20
"""Parameters that need not come and go with a module travel in buckets of this size."""


MOST_UNDER_WAY = 2
"""Units that travel at a time, besides the one that is being sent: transports may make copies of each."""

MODEL, OPTIMIZER, AVERAGE = "model", "optimizer/", "ema"
"""Keys of what is kept: parameters, what the optimizer keeps under a name, and the moving average."""


class Shards:
    """This worker's part of the parameters, of their gradient, of the optimizer's state and of the moving average.

    With `is_resident` every worker has all parameters besides, as far as steps of the others have changed them: the
    optimizer updates its part where it is, and `spread` gives it to the others. Without it, parameters of a unit are
    there between `fetch` and `drop` only; at other times the model's tensors read as NaN.

    With `is_mirrored` it also keeps the part of the rank before, and updates it with the gradient that `mirror` gets
    from there: to the same bits, and without that the state itself ever travels. `parts` are the numbers of the
    parts that are kept; buffers hold our own units, then those of the mirror.

    The parameters of rank `source` are everybody's; where it is None, they come with `inherit`.
    """

    is_shared = False

    def __init__(
        self,
        group: Group,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        blocks: Mapping[str, Sequence[str]] | None,
        source: int | None,
        ema_decay: float | None,
        is_mirrored: bool,
    ) -> None:
        self._group, self._decay = group, ema_decay
        self.is_resident = blocks is None
        self.flat = FlatModel(model, optimizer, lambda name, size, dtype: torch.empty(0, dtype=dtype))
        self.num_parts = group.size
        self.parts: tuple[int, ...] = (group.rank,)
        divided = self._divide(blocks)
        self.units = plan_units(self.flat.layout, divided, group.rank, group.size)
        self._num_own = sum(unit.part for unit in self.units)
        self._kept_units = [self.units]
        if is_mirrored and group.size > 1:
            self.parts = (group.rank, (group.rank - 1) % group.size)
            self._kept_units.append(
                plan_units(self.flat.layout, divided, self.parts[1], group.size, at=self._num_own)
            )
        self._device = self.flat.parameters[0].device
        # One for each: parameters that share memory would be taken for tied ones.
        self._nothing = self._make(len(self.flat.parameters)).fill_(torch.nan)
        self._gradients = self._make_kept()
        self.gradient = self._gradients[: self._num_own]
        self.wholes = [self._make_whole(unit) for unit in self.units]
        # Where all parameters are here, what is kept of them is a part of those.
        self._kept = self._gradients.new_empty(0) if self.is_resident else self._make_kept()
        self.flat.values = self.wholes[0] if self.is_resident else self._kept
        self._shown: list[torch.Tensor] | None = None
        self._is_average = False
        for unit in self.units:
            self._place(unit, source)
        self.average: torch.Tensor | None = None
        if ema_decay is not None:
            self.average = self._make_kept()
            for part, unit in self._all_kept():
                self._of(self.average, unit).copy_(self._values_of(unit, part))
        places = [(self._values_of(unit, part), unit.at, c) for part, unit in self._all_kept() for c in unit.chunks]
        self._values = [values[c.start - at : c.stop - at] for values, at, c in places]
        self._chunks = [chunk for _, _, chunk in places]
        gradients = [self._gradients[c.start : c.stop] for c in self._chunks]
        self.optimizer = ChunkedOptimizer(optimizer, self.flat, self._chunks, gradients, self._values)

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

    def _make_kept(self, name: str = "") -> torch.Tensor:
        """A buffer for something of all that is kept, whatever its name."""
        return self._make(len(self.parts) * self._num_own)

    def _all_kept(self) -> Iterator[tuple[int, Unit]]:
        """The numbers of parts, and the units as seen by their owners."""
        for part, units in zip(self.parts, self._kept_units, strict=True):
            for unit in units:
                yield part, unit

    def _place(self, unit: Unit, source: int | None) -> None:
        """Move a unit's parameters into its buffer, with the source's values."""
        whole = self.wholes[unit.number]
        if source is None:
            self._point(unit, whole) if self.is_resident else self._hide(unit)
            return
        whole.untyped_storage().resize_(whole.numel() * whole.element_size())
        if self._group.rank == source:
            for index, view in self.views(unit, whole):
                view.copy_(self.flat.parameters[index].detach())
        if unit.size:
            self._group.broadcast(whole, root=source).wait()
        self._point(unit, whole)
        if not self.is_resident:
            for part, units in zip(self.parts, self._kept_units, strict=True):
                self._of(self._kept, units[unit.number]).copy_(self._part_of(whole, unit, part))
            self.drop(unit)

    # Where things are.

    def views(self, unit: Unit, flat: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """The parameters' numbers and their places in a buffer of a whole unit."""
        for index, offset in zip(unit.indices, unit.offsets, strict=True):
            parameter = self.flat.parameters[index]
            yield index, flat[offset : offset + self.flat.layout.sizes[index]].view(parameter.shape)

    def mine(self, unit: Unit) -> torch.Tensor:
        """The part of a unit's parameters that this worker updates."""
        return self._values_of(unit, self.parts[0])

    def _values_of(self, unit: Unit, part: int) -> torch.Tensor:
        """A part of a unit's parameters that is kept here; the unit is as the owner of that part sees it."""
        if self.is_resident:
            return self._part_of(self.wholes[unit.number], unit, part)
        return self._of(self._kept, unit)

    def _of(self, kept: torch.Tensor, unit: Unit) -> torch.Tensor:
        return kept[unit.at : unit.at + unit.part]

    def _part_of(self, whole: torch.Tensor, unit: Unit, part: int) -> torch.Tensor:
        return whole[part * unit.part : (part + 1) * unit.part]

    def _point(self, unit: Unit, whole: torch.Tensor) -> None:
        for index, view in self.views(unit, whole):
            self.flat.parameters[index].data = view

    # Parameters that come and go.

    def fetch(self, unit: Unit) -> Work:
        """Begin to gather a unit's parameters; they may be used after `take` of it."""
        whole = self.wholes[unit.number]
        whole.untyped_storage().resize_(whole.numel() * whole.element_size())
        if self._group.size == 1:  # and a group of one would look at it through numpy, which fixes its memory
            whole.copy_(self._of(self._kept, unit))
            return DONE
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
            parameter.data = self._nothing[index].expand(parameter.shape)

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

    def mirror(self) -> None:
        """Let the next rank have our part of the gradient, as it is now, where it keeps a mirror of what is ours."""
        self._pass_on(self._gradients)

    def _pass_on(self, kept: torch.Tensor) -> None:
        """Give what is ours in a buffer to the next rank, and take what belongs to the one before us."""
        if len(self.parts) > 1 and kept.numel():
            sent = self._group.send(kept[: self._num_own], (self._group.rank + 1) % self._group.size)
            self._group.recv(kept[self._num_own :], self.parts[1]).wait()
            sent.wait()

    def clip(self, factor: float) -> None:
        """Multiply the gradient of all that is kept here."""
        self._gradients.mul_(factor)

    def update(self) -> None:
        """Apply the gradient to what is kept here."""
        self.optimizer.step(self._make_kept)
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
        """Take what is kept here of whole tensors. All members must do this and meet before they go on."""
        held = {name.removeprefix(OPTIMIZER): value for name, value in tensors.items() if name.startswith(OPTIMIZER)}
        self.optimizer.restore(held, scalars, self._make_kept)
        names = self.flat.layout.names
        for _, unit in self._all_kept():
            for segment in unit.segments:
                name, span = names[segment.index], slice(segment.at, segment.at + segment.stop - segment.start)
                for key, flat in self.optimizer.state.items():
                    _copy(flat[span], tensors.get(f"optimizer/{name}/{key}"), segment.start)
                if self.average is not None:
                    _copy(self.average[span], tensors.get(f"ema/{name}"), segment.start)
                if not self.is_resident:
                    _copy(self._kept[span], tensors.get(f"model/{name}"), segment.start)
        for unit in self.units:
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

    # From one World to the next: a Holding.

    @property
    def holding(self) -> "Shards":
        return self

    @property
    def is_whole(self) -> bool:
        """The model has memory of its own for all parameters, until the next step."""
        return self._shown is not None

    @property
    def keys(self) -> list[str]:
        states = [f"{OPTIMIZER}{name}" for name in self.optimizer.state]
        return [MODEL, *states, *([AVERAGE] if self.average is not None else [])]

    def give(self, key: str, number: int, part: int, whole: torch.Tensor) -> None:
        """Put a part that is kept here to its place in a whole unit. What does not fit in there was padding."""
        unit = self._kept_units[self.parts.index(part)][number]
        place = whole[part * unit.part : (part + 1) * unit.part]
        place.copy_(self._piece(key, unit, part)[: place.numel()])

    def inherit(self, give: Give, keys: Sequence[str], scalars: Sequence[Mapping[str, float]]) -> None:
        """Take our part, and our mirror, of what all members give. All call it together.

        One unit travels at a time. Of each element one member gives the bits, and the others zeros to add to them.
        """
        states = [key.removeprefix(OPTIMIZER) for key in keys if key.startswith(OPTIMIZER)]
        self.optimizer.restore({f"/{name}": self.gradient for name in states}, scalars, self._make_kept)
        for key in keys:
            for unit in self.units:
                whole = self._make(unit.size)
                give(key, unit.number, whole)
                if unit.size:
                    self._group.reduce_scatter(_bits(self._piece(key, unit, self.parts[0])), _bits(whole)).wait()
            self._pass_on(self._buffer(key))
        self.spread()

    def _piece(self, key: str, unit: Unit, part: int) -> torch.Tensor:
        return self._values_of(unit, part) if key == MODEL else self._of(self._buffer(key), unit)

    def _buffer(self, key: str) -> torch.Tensor:
        """What is kept under a key; where all parameters are here, nothing is kept of them besides."""
        if key == MODEL:
            return self._kept
        if key == AVERAGE:
            assert self.average is not None
            return self.average
        return self.optimizer.state[key.removeprefix(OPTIMIZER)]

    def release(self) -> None:
        """Give every parameter that is here memory of its own again."""
        self.flat.release()


def _copy(out: torch.Tensor, whole: torch.Tensor | None, start: int) -> None:
    """Fill `out` with what begins there in a flat view of a whole tensor."""
    if whole is not None:
        out.copy_(whole.reshape(-1)[start : start + out.numel()])


def _bits(values: torch.Tensor) -> torch.Tensor:
    """The same memory as whole numbers: sums with zero keep every bit, and know no minus zero."""
    return values.view({4: torch.int32, 8: torch.int64}.get(values.element_size(), torch.uint8))
