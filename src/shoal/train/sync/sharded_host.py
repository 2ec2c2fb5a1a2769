"""Copies on one host that keep one set of everything among them: parameters, optimizer state, and gradients, too."""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import nn

from shoal.comm.shm import ShmGroup
from shoal.train.replica import Replica
from shoal.train.summing import square_of
from shoal.train.sync.sharded_ring import BUCKET_ELEMENTS, Ring, StreamGradients
from shoal.train.sync.sharded_route import Route, first_order, plan_route
from shoal.train.sync.sync import Outcome, Row, Standing
from shoal.train.sync.table import NotFinite, StepTable, checked_norm, look, not_finite

T = TypeVar("T")

POSTED, SUMMED, UPDATED = range(2, 5)
"""Signals of a step, after those of the ring: rows posted, slice summed, slice updated."""


class HostShardedSync:
    """One set of parameters in shared memory, of which every worker sums and updates its part.

    What `SharedMemorySync` keeps besides, a gradient of the whole model in each worker, is here a ring of a few
    buckets: gradients pass through it to the owners of their chunks while backward goes on. Chunks are dealt out one
    by one, so that all workers have the same to add up at any time. With n workers each holds 1/n of parameters,
    gradients, optimizer state and moving average, plus its buckets; as nothing else is left to divide, this is
    sharding of gradients and of parameters at once.

    Where each worker has one piece of a step, sums are those of `SharedMemorySync` to the last bit. Several pieces
    are added up piece by piece over all workers, instead of worker by worker over all pieces.
    """

    is_round_over = True

    def __init__(
        self,
        group: ShmGroup,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        num_shards: int,
        max_norm: float | None = None,
        ema_decay: float | None = None,
        source: int = 0,
        reach: Callable[[str], None] = lambda point: None,
    ) -> None:
        self._reach, self._group, self._max_norm = reach, group, max_norm
        self.replica = Replica(
            model,
            optimizer,
            allocate=lambda size, dtype: group.common(size * dtype.itemsize).view(dtype),
            owner=(group.rank, group.size),
            is_dealt=True,
            is_source=group.rank == source,
            ema_decay=ema_decay,
        )
        layout = self.replica.flat.layout
        self._numbers = range(group.rank, len(layout.chunks), group.size)
        self._squares = group.common(4 * len(layout.chunks)).view(torch.float32)
        self._blamed = group.common(8 * len(layout.names)).view(torch.int64).numpy()
        self._arrived = group.common(8 * len(layout.names)).view(torch.int64)
        self._table = StepTable(num_shards, group.size, lambda size: group.common(8 * size).view(torch.float64))
        self._ring = Ring(group, self.replica.gradients, self.replica.flat.dtype)
        self._turn = 0
        group.barrier()
        self.gradients = StreamGradients(
            self.replica.flat.parameters, layout, self._ring, self._plan(first_order(layout, model))
        )

    def _plan(self, order: Sequence[int]) -> Route:
        return plan_route(self.replica.flat.layout, order, self.replica.owned, BUCKET_ELEMENTS)

    def begin(self, num_shards: int, assignment: Sequence[range]) -> None:
        self._turn += 1
        self._num_shards = num_shards
        if self._turn == 2:  # the order in which gradients came in the first worker's first step is everybody's now
            self.gradients.route = self._plan(self._arrived.tolist())
        self._ring.begin(self.gradients.route)

    def post(self, rows: Sequence[Row], mine: range, standing: Standing) -> None:
        self._table.write(rows, mine, self._group.rank, standing)
        self._group.signal(POSTED, self._turn)
        self._reach("posted")

    def finish(self) -> Outcome:
        started = time.perf_counter()
        before = self._ring.waited
        self._ring.drain()
        self._ring.wait(POSTED, self._turn)
        totals = look(self._group, self._table.read, self._num_shards)
        self._scale(1.0 / totals.weight)
        self._tell_order()
        self._group.signal(SUMMED, self._turn)
        self._reach("summed")
        self._ring.wait(SUMMED, self._turn)
        norm = look(self._group, checked_norm, self._squares.tolist(), self._find_not_finite)
        if self._max_norm is not None and norm > self._max_norm:
            self.replica.gradient.mul_(self._max_norm / norm)
        self._reach("updating")
        self.replica.update()
        self._group.signal(UPDATED, self._turn)
        self._reach("updated")
        self._ring.wait(UPDATED, self._turn)
        ring = self._ring
        return Outcome(
            totals=totals,
            norm=norm,
            communicate=time.perf_counter() - started - (ring.waited - before),
            wait=ring.waited,
            waited_for=ring.waited_for,
        )

    def _scale(self, factor: float) -> None:
        """Divide the sums by the weight of the batch, and square them, chunk by chunk, as others do it."""
        layout = self.replica.flat.layout
        for number, values in zip(self._numbers, self.replica.gradients, strict=True):
            square = square_of(values.mul_(factor))
            self._squares[number] = square
            if not square.isfinite():
                names = not_finite(layout, number, values)
                self._blamed[[layout.names.index(name) for name in names]] = self._turn

    def _find_not_finite(self, index: int) -> list[str]:
        """What the owners of the bad chunks have found, the same on all ranks."""
        names = self.replica.flat.layout.names
        return [name for name, turn in zip(names, self._blamed, strict=True) if turn == self._turn]

    def _tell_order(self) -> None:
        if self._turn == 1 and self._group.rank == 0:
            came = self.gradients.arrived
            rest = [index for index in self.gradients.route.order if index not in set(came)]
            self._arrived.copy_(torch.tensor([*came, *rest]))

    def agree(self) -> None:
        """All have the same parameters after every step."""

    def resolve(
        self, survivors: Sequence[int], gather: Callable[[str, str], list[str]], *, is_first: bool
    ) -> Outcome | NotFinite | None:
        raise AssertionError("only elastic runs lose members, and they do not shard")

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
