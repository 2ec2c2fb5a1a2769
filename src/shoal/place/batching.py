"""How much useful work a second a job does at its best batch: goodput, and the `Rate` that policies ask.

A batch of M samples is worth less than M / M0 batches of M0 samples: its gradient is less noisy than it needs to be.
With the gradient noise scale `noise` (in samples), each of its samples is worth (noise + M0) / (noise + M) of what
one was worth at M0 (Pollux, OSDI'21). So

    goodput = M / T_step * (noise + M0) / (noise + M)         samples a second, as good as those of a batch of M0
"""

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import ArrayLike

from shoal.place.gaussian import Floats
from shoal.place.throughput import Throughput

NUM_BATCHES = 24
"""How many batch sizes are tried between the initial and the largest, evenly in their logarithm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """Which batches a job may take: `initial` is what its user set, `largest` what it may grow to (the same: fixed).

    A worker computes at most `largest_micro` samples at once (its memory) and at least `smallest_micro`; more samples
    are accumulated. `noise` is the gradient noise scale in samples; 0 where it was not measured, and then no larger
    batch is worth anything.
    """

    initial: float
    largest: float
    largest_micro: float
    smallest_micro: float = 1.0
    noise: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The best batch for each configuration asked, as arrays. Where the smallest does not fit, `goodput` is 0."""

    goodput: Floats
    batch: Floats
    micro_batch: Floats
    accumulation: Floats
    step_seconds: Floats


def efficiency(batch: ArrayLike, batching: Batching) -> Floats:
    """What a sample is worth in such a batch, compared with the initial one."""
    return (batching.noise + batching.initial) / (batching.noise + np.asarray(batch, float))


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Batches that can be taken on some configurations, which are the leading axes, and how long a step takes.

    Nothing here depends on the noise, which changes all the time: it costs a model's prediction for each point, and
    `choose` next to nothing.
    """

    batch: Floats
    micro_batch: Floats
    accumulation: Floats
    step_seconds: Floats
    samples: Floats
    """A second; 0 where that batch cannot be taken."""


def grid_of(
    throughput: Throughput,
    batching: Batching,
    nodes: ArrayLike,
    workers: ArrayLike,
    *,
    kind: str = "",
    optimism: float = 0.0,
) -> Grid:
    nodes, workers = np.broadcast_arrays(np.asarray(nodes, float), np.asarray(workers, float))
    smallest = np.maximum(batching.initial, workers * batching.smallest_micro)
    steps = np.linspace(0.0, 1.0, NUM_BATCHES if batching.largest > batching.initial else 1)
    batch = smallest[..., None] * (np.maximum(batching.largest / smallest, 1.0)[..., None] ** steps)
    per_worker = batch / workers[..., None]
    accumulation = np.ceil(per_worker / batching.largest_micro * (1 - 1e-9)) - 1
    micro = per_worker / (accumulation + 1)
    seconds = throughput.seconds(
        nodes[..., None], workers[..., None], micro, accumulation, kind=kind, optimism=optimism
    )
    samples = np.where((batch <= batching.largest * (1 + 1e-9)) & (accumulation >= 0), batch / seconds, 0.0)
    return Grid(batch=batch, micro_batch=micro, accumulation=accumulation, step_seconds=seconds, samples=samples)


def choose(grid: Grid, batching: Batching) -> Choice:
    """The batch with the most goodput on each configuration of the grid, with this noise."""
    goodput = grid.samples * efficiency(grid.batch, batching)
    best = np.argmax(goodput, -1)[..., None]

    def at_best(values: Floats) -> Floats:
        return np.take_along_axis(values, best, -1)[..., 0]

    return Choice(
        goodput=at_best(goodput),
        batch=at_best(grid.batch),
        micro_batch=at_best(grid.micro_batch),
        accumulation=at_best(grid.accumulation),
        step_seconds=at_best(grid.step_seconds),
    )


def best_batch(
    throughput: Throughput,
    batching: Batching,
    nodes: ArrayLike,
    workers: ArrayLike,
    *,
    kind: str = "",
    optimism: float = 0.0,
) -> Choice:
    """The batch with the most goodput on each of these configurations (arrays, broadcast)."""
    return choose(grid_of(throughput, batching, nodes, workers, kind=kind, optimism=optimism), batching)


@dataclass(frozen=True, eq=False, kw_only=True)
class LearnedRate:
    """`place.cluster.Rate` of a job with a learned model: call it with (kind, workers, nodes).

    The first call for a kind works out all sizes up to `most_workers` (and doubles that when asked for more), so that
    every further one is a lookup; with another noise (`with_noise`) only what depends on it is worked out again.
    `ready` does that where the model was fitted, which takes ten times as long, so that no decision waits for it.
    Sizes beyond twice of what was observed are 0 while `is_careful`: a job is doubled at most, so that a model is not
    trusted far from what it has seen.
    """

    throughput: Throughput
    batching: Batching
    optimism: float = 0.0
    is_careful: bool = False
    most_workers: int = 64
    _tables: dict[str, list[list[float]]] = field(default_factory=dict, repr=False)
    _grids: dict[str, Grid] = field(default_factory=dict, repr=False)

    def __call__(self, kind: str, workers: int, nodes: int) -> float:
        if workers < 1:
            return 0.0
        table = self._tables.get(kind)
        if table is None or workers > len(table[0]):
            table = self._tables[kind] = self._table(kind, workers)
        return table[min(max(nodes, 1), 3) - 1][workers - 1]

    def ready(self, kind: str) -> "LearnedRate":
        self(kind, 1, 1)
        return self

    def with_noise(self, noise: float) -> "LearnedRate":
        return replace(self, batching=replace(self.batching, noise=noise), _tables={})

    def _table(self, kind: str, asked: int) -> list[list[float]]:
        grid = self._grids.get(kind)
        if grid is None or asked > grid.batch.shape[1]:
            sizes = np.arange(1, (self.most_workers if asked <= self.most_workers else 2 * asked) + 1)
            # The model knows one node, two and more: three rows hold them all.
            grid = self._grids[kind] = grid_of(
                self.throughput, self.batching, [[1], [2], [3]], sizes[None], kind=kind, optimism=self.optimism
            )
        goodput = (grid.samples * efficiency(grid.batch, self.batching)).max(-1)
        if self.is_careful:
            goodput[:, 2 * self.throughput.largest_workers :] = 0.0
        table: list[list[float]] = goodput.tolist()
        return table
