"""One worker's copy of what is trained: parameters, the optimizer's state, and their moving average."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from shoal.train.chunked import ChunkedOptimizer, is_elementwise
from shoal.train.flat import CHUNK, Chunk, FlatModel
from shoal.train.undo import BATCH_CHUNKS, Undo
from shoal.train.whole import WholeOptimizer

Allocate = Callable[[int, torch.dtype], torch.Tensor]
"""(number of elements, type) -> a flat buffer, private or seen by all workers of a host."""


class Replica:
    """Parameters in a flat buffer, and the update of the part of it that this worker owns.

    With a shared `allocate` all workers of a host see the same values and each owns a part; with a private one
    every worker owns everything. `is_source` marks the worker whose initial values count, `is_dealt` that chunks are
    owned in turn and not in runs, `is_alone` that gradients are given to each `update`, one for each parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        allocate: Allocate,
        owner: tuple[int, int],
        is_source: bool,
        ema_decay: float | None,
        is_dealt: bool = False,
        is_alone: bool = False,
    ) -> None:
        self.flat = FlatModel(model, optimizer, allocate)
        self.flat.place(is_source=is_source)
        self._allocate = allocate
        self._is_source = is_source
        self._decay = ema_decay
        self.counted: list[dict[str, float]] = []
        layout = self.flat.layout
        self.owned: Sequence[Chunk] = (layout.dealt if is_dealt else layout.owned)(*owner)
        if is_alone:
            self.owned = layout.by_parameter()
        self.average = allocate(self.flat.layout.total, self.flat.dtype) if ema_decay is not None else None
        if self.average is not None and is_source:
            self.average.copy_(self.flat.values)
        self.gradient = self.flat.values.new_zeros(sum(c.stop - c.start for c in self.owned))
        self.gradients = self.gradient.split([c.stop - c.start for c in self.owned])
        self.optimizer: ChunkedOptimizer | WholeOptimizer = (
            ChunkedOptimizer(optimizer, self.flat, self.owned, self.gradients)
            if is_elementwise(optimizer)
            else WholeOptimizer(optimizer, self.flat, self.gradient)
        )

    def update(self, gradients: Sequence[torch.Tensor] | None = None) -> None:
        """Apply `gradient`, or those given, to the owned part."""
        if gradients is not None:
            self.optimizer.use(gradients)
        self.optimizer.step(self._allocate_state)
        self._follow(self.owned)
        if gradients is not None:
            self.optimizer.use([None] * len(gradients))  # their memory is free again

    def _allocate_state(self) -> torch.Tensor:
        return self._allocate(self.flat.layout.total, self.flat.dtype)

    def update_with(self, undo: Undo, turn: int) -> None:
        """`update`, so that another worker can complete it, should this one die on the way."""
        assert isinstance(self.optimizer, ChunkedOptimizer)
        self.counted = self.optimizer.scalars()
        self._run(undo, turn, self.optimizer, self.owned)

    def complete(
        self, undo: Undo, turn: int, owned: Sequence[Chunk], gradient: Callable[[Chunk, torch.Tensor], None]
    ) -> None:
        """Complete the update of another worker, from the record it left. `gradient` fills in a chunk's."""
        assert isinstance(self.optimizer, ChunkedOptimizer)
        gradients = [self.flat.values.new_empty(place.stop - place.start) for place in owned]
        for place, out in zip(owned, gradients, strict=True):
            gradient(place, out)
        with self.optimizer.standing_in(owned, gradients, self.counted) as optimizer:
            self._run(undo, turn, optimizer, owned)

    def _run(self, undo: Undo, turn: int, optimizer: ChunkedOptimizer, owned: Sequence[Chunk]) -> None:
        batches = [range(at, min(at + BATCH_CHUNKS, len(owned))) for at in range(0, len(owned), BATCH_CHUNKS)]
        batches = batches or [range(0)]  # what the optimizer counts goes on without a chunk, too
        average = self.average

        def changes(number: int) -> list[torch.Tensor]:
            batch = batches[number]
            averages = [] if average is None else [average[owned[n].start : owned[n].stop] for n in batch]
            return [*optimizer.changes(batch), *averages]

        with optimizer.in_batches() as step_some:

            def act(number: int) -> None:
                step_some(batches[number])
                self._follow([owned[index] for index in batches[number]])

            undo.run(turn, len(batches), changes, act)

    @property
    def num_kept(self) -> int:
        """How many elements an Undo must hold."""
        num_flats = 1 + len(self.optimizer.state_names) + (self.average is not None)
        return BATCH_CHUNKS * CHUNK * num_flats

    def take_back(self, initial: torch.Tensor) -> None:
        """Undo the first step: the parameters are as they were, and the optimizer has no memory of it."""
        self.flat.values.copy_(initial)
        if self.average is not None:
            self.average.copy_(initial)
        self.optimizer.forget()

    def _follow(self, places: Sequence[Chunk]) -> None:
        """Let the moving average follow the parameters."""
        if self.average is not None and self._decay is not None:
            for place in places:
                span = slice(place.start, place.stop)
                self.average[span].lerp_(self.flat.values[span], 1 - self._decay)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All state that must survive, by name, as views: `model/...`, `optimizer/.../...`, `ema/...`."""
        yield from self.flat.tensors()
        for name, view in self.optimizer.named_state():
            yield f"optimizer/{name}", view
        if self.average is not None:
            for name, view in self.flat.named(self.average):
                yield f"ema/{name}", view

    def scalars(self) -> list[dict[str, float]]:
        """What the optimizer counts, per parameter group."""
        return self.optimizer.scalars()

    def restore(self, tensors: Mapping[str, torch.Tensor], scalars: Sequence[Mapping[str, float]]) -> None:
        """Put back what `tensors` and `scalars` gave. All members must do this and meet before they go on."""
        prefix = "optimizer/"
        held = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        self.optimizer.restore(held, scalars, self._allocate_state)
        if self._is_source:
            for name, view in self.tensors():
                if name in tensors:
                    view.copy_(tensors[name])
        self.flat.restore_rest(tensors)

    def show(self, *, is_average: bool) -> None:
        """Let the model see the moving average, or its parameters again. Nothing is copied."""
        if self.average is not None:
            self.flat.point_to(self.average if is_average else self.flat.values)

    def assemble(self) -> None:
        """The model always has all its parameters."""


def own_replica(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, ema_decay: float | None, is_alone: bool = False
) -> Replica:
    """One that shares nothing with anybody: this worker owns all of it."""
    device = next(model.parameters()).device
    return Replica(
        model,
        optimizer,
        allocate=lambda size, dtype: torch.zeros(size, dtype=dtype, device=device),
        owner=(0, 1),
        is_source=True,
        ema_decay=ema_decay,
        is_alone=is_alone,
    )
