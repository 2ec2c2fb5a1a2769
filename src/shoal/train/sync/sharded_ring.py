"""Gradients that pass through a few shared buckets to those who add them up, while backward goes on."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from shoal.comm.shm import ShmGroup
from shoal.train.flat import CHUNK, FlatLayout
from shoal.train.summing import StepSum
from shoal.train.sync.sharded_route import Route, padded
from shoal.train.sync.stopwatch import Stopwatch
from shoal.train.tree import Node, most_registers

NUM_SIGNALS = 2
FILLED, TAKEN = range(NUM_SIGNALS)
"""Signals: how many buckets a rank has filled, and of how many it has added up its part."""

BUCKET_ELEMENTS = 2**19
"""2 MiB of float32: some chunks for every worker of a host, and Python's part of handling one is small."""

NUM_BUCKETS = 8
"""How far a worker may be ahead of the slowest: 16 MiB of float32, which is all that gradients take besides sums."""

_TURN = 1 << 20


class Ring:
    """Every rank's buckets, and the sums of what passes through them.

    A pass is one backward: the whole stream of gradients, cut into buckets. All ranks that have a k-th pass go
    through it together, and whoever owns a part of a bucket adds up everybody's when all have filled it. Sums are
    taken in the order of passes, buckets and ranks, whoever is early or late.

    Nobody waits for somebody who waits for him: to fill bucket g one needs that all have taken bucket
    g - NUM_BUCKETS, and to take a bucket only that all have filled it. So the earliest bucket that is not
    filled by all can always be filled, or its filler is still computing. Waiting, a rank first takes what it can.
    Where a member is lost waits raise MemberLost, in the middle of a backward, too: that ring is of no more use.
    """

    def __init__(self, group: ShmGroup, out: Sequence[torch.Tensor], dtype: torch.dtype, watch: Stopwatch) -> None:
        self._group, self._out, self._watch = group, out, watch
        shared = group.share(NUM_BUCKETS * BUCKET_ELEMENTS * dtype.itemsize)
        self._buckets: list[Sequence[torch.Tensor]] = [
            memory.view(dtype).split(BUCKET_ELEMENTS) for memory in shared.all
        ]
        self._mine = self._buckets[group.rank]
        self._num_passes = group.common(8 * group.size).view(torch.int64).numpy()
        self._registers = [
            torch.empty(CHUNK, dtype=dtype)
            for _ in range(1 + most_registers(group.size))  # a segment is in one chunk
        ]
        self._turn = self._base = 0
        self._is_drained = True

    def begin(self, route: Route) -> None:
        """A step begins. All ranks have done with the one before."""
        self._route = route
        self._turn += 1
        self._filled = self._taken = self._used = self._passes = 0
        self._present: list[int] | None = None
        self._is_drained = False

    def open(self, *, is_last: bool) -> None:
        """The next pass begins. Others see that it is the last before they see any of it."""
        self._passes += 1
        if is_last:
            self._num_passes[self._group.rank] = self._turn * _TURN + self._passes

    def write(self, values: torch.Tensor, num_zeros: int = 0) -> None:
        """The next elements of the stream, flat, and zeros behind them."""
        done = 0
        while done < values.numel() or num_zeros:
            bucket = self._room()
            size = min(values.numel() - done, BUCKET_ELEMENTS - self._used)
            bucket[self._used : self._used + size] = values[done : done + size]
            zeros = min(num_zeros, BUCKET_ELEMENTS - self._used - size)
            bucket[self._used + size : self._used + size + zeros] = 0
            done, num_zeros, self._used = done + size, num_zeros - zeros, self._used + size + zeros
            if self._used == BUCKET_ELEMENTS:
                self._send()

    def close(self) -> None:
        """The stream of this pass is complete."""
        if self._used:
            self._send()

    def _room(self) -> torch.Tensor:
        if self._used == 0 and self._filled >= NUM_BUCKETS:
            needed = self._filled - NUM_BUCKETS + 1
            while self._taken < needed:
                self._take()
            self._watch.wait(TAKEN, self._base + needed)
        return self._mine[self._filled % NUM_BUCKETS]

    def _send(self) -> None:
        self._filled, self._used = self._filled + 1, 0
        self._group.signal(FILLED, self._base + self._filled)
        while self._taken < self._filled and self._can_take():
            self._take()

    def drain(self) -> None:
        """Take all that comes until nobody has another pass. May be called again."""
        if self._is_drained:
            return
        if not self._passes:
            self._num_passes[self._group.rank] = self._turn * _TURN
            self._group.signal(FILLED, self._base + 1)  # so that the others look
        while self._take():
            pass
        self._base += max(1, self._taken)
        self._is_drained = True

    def _can_take(self) -> bool:
        filled = self._group.counters(FILLED)
        ranks = range(len(filled)) if self._present is None else self._present
        return all(filled[rank] > self._base + self._taken for rank in ranks)

    def _take(self) -> bool:
        """Add up our part of the next bucket, when all have filled it; False if there is none."""
        number, bucket = divmod(self._taken, self._route.num_buckets)
        if bucket == 0:
            if number == 0:
                self._watch.wait(FILLED, self._base + 1)
            self._present = [rank for rank in range(self._group.size) if self._has_pass(rank, number)]
            if not self._present:
                return False
            self._addition = StepSum(
                [range(rank in self._present) for rank in range(self._group.size)], 1, exact=False
            )
        assert self._present is not None
        self._watch.wait(FILLED, self._base + self._taken + 1, self._present)
        self._sum(bucket, adds=number > 0)
        self._taken += 1
        if bucket + 1 == self._route.num_buckets:
            self._present = None
        self._group.signal(TAKEN, self._base + self._taken)
        return True

    def _has_pass(self, rank: int, number: int) -> bool:
        """Asked when all passes of the rank before this one have been taken: if one was its last, we have seen it."""
        turn, count = divmod(int(self._num_passes[rank]), _TURN)
        return turn != self._turn or count > number

    def _sum(self, bucket: int, *, adds: bool) -> None:
        values = [of_rank[self._taken % NUM_BUCKETS] for of_rank in self._buckets]
        total, *registers = self._registers
        for part in self._route.segments[bucket]:
            size = part.stop - part.start
            out = self._out[part.chunk][part.at : part.at + size]
            self._addition.into(
                total[:size] if adds else out,
                lambda term: values[term[0]][part.start : part.stop],  # noqa: B023
                registers,
            )
            if adds:
                out.add_(total[:size])

    @property
    def waited(self) -> float:
        """Seconds of this step that went by in waiting for others."""
        return self._watch.seconds


class StreamGradients:
    """Takes each parameter's gradient the moment it is ready and writes it into the ring, in the route's order.

    One that comes before its turn stays where it is until then; what backward did not reach counts as zero. `arrived`
    is the order in which they came in the last pass, `stalled` how many seconds of the step it waited for others.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], layout: FlatLayout, ring: Ring, route: Route) -> None:
        self._parameters, self._layout, self._ring = parameters, layout, ring
        self.route = route
        self.unused: set[int] = set(range(len(parameters)))
        self.arrived: list[int] = []
        self._waiting: set[int] = set()
        self._next = 0
        self._is_last = False
        self.stalled = 0.0
        self._hooks = [p.register_post_accumulate_grad_hook(self._hook(i)) for i, p in enumerate(parameters)]

    def open(self, node: Node, *, is_last: bool) -> None:
        """The next backward is a pass of its own."""
        self.arrived, self._waiting, self._next = [], set(), 0
        self._is_last = is_last
        self._ring.open(is_last=is_last)

    def close(self) -> None:
        """Backward is over. After the last one, help those who go on: they may need what comes next of us."""
        while self._next < len(self.route.order):
            self._write_next()
        self._ring.close()
        if self._is_last:
            self._ring.drain()
        self.stalled = self._ring.waited

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def take(parameter: torch.Tensor) -> None:
            self.unused.discard(index)
            self.arrived.append(index)
            self._waiting.add(index)
            while self._next < len(self.route.order) and self.route.order[self._next] in self._waiting:
                self._write_next()

        return take

    def _write_next(self) -> None:
        index = self.route.order[self._next]
        gradient, self._parameters[index].grad = self._parameters[index].grad, None
        if gradient is None:
            gradient = torch.empty(0)
        elif gradient.is_sparse:
            gradient = gradient.to_dense()
        self._ring.write(gradient.reshape(-1), padded(self._layout, index) - gradient.numel())
        self._waiting.discard(index)
        self._next += 1

    def detach(self) -> None:
        """Take the hooks off, so that the model can be trained by other means.

        A backward that was cut short has left gradients that waited for their turn: nobody shall add to them.
        """
        for hook in self._hooks:
            hook.remove()
        for parameter in self._parameters:
            parameter.grad = None
