"""Where to cut: stages that take equally long, measured, and among those the ones that need the least memory."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

import torch

from shoal.train.split.boundary import describe_values, rebuild_values
from shoal.train.split.stages import Program

REPEATS = 3
"""Measurements of each part of the model; the shortest counts, because others only disturb."""

TOLERANCE = 1.05
"""How much longer than the best the slowest stage may take, for the sake of memory."""


def measure_parts(
    program: Program,
    bounds: Sequence[int],
    inputs: Sequence[torch.Tensor],
    within: Callable[[], AbstractContextManager[Any]],
) -> list[float]:
    """Seconds of a forward and backward between each two bounds, on these inputs of the model."""
    seconds = []
    received: tuple[Any, ...] = ()
    for start, stop in pairwise(bounds):
        stage = program.extract(start, stop)
        best = float("inf")
        for _ in range(1 + REPEATS):
            entered = _as_leaves(received)
            began = time.perf_counter()
            with within():
                given = stage(program.root, *inputs, *entered)
            tensors: list[torch.Tensor] = []
            describe_values(given, tensors)
            wanted = [tensor for tensor in tensors if tensor.requires_grad]
            torch.autograd.backward(wanted, [torch.ones_like(tensor) for tensor in wanted])
            best = min(best, time.perf_counter() - began)
        received = _detach(given)
        seconds.append(best)
    return seconds


def _as_leaves(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copies that gradients can reach: a layer may change what it is given."""
    return _map(values, lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad) * 1)


def _detach(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return _map(values, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad))


def _map(values: tuple[Any, ...], change: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Any, ...]:
    tensors: list[torch.Tensor] = []
    fact = describe_values(values, tensors)
    made: tuple[Any, ...] = rebuild_values(fact, iter([change(tensor) for tensor in tensors]), torch.device("cpu"))
    return made


def choose_bounds(seconds: Sequence[float], num_bytes: Sequence[int], num_stages: int) -> list[int]:
    """The part that each stage begins with, and the number of parts last."""
    best = _divide(seconds, num_stages, [0] * len(seconds), float("inf"))[0]
    longest = max(sum(seconds[start:stop]) for start, stop in pairwise(best))
    return _divide(num_bytes, num_stages, seconds, longest * TOLERANCE)[0]


def _divide(
    costs: Sequence[float], num_stages: int, limited: Sequence[float], limit: float
) -> tuple[list[int], float]:
    """The bounds with the smallest largest cost, where no stage has more than `limit` of `limited`.

    Costs O(stages x parts^2), for some hundred parts at most.
    """
    size = len(costs)
    sums, limits = _running(costs), _running(limited)
    # best[j]: the way to divide the first j parts among the stages so far, by its largest cost.
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [0])}
    for stage in range(num_stages):
        following: dict[int, tuple[float, list[int]]] = {}
        for start, (cost, bounds) in best.items():
            for stop in range(start + 1, size - (num_stages - stage - 1) + 1):
                if limits[stop] - limits[start] <= limit:
                    found = max(cost, sums[stop] - sums[start])
                    if stop not in following or found < following[stop][0]:
                        following[stop] = found, [*bounds, stop]
        best = following
    cost, bounds = best[size]
    return bounds, cost


def _running(values: Sequence[float]) -> list[float]:
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    return sums
