"""Where to cut: stages that take equally long, measured, and among those the ones that need the least memory.

A stage needs memory for its state, and for what each micro-batch keeps for its backward: early stages have more of
these under way than late ones.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from shoal.train.split.boundary import describe_values, rebuild_values
from shoal.train.split.stages import Program
from shoal.train.traits import count_saved

Cost = Callable[[int, int, int], float]
"""(number of a stage, its first part, the part after its last) -> what it costs."""

REPEATS = 3
"""Measurements of each part of the model; the shortest counts, because others only disturb."""

TOLERANCE = 1.05
"""How much longer than the best the slowest stage may take, for the sake of memory."""


def measure_parts(
    program: Program,
    bounds: Sequence[int],
    inputs: Sequence[torch.Tensor],
    within: Callable[[], AbstractContextManager[Any]],
    held: Sequence[torch.Tensor] = (),
) -> tuple[list[float], list[int]]:
    """Seconds of a forward and backward between each two bounds, on these inputs of the model, and the bytes that the
    forward keeps for the backward. What is `held` anyway does not count.
    """
    seconds, saved = [], []
    received: tuple[Any, ...] = ()
    for start, stop in pairwise(bounds):
        stage = program.extract(start, stop)
        with within():
            forward = partial(stage, program.root, *inputs, *_as_leaves(received))
            saved.append(count_saved(forward, [*held, *inputs]))
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
    return seconds, saved


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


def stage_bytes(state: Sequence[int], saved: Sequence[int], kept: Sequence[int]) -> Cost:
    """The memory of a stage, of parts with so much state each that save so much; it has `kept` micro-batches."""
    states, saves = _running(state), _running(saved)
    return lambda stage, start, stop: states[stop] - states[start] + kept[stage] * (saves[stop] - saves[start])


def choose_bounds(seconds: Sequence[float], need: Cost, num_stages: int) -> list[int]:
    """The part that each stage begins with, and the number of parts last. `need` is the memory of a stage."""
    sums = _running(seconds)

    def duration(stage: int, start: int, stop: int) -> float:
        return sums[stop] - sums[start]

    best = _divide(len(seconds), num_stages, duration, duration, float("inf"))
    longest = max(sums[stop] - sums[start] for start, stop in pairwise(best))
    return _divide(len(seconds), num_stages, need, duration, longest * TOLERANCE)


def _divide(size: int, num_stages: int, cost_of: Cost, limited: Cost, limit: float) -> list[int]:
    """The bounds with the smallest largest cost, where no stage has more than `limit` of `limited`.

    Costs O(stages x parts^2), for some hundred parts at most.
    """
    # best[j]: the way to divide the first j parts among the stages so far, by its largest cost.
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [0])}
    for stage in range(num_stages):
        following: dict[int, tuple[float, list[int]]] = {}
        for start, (cost, bounds) in best.items():
            for stop in range(start + 1, size - (num_stages - stage - 1) + 1):
                if limited(stage, start, stop) <= limit:
                    found = max(cost, cost_of(stage, start, stop))
                    if stop not in following or found < following[stop][0]:
                        following[stop] = found, [*bounds, stop]
        best = following
    return best[size][1]


def _running(values: Sequence[float]) -> list[float]:
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    return sums
