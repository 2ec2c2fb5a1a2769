"""One worker's copy of what is trained: parameters, the optimizer's state, and their moving average."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from shoal.spec.spans import timed
from shoal.train.chunked import ChunkedOptimizer, is_elementwise
from shoal.train.flat import CHUNK, Chunk, FlatModel
from shoal.train.undo import BATCH_CHUNKS, Undo
from shoal.train.whole import WholeOptimizer

Allocate = Callable[[str, int, torch.dtype], torch.Tensor]
"""(name, number of elements, type) -> a flat buffer, private or seen by all workers of a host.

It may be the one that the replica before this one had under that name, with what is in it.
"""

Fill = Callable[[int, torch.Tensor], object]
"""(number of a chunk among the owned ones, out): puts its gradient into `out`."""


class Replica:
    """Parameters in a flat buffer, and the update of the part of it that this worker owns.

    With a shared `allocate` all workers of a host see the same values and each owns a part; with a private one
    every worker owns everything. `is_source` marks the worker whose initial values count, `is_dealt` that chunks are
    owned in turn and not in runs, `is_alone` that gradients are given to each `update`, one for each parameter. With
    `shows_gradient` the memory of `gradient` is everybody's, and has room for all chunks.
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
        shows_gradient: bool = False,
    ) -> None:
        self.flat = FlatModel(model, optimizer, allocate)
        is_new = not self.flat.is_placed
        self.flat.place(is_source=is_source)
        self._allocate = allocate
        self._is_source = is_source
        self._decay = ema_decay
        self._is_dealt, self._num_owners = is_dealt, owner[1]
        self.is_shared = owner[1] > 1
        self.counted: list[dict[str, float]] = []
        self.owned: Sequence[Chunk] = self.flat.layout.by_parameter() if is_alone else self.owned_by(owner[0])
        self.average = self._buffer("average") if ema_decay is not None else None
        if self.average is not None and is_source and is_new:
            self.average.copy_(self.flat.values)
        self.gradients: Sequence[torch.Tensor]
        if shows_gradient:
            self.gradient = self._buffer("gradient")
            self.gradients = [self.gradient[c.start : c.stop] for c in self.owned]
        else:
            self.gradient = self.flat.values.new_zeros(sum(c.stop - c.start for c in self.owned))
            self.gradients = self.gradient.split([c.stop - c.start for c in self.owned])
        self._registers: list[torch.Tensor] = []
        self.optimizer: ChunkedOptimizer | WholeOptimizer = (
            ChunkedOptimizer(optimizer, self.flat, self.owned, self.gradients)
            if is_elementwise(optimizer)
            else WholeOptimizer(optimizer, self.flat, self.gradient)
        )

    def owned_by(self, rank: int) -> Sequence[Chunk]:
        """The chunks that a rank updates."""
        layout = self.flat.layout
        return (layout.dealt if self._is_dealt else layout.owned)(rank, self._num_owners)

    def scale(self, factor: float) -> None:
        """Multiply the gradients of the owned part."""
        for gradient in self.gradients:
            gradient.mul_(factor)

    @timed("update", "optimizer")
    def update(self, gradients: Sequence[torch.Tensor] | None = None) -> None:
        """Apply `gradient`, or those given, to the owned part."""
        if gradients is not None:
            self.optimizer.use(gradients)
        self.optimizer.step(self._state_buffer)
        self._follow(self.owned)
        if gradients is not None:
            self.optimizer.use([None] * len(gradients))  # their memory is free again

    def _buffer(self, name: str) -> torch.Tensor:
        """A buffer like that of the parameters."""
        return self._allocate(self.flat.layout.name(name), self.flat.layout.total, self.flat.dtype)

    def _state_buffer(self, key: str) -> torch.Tensor:
        return self._buffer(f"state/{key}")

    @timed("update", "optimizer")
    def update_with(self, undo: Undo, turn: int, factor: float | None = None) -> None:
        """`update`, so that another worker can complete it, should this one die on the way.

        Gradients count times `factor`, and stay as they are: whoever completes it may need them.
        """
        assert isinstance(self.optimizer, ChunkedOptimizer)
        self.counted = self.optimizer.scalars()
        if factor is None:
            self._run(undo, turn, self.optimizer, self.owned)
            return
        mine, scale = self.gradients, factor
        self._run(undo, turn, self.optimizer, self.owned, lambda n, out: torch.mul(mine[n], scale, out=out))
        self.optimizer.use(mine)

    def complete(self, undo: Undo, turn: int, rank: int, gradient: Callable[[Chunk, torch.Tensor], None]) -> None:
        """Complete the update of another worker, from the record it left. `gradient` fills in a chunk's."""
        assert isinstance(self.optimizer, ChunkedOptimizer)
        owned = self.owned_by(rank)
        with self.optimizer.standing_in(owned, self.counted) as optimizer:
            self._run(undo, turn, optimizer, owned, lambda number, out: gradient(owned[number], out))

    def _run(
        self, undo: Undo, turn: int, optimizer: ChunkedOptimizer, owned: Sequence[Chunk], fill: Fill | None = None
    ) -> None:
        batches = [range(at, min(at + BATCH_CHUNKS, len(owned))) for at in range(0, len(owned), BATCH_CHUNKS)]
        batches = batches or [range(0)]  # what the optimizer counts goes on without a chunk, too

        def changes(number: int) -> list[torch.Tensor]:
            return optimizer.changes(batches[number], self.average)

        with optimizer.in_batches() as step_some:

            def act(number: int) -> None:
                batch = batches[number]
                if fill is not None:
                    optimizer.use(self._filled(batch, owned, fill), batch.start)
                step_some(batch)
                self._follow([owned[index] for index in batch])

            undo.run(turn, len(batches), changes, act)

    def _filled(self, batch: range, owned: Sequence[Chunk], fill: Fill) -> list[torch.Tensor]:
        """Gradients of a batch of chunks, in memory that the next batch uses again."""
        self._registers = self._registers or [self.flat.values.new_empty(CHUNK) for _ in range(BATCH_CHUNKS)]
        sizes = [owned[number].stop - owned[number].start for number in batch]
        gradients = [register[:size] for register, size in zip(self._registers, sizes, strict=False)]
        for number, out in zip(batch, gradients, strict=True):
            fill(number, out)
        return gradients

    @property
    def num_kept(self) -> int:
        """How many elements an Undo must hold."""
        num_flats = 1 + len(self.optimizer.state_names) + (self.average is not None)
        return BATCH_CHUNKS * CHUNK * num_flats

    def take_back(self, initial: torch.Tensor) -> None:
        """Undo the first step: parameters and their average are as they were, and the optimizer knows nothing of it.

        `initial` has the one after the other.
        """
        self.flat.values.copy_(initial[: self.flat.layout.total])
        if self.average is not None:
            self.average.copy_(initial[self.flat.layout.total :])
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
        self.optimizer.restore(held, scalars, self._state_buffer)
        if self._is_source:
            for name, view in self.tensors():
                if name in tensors and view.data_ptr() != tensors[name].data_ptr():
                    view.copy_(tensors[name])
        self.flat.restore_rest(tensors)

    def show(self, *, is_average: bool) -> None:
        """Let the model see the moving average, or its parameters again. Nothing is copied."""
        if self.average is not None:
            self.flat.point_to(self.average if is_average else self.flat.values)

    def assemble(self) -> None:
        """The model always has all its parameters."""

    @property
    def holding(self) -> None:
        """Everybody sees or has all of it."""
        return None


def own_replica(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, ema_decay: float | None, is_alone: bool = False
) -> Replica:
    """One that shares nothing with anybody: this worker owns all of it."""
    device = next(model.parameters()).device
    return Replica(
        model,
        optimizer,
        allocate=lambda name, size, dtype: torch.zeros(size, dtype=dtype, device=device),
        owner=(0, 1),
        is_source=True,
        ema_decay=ema_decay,
        is_alone=is_alone,
    )
