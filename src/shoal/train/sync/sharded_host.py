"""Copies on one host that keep one set of everything among them: parameters, optimizer state, and gradients, too."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from shoal.comm.shm import ShmGroup
from shoal.train.flat import Chunk
from shoal.train.replica import Replica
from shoal.train.summing import square_of
from shoal.train.sync.sharded_ring import BUCKET_ELEMENTS, NUM_SIGNALS, Ring, StreamGradients
from shoal.train.sync.sharded_route import Route, first_order, plan_route
from shoal.train.sync.shared_step import SharedStep
from shoal.train.sync.sync import Outcome, Row, Standing
from shoal.train.sync.table import NotFinite, not_finite


class HostShardedSync:
    """One set of parameters in shared memory, of which every worker sums and updates its part.

    What `SharedMemorySync` keeps besides, a gradient of the whole model in each worker, is here a ring of a few
    buckets: gradients pass through it to the owners of their chunks while backward goes on. Chunks are dealt out one
    by one, so that all workers have the same to add up at any time. With n workers each holds 1/n of parameters,
    gradients, optimizer state and moving average, plus its buckets; as nothing else is left to divide, this is
    sharding of gradients and of parameters at once.

    Where each worker has one piece of a step, sums are those of `SharedMemorySync` to the last bit. Several pieces
    are added up piece by piece over all workers, instead of worker by worker over all pieces.

    What has passed through the ring is gone. So in an elastic run the sums, too, are in memory that all see, and a
    survivor completes the update of a dead worker from there.
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
        is_elastic: bool = False,
        reach: Callable[[str], None] = lambda point: None,
    ) -> None:
        self._group = group
        self.replica = Replica(
            model,
            optimizer,
            allocate=lambda name, size, dtype: group.common(size * dtype.itemsize, name).view(dtype),
            owner=(group.rank, group.size),
            is_dealt=True,
            is_source=group.rank == source,
            ema_decay=ema_decay,
            shows_gradient=is_elastic,
        )
        layout = self.replica.flat.layout
        self._numbers = range(group.rank, len(layout.chunks), group.size)
        self._blamed = group.common(8 * len(layout.names)).view(torch.int64).numpy()
        self._arrived = group.common(8 * len(layout.names)).view(torch.int64)
        self._step = SharedStep(
            group,
            self.replica,
            self,
            num_shards=num_shards,
            channel=NUM_SIGNALS,
            max_norm=max_norm,
            is_elastic=is_elastic,
            reach=reach,
        )
        self._ring = Ring(group, self.replica.gradients, self.replica.flat.dtype, self._step.watch)
        group.barrier()
        self.gradients = StreamGradients(
            self.replica.flat.parameters, layout, self._ring, self._plan(first_order(layout, model))
        )

    def _plan(self, order: Sequence[int]) -> Route:
        return plan_route(self.replica.flat.layout, order, self.replica.owned, BUCKET_ELEMENTS)

    def begin(self, num_shards: int, assignment: Sequence[range]) -> None:
        self._step.begin(num_shards)
        if self._step.turn == 2:  # the order in which gradients came in the first worker's first step is everybody's
            self.gradients.route = self._plan(self._arrived.tolist())
        self._ring.begin(self.gradients.route)

    def post(self, rows: Sequence[Row], mine: range, standing: Standing) -> None:
        self._step.post(rows, mine, standing)

    def finish(self) -> Outcome:
        return self._step.finish()

    def end(self) -> None:
        """The step's last backward is over: take what is on its way, and tell the order in which ours came."""
        self._ring.drain()
        if self._step.turn == 1 and self._group.rank == 0:
            came = self.gradients.arrived
            rest = [index for index in self.gradients.route.order if index not in set(came)]
            self._arrived.copy_(torch.tensor([*came, *rest]))

    def add_up(self, scale: float) -> None:
        """The ring has added up. Divide by the weight of the batch, and square, chunk by chunk, as others do it."""
        layout = self.replica.flat.layout
        for number, values in zip(self._numbers, self.replica.gradients, strict=True):
            square = square_of(values.mul_(scale))
            self._step.squares[number] = square
            if not square.isfinite():
                names = not_finite(layout, number, values)
                self._blamed[[layout.names.index(name) for name in names]] = self._step.turn

    def recall(self, chunk: Chunk, scale: float, out: torch.Tensor) -> None:
        """Its owner has left it where all see it."""
        out.copy_(self.replica.gradient[chunk.start : chunk.stop])

    def find_not_finite(self, index: int) -> list[str]:
        """What the owners of the bad chunks have found, the same on all ranks."""
        names = self.replica.flat.layout.names
        return [name for name, turn in zip(names, self._blamed, strict=True) if turn == self._step.turn]

    def find_shards(self, index: int) -> list[range]:
        """They were added up on their way."""
        return []

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
