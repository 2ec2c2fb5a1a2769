"""Copies that live on one host: parameters exist once, and every worker sums and updates its own slice of them."""

import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from shoal.comm.meeting import Shared
from shoal.comm.shm import ShmGroup
from shoal.spec.spans import SPANS, timed
from shoal.train import tree
from shoal.train.flat import CHUNK, Chunk, FlatLayout
from shoal.train.gradients import Gradients
from shoal.train.noise import Parts, first_of, is_due
from shoal.train.replica import Replica
from shoal.train.summing import StepSum, square_of
from shoal.train.sync.shared_step import SharedStep
from shoal.train.sync.sync import Outcome, Row, Standing
from shoal.train.sync.table import NotFinite, not_finite

READY, POSTED = range(2)
"""Signals: gradients filled up to a chunk; then those of a `SharedStep`."""

BUCKET_CHUNKS = 16
"""How many chunks are announced at once: 4 MiB of float32."""


def share_slots(group: ShmGroup, layout: FlatLayout, dtype: torch.dtype, num_shards: int, *, exact: bool) -> Shared:
    """Everybody's gradient buffers: one for each node of the tree that a worker may hold.

    Backward writes only where parameters are. What lies between them is zero, and is added up like the rest.
    """
    num_slots = tree.most_nodes(num_shards) if exact else 1
    return group.share(layout.total * dtype.itemsize * num_slots, layout.name("slots"))


class SharedMemorySync:
    """Sums and updates slices of one set of parameters in shared memory.

    Each worker's gradients live in a shared buffer. Rank r reads its slice of everybody's, adds them up in
    cache-sized chunks, and runs the optimizer on that slice: nothing is gathered, and the optimizer's work and
    state are divided. A worker that is early sums what the others have announced while they still run backward.
    """

    is_round_over = True

    def __init__(
        self,
        group: ShmGroup,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        num_shards: int,
        exact: bool,
        max_norm: float | None = None,
        ema_decay: float | None = None,
        source: int = 0,
        is_elastic: bool = False,
        reach: Callable[[str], None] = lambda point: None,
    ) -> None:
        self._group, self._exact = group, exact
        self.replica = Replica(
            model,
            optimizer,
            allocate=lambda name, size, dtype: group.common(size * dtype.itemsize, name).view(dtype),
            owner=(group.rank, group.size),
            is_source=group.rank == source,
            ema_decay=ema_decay,
        )
        layout = self.replica.flat.layout
        self._total = layout.total
        self._stops = [chunk.stop for chunk in layout.chunks]
        self._first = bisect_right(self._stops, self.replica.owned[0].start) if self.replica.owned else 0
        self._step = SharedStep(
            group,
            self.replica,
            self,
            num_shards=num_shards,
            channel=POSTED,
            max_norm=max_norm,
            is_elastic=is_elastic,
            reach=reach,
        )
        self._make_slots(num_shards)

    def _make_slots(self, num_shards: int) -> None:
        """Make everybody's gradient buffers, and views of the chunks that this rank sums."""
        dtype = self.replica.flat.dtype
        shared = share_slots(self._group, self.replica.flat.layout, dtype, num_shards, exact=self._exact)
        self._slots = slots = [buffer.view(dtype).split(self._total) for buffer in shared.all]
        self._sources = {
            (rank, slot): [values[c.start : c.stop] for c in self.replica.owned]
            for rank, of_rank in enumerate(slots)
            for slot, values in enumerate(of_rank)
        }
        self._registers = [torch.empty(CHUNK, dtype=dtype) for _ in range(tree.most_registers(num_shards))]
        self._group.barrier()
        # Last: from here on backward writes into the slots, so nothing may fail any more.
        self.gradients = Gradients(
            self.replica.flat.parameters,
            self.replica.flat.layout,
            slots[self._group.rank],
            exact=self._exact,
            on_ready=self._announce,
        )

    def begin(self, num_shards: int, assignment: Sequence[range]) -> None:
        self._announced, self._bucket_began = 0, time.perf_counter()
        self._addition = StepSum(assignment, num_shards, exact=self._exact)
        self._step.begin(num_shards)
        self._looks = is_due(self._step.turn)
        self.gradients.begin(num_shards, assignment[self._group.rank], looks=self._looks and self._group.size == 1)

    def post(self, rows: Sequence[Row], mine: range, standing: Standing) -> None:
        self._rows = rows
        self._step.post(rows, mine, standing)
        self._bucket_began = time.perf_counter()

    def _announce(self, num_elements: int) -> None:
        """Tell the others how far the gradient buffer is final, bucket by bucket."""
        chunks = bisect_right(self._stops, num_elements)
        if chunks == len(self._stops) or chunks - self._announced >= BUCKET_CHUNKS:
            if SPANS.is_on:
                SPANS.add("fill a bucket", "bucket", self._bucket_began, chunks=chunks - self._announced)
            self._announced, self._bucket_began = chunks, time.perf_counter()
            self._group.signal(READY, self._step.turn * (len(self._stops) + 1) + chunks)

    def finish(self) -> Outcome:
        return self._step.finish()

    def end(self) -> None:
        """The step's last backward is over: all of our gradient is final."""
        self.gradients.end()
        if not self.gradients.nodes:
            # A short step may have no samples for us; what is in the slot is of the step before.
            self._slots[self._group.rank][0].zero_()
        if self._exact or not self.gradients.nodes:
            self._announce(self._total)

    @timed("sum my slice", "sum")
    def add_up(self, scale: float) -> None:
        """Add up everybody's gradients of the owned chunks and divide by the weight of the batch."""
        base = self._step.turn * (len(self._stops) + 1)
        ready = 0
        # Of each part of the batch, the squares of our slice of its gradient.
        looked: dict[tree.Source, list[torch.Tensor]] = (
            {source: [] for source in self._addition.shards} if self._looks else {}
        )
        squares = self._step.squares[self._first :]
        for index, out in enumerate(self.replica.gradients):
            if self._first + index >= ready:
                ready = min(self._first + index + BUCKET_CHUNKS, len(self._stops))
                self._step.watch.wait(READY, base + ready)
            self._addition.into(out, lambda source: self._sources[source][index], self._registers)  # noqa: B023
            out.mul_(scale)
            squares[index] = square_of(out)
            for source, found in looked.items():  # while it is in cache
                found.append(square_of(self._sources[source][index]))
        if self._looks:
            self._step.parts = self._parts(looked)

    def _parts(self, looked: Mapping[tree.Source, Sequence[torch.Tensor]]) -> Parts:
        ratio, count = 0.0, 0
        for source, squares in looked.items():
            weight = self._step.weight_of(self._addition.shards[source])
            if weight > 0:
                count += source[0] == self._group.rank
                ratio += float(torch.stack(list(squares)).double().sum()) / weight if squares else 0.0
        return Parts(ratio, count, first_of(self._rows, self.gradients.first_square))

    def recall(self, chunk: Chunk, scale: float, out: torch.Tensor) -> None:
        """The same for any chunk, while nobody writes."""
        self._add(chunk, out)
        out.mul_(scale)

    def _add(self, chunk: Chunk, out: torch.Tensor) -> None:
        self._addition.into(
            out, lambda term: self._slots[term[0]][term[1]][chunk.start : chunk.stop], self._registers
        )

    def find_not_finite(self, index: int) -> list[str]:
        """Every rank adds up the bad chunk for itself, so that all say the same."""
        layout = self.replica.flat.layout
        chunk = layout.chunks[index]
        out = self._slots[0][0].new_empty(chunk.stop - chunk.start)
        self._add(chunk, out)
        return not_finite(layout, index, out)

    def find_shards(self, index: int) -> list[range]:
        """Everybody's gradients are still there, each by itself."""
        chunk = self.replica.flat.layout.chunks[index]
        return [
            shards
            for (rank, slot), shards in self._addition.shards.items()
            if not self._slots[rank][slot][chunk.start : chunk.stop].isfinite().all()
        ]

    def agree(self) -> None:
        """All have the same parameters after every step."""

    def resolve(
        self, survivors: Sequence[int], gather: Callable[[str, str], list[str]], *, is_first: bool
    ) -> Outcome | NotFinite | None:
        return self._step.resolve(survivors, gather, is_first=is_first)

    def tensors(self) -> dict[str, torch.Tensor]:
        return dict(self.replica.tensors())

    def checksum(self, step: int) -> int:
        return 0

    def detach(self) -> None:
        self.gradients.detach()
        self.replica.optimizer.release()

    def close(self) -> None:
        self.detach()
        self.replica.flat.release()
