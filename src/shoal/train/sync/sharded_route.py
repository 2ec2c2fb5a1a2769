"""The order in which gradients travel, and where each piece of them is added up."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shoal.train.flat import PARAMETER_ALIGNMENT, Chunk, FlatLayout, round_up


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements [start, stop) of a bucket belong at `at` of the owned chunk with this number."""

    start: int
    stop: int
    chunk: int
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Gradients as one stream of parameters in `order`, cut into equal buckets.

    The order is that in which backward makes them, which need not be that of the layout: an optimizer with several
    groups lays each out by itself. `segments[bucket]` is what the owner of some chunks takes out of a bucket.
    """

    order: tuple[int, ...]
    num_buckets: int
    segments: tuple[tuple[Segment, ...], ...]


def plan_route(layout: FlatLayout, order: Sequence[int], owned: Sequence[Chunk], bucket: int) -> Route:
    """The route of all parameters in this order, for the owner of these chunks (ascending)."""
    num_buckets = -(-sum(padded(layout, index) for index in order) // bucket)
    found: list[list[Segment]] = [[] for _ in range(num_buckets)]
    for place, shift in _runs(layout, order):
        for number, chunk in enumerate(owned):
            low, high = max(place.start, chunk.start), min(place.stop, chunk.stop)
            while low < high:
                index, start = divmod(low + shift, bucket)
                size = min(high - low, bucket - start)
                found[index].append(Segment(start, start + size, number, low - chunk.start))
                low += size
    return Route(order=tuple(order), num_buckets=num_buckets, segments=tuple(map(tuple, found)))


def _runs(layout: FlatLayout, order: Sequence[int]) -> list[tuple[range, int]]:
    """Parts of the layout that are the same in the stream, as long as can be, and how far they are shifted there."""
    runs: list[tuple[range, int]] = []
    at = 0
    for index in order:
        start, size = layout.offsets[index], padded(layout, index)
        if runs and runs[-1][0].stop == start and runs[-1][1] == at - start:
            runs[-1] = (range(runs[-1][0].start, start + size), at - start)
        else:
            runs.append((range(start, start + size), at - start))
        at += size
    return runs


def padded(layout: FlatLayout, index: int) -> int:
    """Elements of a parameter in the stream; those behind its own are zero."""
    return round_up(layout.sizes[index], PARAMETER_ALIGNMENT)


def first_order(layout: FlatLayout, model: torch.nn.Module) -> list[int]:
    """A guess before the first backward: the model's last parameters come first."""
    position = {name: number for number, (name, _) in enumerate(model.named_parameters())}
    return sorted(range(len(layout.names)), key=lambda index: -position[layout.names[index]])
