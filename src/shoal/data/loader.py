"""Batches in time: loads the next steps while the current one is computed."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Self

from shoal.data.columns import ColumnSource
from shoal.data.ledger import Ledger, Place, StepPlan, plan_steps
from shoal.data.loading import BackgroundLoading, HereWork, InlineLoading, Loading
from shoal.data.processes import ProcessWork
from shoal.data.readers import IndexedReader, Loaded, PlainReader, Reader
from shoal.data.sources import Source
from shoal.data.stream import StreamReader, StreamSource
from shoal.spec.errors import UserError


class Loader:
    """Iterates over (StepPlan, one batch for each of its pieces), loading in the background.

    `depth` is how many plans are pulled ahead: while the caller works on step t, at most t + depth is planned, so
    other shares can take effect at step t + depth + 1. It is at least `num_processes`. `load_seconds` is how long
    the caller really waited for the last item, `total_load_seconds` for all of them.

    Where loading takes place (see `randomness.py` for why):
    - data that draws no random numbers: a thread;
    - a dataset that draws random numbers, and any stream: one process, or with `num_processes=0` the calling thread,
      between two steps and not in the background;
    - `num_processes=n`: n processes (one for a stream), for datasets that are heavy on Python.

    Use as a context manager: leaving it ends threads and processes at once. Errors of the user's data code surface
    here, with their file and line, when the step they belong to is asked for.
    """

    def __init__(
        self,
        source: Source,
        plans: Iterable[StepPlan],
        *,
        seed: int = 0,
        depth: int = 2,
        num_processes: int | None = None,
        stop_epoch: int | None = None,
    ) -> None:
        if depth < 1 or (num_processes or 0) < 0:
            raise UserError(
                f"A loader cannot have depth {depth} and {num_processes} processes.",
                why="it loads at least one step ahead, in zero or more processes",
                hint="use depth=2 and num_processes=0",
            )
        draws = source.draws
        if num_processes is None:
            num_processes = 1 if draws else 0
        if isinstance(source, StreamSource):
            num_processes = min(num_processes, 1)
        self.num_processes = num_processes
        self.depth = max(depth, num_processes)
        self.load_seconds = 0.0
        self.total_load_seconds = 0.0
        self._loading = self._start(source, iter(plans), seed, stop_epoch)

    def _start(self, source: Source, plans: Iterator[StepPlan], seed: int, stop_epoch: int | None) -> Loading:
        reader = partial(_private_reader, source, seed, stop_epoch)
        if self.num_processes:
            return BackgroundLoading(ProcessWork(reader, self.num_processes), plans, self.depth)
        if isinstance(source, StreamSource) or source.draws:
            return InlineLoading(reader(), plans)
        return BackgroundLoading(HereWork(PlainReader(source)), plans, self.depth)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Loaded:
        began = time.perf_counter()
        loaded = self._loading.next()
        self.load_seconds = time.perf_counter() - began
        self.total_load_seconds += self.load_seconds
        if loaded is None:
            raise StopIteration
        return loaded

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._loading.close()


def load_steps(
    source: Source,
    ledger: Ledger,
    place: Place,
    mine: Callable[[int], Sequence[int]],
    *,
    merge: bool = True,
    max_piece: int | None = None,
    stop_step: int | None = None,
    stop_epoch: int | None = None,
    depth: int | None = None,
    num_processes: int | None = None,
) -> Loader:
    """Load a worker's part of every step from `place` on, of a stream as well: see `plan_steps` and `Loader`.

    Without a `depth`, what is in memory is loaded one step ahead: it always takes the same time, and the fewer steps
    are planned, the sooner other shares take effect.
    """
    depth = depth or (1 if isinstance(source, ColumnSource) else 2)
    plans = plan_steps(
        ledger, place, mine, merge=merge, max_piece=max_piece, stop_step=stop_step, stop_epoch=stop_epoch
    )
    return Loader(source, plans, seed=ledger.seed, depth=depth, num_processes=num_processes, stop_epoch=stop_epoch)


def _private_reader(source: Source, seed: int, stop_epoch: int | None) -> Reader:
    if isinstance(source, StreamSource):
        return StreamReader(source, seed, stop_epoch)
    return IndexedReader(source, seed)
