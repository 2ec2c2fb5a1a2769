"""Copies that live on one host: parameters exist once, and every worker sums and updates its own slice of them."""

import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import nn

from shoal.comm.shm import ShmGroup
from shoal.elastic.commit import is_committed
from shoal.train import tree
from shoal.train.flat import CHUNK, Chunk
from shoal.train.gradients import Gradients
from shoal.train.replica import Replica
from shoal.train.summing import StepSum, square_of
from shoal.train.sync.sync import Outcome, Row, Standing
from shoal.train.sync.table import NotFinite, StepTable, checked_norm, look, not_finite
from shoal.train.undo import Undo

T = TypeVar("T")

READY, POSTED, SUMMED, UPDATED = range(4)
"""Signals of a step: gradients filled up to a chunk, rows posted, slice summed, slice updated."""

BUCKET_CHUNKS = 16
"""How many chunks are announced at once: 4 MiB of float32."""


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
        self._reach = reach
        self._group = group
        self._exact = exact
        self._max_norm = max_norm
        self._is_elastic = is_elastic
        self.replica = Replica(
            model,
            optimizer,
            allocate=lambda size, dtype: group.common(size * dtype.itemsize).view(dtype),
            owner=(group.rank, group.size),
            is_source=group.rank == source,
            ema_decay=ema_decay,
        )
        layout = self.replica.flat.layout
        self._total = layout.total
        self._stops = [chunk.stop for chunk in layout.chunks]
        self._first = bisect_right(self._stops, self.replica.owned[0].start) if self.replica.owned else 0
        self._squares = group.common(4 * len(layout.chunks)).view(torch.float32)
        self._table = StepTable(num_shards, group.size, lambda size: group.common(8 * size).view(torch.float64))
        self._turn = 0
        self._is_open = False
        self._undos: list[Undo] = []
        # Before its first step an optimizer has no state that others could see; then all parameters are kept instead.
        self._initial = group.common(self._total * self.replica.flat.dtype.itemsize) if is_elastic else None
        self._make_slots(num_shards)

    def _make_slots(self, num_shards: int) -> None:
        """Make everybody's gradient buffers, and views of the chunks that this rank sums."""
        dtype = self.replica.flat.dtype
        num_slots = tree.most_nodes(num_shards) if self._exact else 1
        shared = self._group.share(self._total * dtype.itemsize * num_slots)
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
        self._turn += 1
        self._announced = 0
        self._waited = 0.0
        self._longest_wait = 1e-4
        self._waited_for: int | None = None
        self._num_shards = num_shards
        self.gradients.begin(num_shards, assignment[self._group.rank])
        self._addition = StepSum(assignment, num_shards, exact=self._exact)
        self._is_open, self._is_updated = True, False
        if self._is_elastic:
            self._prepare_undo()

    def _prepare_undo(self) -> None:
        if self._turn == 1 and not self.replica.optimizer.state_names:
            assert self._initial is not None
            if self._group.rank == 0:
                self._initial.view(self.replica.flat.dtype).copy_(self.replica.flat.values)
        elif not self._undos:
            self._initial = None
            dtype = self.replica.flat.dtype
            kept = self._group.share(self.replica.num_kept * dtype.itemsize)
            words = self._group.common(16 * self._group.size).view(torch.int64).view(-1, 2).numpy()
            self._undos = [
                Undo(kept.all[rank].view(dtype), words[rank], self._reach) for rank in range(self._group.size)
            ]

    def post(self, rows: Sequence[Row], mine: range, standing: Standing) -> None:
        self._table.write(rows, mine, self._group.rank, standing)
        self._group.signal(POSTED, self._turn)
        self._reach("posted")

    def _announce(self, num_elements: int) -> None:
        """Tell the others how far the gradient buffer is final, bucket by bucket."""
        chunks = bisect_right(self._stops, num_elements)
        if chunks == len(self._stops) or chunks - self._announced >= BUCKET_CHUNKS:
            self._announced = chunks
            self._group.signal(READY, self._turn * (len(self._stops) + 1) + chunks)

    def finish(self) -> Outcome:
        started = time.perf_counter()
        self.gradients.end()
        if not self.gradients.nodes:
            # A short step may have no samples for us; what is in the slot is of the step before.
            self._slots[self._group.rank][0].zero_()
        if self._exact or not self.gradients.nodes:
            self._announce(self._total)
        self._wait(POSTED, self._turn)
        totals = look(self._group, self._table.read, self._num_shards)
        self._sum(1.0 / totals.weight)
        self._group.signal(SUMMED, self._turn)
        self._reach("summed")
        self._wait(SUMMED, self._turn)
        norm = look(self._group, checked_norm, self._squares.tolist(), self._find_not_finite)
        self._update(norm)
        self._reach("updated")
        self._wait(UPDATED, self._turn)
        self._is_open = False
        return Outcome(
            totals=totals,
            norm=norm,
            communicate=time.perf_counter() - started - self._waited,
            wait=self._waited,
            waited_for=self._waited_for,
        )

    def _update(self, norm: float) -> None:
        """Update the owned slice; from here on the step counts."""
        if self._is_clipped(norm):
            self.replica.gradient.mul_(self._clip(norm))
        if self._undos:
            self.replica.update_with(self._undos[self._group.rank], self._turn)
        else:
            self.replica.update()
            self._reach("updating")
        self._is_updated = True
        self._group.signal(UPDATED, self._turn)

    def _is_clipped(self, norm: float) -> bool:
        return self._max_norm is not None and norm > self._max_norm

    def _clip(self, norm: float) -> float:
        assert self._max_norm is not None
        return self._max_norm / norm

    def agree(self) -> None:
        """All have the same parameters after every step."""

    def resolve(
        self, survivors: Sequence[int], gather: Callable[[str, str], list[str]], *, is_first: bool
    ) -> Outcome | NotFinite | None:
        """See to the step that was under way when a member was lost. Those who can `gather` all stand still.

        If everybody had voted for it, the dead included, it counts: it is completed, from what the dead have left in
        shared memory. If all had posted and a loss is no number, it counts as such. Else it never happened: None.
        Each answer follows from memory that all see, so survivors who are in the same step come to the same one. May
        be called again, should another one die meanwhile.
        """
        result = self._judge() if self._is_open else None
        gather("judged", "")
        if isinstance(result, Outcome) and is_first:
            for rank in set(range(self._group.size)) - set(survivors):
                self._complete(rank, result.totals.weight, result.norm)
        gather("settled", "")
        self._is_open = False
        return result

    def _judge(self) -> Outcome | NotFinite | None:
        if not is_committed(self._group.counters(POSTED), self._turn):
            return None
        try:
            totals = self._table.read(self._num_shards)
            if not is_committed(self._group.counters(SUMMED), self._turn) or self._undo_first():
                return None
            norm = checked_norm(self._squares.tolist(), self._find_not_finite)
        except NotFinite as error:
            return error
        if not self._is_updated:
            self._update(norm)
        return Outcome(totals=totals, norm=norm, communicate=0.0, wait=self._waited, waited_for=None)

    def _undo_first(self) -> bool:
        """A first step that was not completed is taken back: nobody can see the optimizer's state of the dead."""
        if self._initial is None or self._undos or min(self._group.counters(UPDATED)) >= self._turn:
            return False
        self.replica.take_back(self._initial.view(self.replica.flat.dtype))
        return True

    def _complete(self, rank: int, weight: float, norm: float) -> None:
        factor = self._clip(norm) if self._is_clipped(norm) else None

        def fill(chunk: Chunk, out: torch.Tensor) -> None:
            self._addition.into(
                out, lambda term: self._slots[term[0]][term[1]][chunk.start : chunk.stop], self._registers
            )
            out.mul_(1.0 / weight)
            if factor is not None:
                out.mul_(factor)

        owned = self.replica.flat.layout.owned(rank, self._group.size)
        self.replica.complete(self._undos[rank], self._turn, owned, fill)

    def _wait(self, channel: int, value: int) -> None:
        started = time.perf_counter()
        last = self._group.wait(channel, value)
        seconds = time.perf_counter() - started
        if seconds > self._longest_wait:
            self._longest_wait, self._waited_for = seconds, last
        self._waited += seconds

    def _sum(self, scale: float) -> None:
        """Add up everybody's gradients of the owned chunks and divide by the weight of the batch."""
        base = self._turn * (len(self._stops) + 1)
        ready = 0
        squares = self._squares[self._first :]
        for index, out in enumerate(self.replica.gradients):
            if self._first + index >= ready:
                ready = min(self._first + index + BUCKET_CHUNKS, len(self._stops))
                self._wait(READY, base + ready)
            self._addition.into(out, lambda source: self._sources[source][index], self._registers)  # noqa: B023
            out.mul_(scale)
            squares[index] = square_of(out)

    def _find_not_finite(self, index: int) -> list[str]:
        """Every rank adds up the bad chunk for itself, so that all say the same."""
        layout = self.replica.flat.layout
        chunk = layout.chunks[index]
        out = self._slots[0][0].new_empty(chunk.stop - chunk.start)
        self._addition.into(
            out, lambda term: self._slots[term[0]][term[1]][chunk.start : chunk.stop], self._registers
        )
        return not_finite(layout, index, out)

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
