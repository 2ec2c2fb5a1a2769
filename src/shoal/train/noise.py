"""How noisy gradients are: estimated from parts of a batch, whose gradients differ the more the noisier they are.

A sample's gradient has the mean G and the covariance S. The mean over b samples has an expected square of
|G|^2 + tr S / b, so two batch sizes tell both. Of a batch of B samples that is cut into n parts of b_i samples each,
with gradients g_i, the mean of |g_i|^2 weighted by b_i / B is on average what one part of B / n samples has, however
unequal the parts are: sum(b_i / B * (|G|^2 + tr S / b_i)) = |G|^2 + n * tr S / B.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from shoal.train.flat import CHUNK
from shoal.train.summing import square_of
from shoal.train.sync.sync import Noise, Row
from shoal.train.tree import Node

EVERY = 16
"""So many steps from one look to the next: one costs a pass over the gradients."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a worker tells: a sum over parts of |gradient sum|^2 / weight, and how many parts are its own.

    The sum is over its own parts, or over its slice of all parts: all workers' together are the same.

    `first` is of the first piece of several, where that is looked at: its square and its weight.
    """

    ratio: float
    count: int
    first: tuple[float, float] | None = None


def is_due(turn: int) -> bool:
    """Whether to look in this step of a World, counted from 1: the same on all workers, and in the first."""
    return (turn - 1) % EVERY == 0


def square_of_all(values: torch.Tensor) -> float:
    """The sum of squares of any number of elements, chunk by chunk."""
    squares = [square_of(chunk) for chunk in values.split(CHUNK)]
    return float(torch.stack(squares).double().sum()) if squares else 0.0


def parts_of(
    nodes: Sequence[tuple[Node, int]],
    rows: Sequence[Row],
    square: Callable[[int], float],
    first_square: float | None = None,
) -> Parts:
    """This worker's parts: `nodes` with their slots, `rows` of their shards, and `square` of the sum in a slot."""
    ratio, count = 0.0, 0
    for (start, stop), slot in nodes:
        weight = math.fsum(row.weight for row in rows if start <= row.shard < stop)
        if weight > 0:
            ratio, count = ratio + square(slot) / weight, count + 1
    return Parts(ratio, count, first_of(rows, first_square))


def first_of(rows: Sequence[Row], first_square: float | None) -> tuple[float, float] | None:
    """Square and weight of the first piece's gradient, where there are others to compare it with."""
    return (first_square, rows[0].weight) if first_square is not None and len(rows) > 1 else None


def estimate(
    ratio: float, count: int, first: tuple[float, float] | None, *, square: float, weight: float, num_samples: float
) -> Noise | None:
    """From all workers' parts added up and the `square` of the whole gradient; None where nothing tells.

    Samples that weigh differently count as many as they would on average.
    """
    if count > 1:
        return _compare(ratio / weight, num_samples / count, square, num_samples)
    if first is not None and 0 < first[1] < weight:
        return _compare(first[0] / first[1] ** 2, first[1] / weight * num_samples, square, num_samples)
    return None


def _compare(small: float, small_batch: float, large: float, large_batch: float) -> Noise | None:
    """From the squares of gradients of two batch sizes."""
    variance = (small - large) / (1 / small_batch - 1 / large_batch)
    noise = Noise(signal=large - variance / large_batch, variance=variance)
    return noise if math.isfinite(noise.signal) and math.isfinite(variance) else None
