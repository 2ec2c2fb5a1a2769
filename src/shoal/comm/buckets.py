"""Where tensors lie in a flat buffer, and which of them travel together. Pure arithmetic."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

ALIGN_BYTES = 64


def plan_buckets(sizes: Sequence[int], bucket_bytes: int) -> list[tuple[int, ...]]:
    """Group tensors into buckets, last layers first; returns positions in `sizes`.

    `sizes` are bytes in forward order. A bucket closes once it holds `bucket_bytes` or more, so that only the last
    can be small; a large tensor shares its bucket with the few that were ready before it.
    """
    buckets: list[tuple[int, ...]] = []
    current: list[int] = []
    filled = 0
    for position in reversed(range(len(sizes))):
        current.append(position)
        filled += sizes[position]
        if filled >= bucket_bytes:
            buckets.append(tuple(current))
            current, filled = [], 0
    return [*buckets, tuple(current)] if current else buckets


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where each tensor lies in one flat buffer of one dtype. Offsets and total count elements, not bytes.

    Every tensor begins on a cache line, so slices of different tensors never share one. The gaps are padding: zero
    them once, and sums over the whole buffer leave them zero.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    total: int

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors, as views into a flat buffer of `total` elements."""
        return {
            name: flat[offset : offset + math.prod(shape)].view(shape)
            for name, shape, offset in zip(self.names, self.shapes, self.offsets, strict=True)
        }


def lay_out(tensors: Sequence[tuple[str, tuple[int, ...]]], item_bytes: int = 4) -> Layout:
    """Place named shapes one after the other, each beginning at a multiple of 64 bytes. `total` is one, too."""
    per_line = ALIGN_BYTES // item_bytes
    offsets, end = [], 0
    for _, shape in tensors:
        offsets.append(end)
        end += -(-math.prod(shape) // per_line) * per_line
    names, shapes = tuple(name for name, _ in tensors), tuple(tuple(shape) for _, shape in tensors)
    return Layout(names=names, shapes=shapes, offsets=tuple(offsets), total=end)
