"""Groups with a clock: how long this rank was held up in their calls."""

import time
from collections.abc import Sequence

import torch

from shoal.comm.group import DONE, Group, Op, Work
from shoal.spec.spans import SPANS


class Clock:
    """Adds up in `seconds` what calls of some groups took: waiting for others, and moving what they say."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def add(self, began: float, peer: int | None = None) -> None:
        """A call is over that began then; `peer` is the worker whose message it was about."""
        self.seconds += time.perf_counter() - began
        if peer is not None and SPANS.is_on:
            SPANS.add(f"wait for rank {peer}", "wait", began)


class Clocked:
    """Any group, all calls of which are timed by a clock. `names` are the numbers of its ranks' workers.

    Costs two looks at the clock a call. What is sent is copied by the one who sends, which is none of it.
    """

    def __init__(self, inner: Group, clock: Clock, names: Sequence[int]) -> None:
        self._inner, self._clock, self._names = inner, clock, names
        self.rank, self.size = inner.rank, inner.size
        self.transport, self.reason = getattr(inner, "transport", ""), getattr(inner, "reason", "")

    def all_reduce(self, tensor: torch.Tensor, op: Op = Op.SUM) -> Work:
        began = time.perf_counter()
        return self._together(self._inner.all_reduce(tensor, op), began)

    def reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor, op: Op = Op.SUM) -> Work:
        began = time.perf_counter()
        return self._together(self._inner.reduce_scatter(out, tensor, op), began)

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> Work:
        began = time.perf_counter()
        return self._together(self._inner.all_gather(out, tensor), began)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Work:
        began = time.perf_counter()
        return self._together(self._inner.broadcast(tensor, root), began)

    def send(self, tensor: torch.Tensor, to: int) -> Work:
        return ClockedWork(self._inner.send(tensor, to), self._clock, self._names[to])

    def recv(self, tensor: torch.Tensor, source: int) -> Work:
        return ClockedWork(self._inner.recv(tensor, source), self._clock, self._names[source])

    def barrier(self) -> None:
        began = time.perf_counter()
        self._inner.barrier()
        self._clock.add(began)

    def close(self) -> None:
        self._inner.close()

    def _together(self, work: Work, began: float) -> Work:
        self._clock.add(began)
        return work if work is DONE else ClockedWork(work, self._clock)


class ClockedWork:
    """Something under way, waiting for which is timed."""

    def __init__(self, work: Work, clock: Clock, peer: int | None = None) -> None:
        self._work, self._clock, self._peer = work, clock, peer

    def wait(self) -> None:
        began = time.perf_counter()
        self._work.wait()
        self._clock.add(began, self._peer)
