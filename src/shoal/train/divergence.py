"""Copies that should be equal and are not: found by checksums, and named by what most of them have."""

from collections import Counter
from collections.abc import Sequence

import torch

NUM_PARTS = 32
"""In each step one part of the parameters is looked at, so all of them within so many steps."""

_MODULUS = 2**52 - 47
"""A prime that a float64 holds exactly: what one bit of an int64 adds is no multiple of it, also where sums wrap."""


class Diverged(Exception):
    """Copies of the parameters were not equal before a step, which was not taken, on any worker.

    `checksums` has one for each copy, of the part of the model that is held here: equal, where another part differs.
    """

    def __init__(self, checksums: Sequence[float]) -> None:
        super().__init__(f"copies differ: {list(checksums)}")
        self.checksums = checksums


def part_of(values: torch.Tensor, step: int) -> torch.Tensor:
    """The part of a flat tensor that is looked at in this step."""
    size = -(-values.numel() // NUM_PARTS)
    start = step % NUM_PARTS * size
    return values[start : start + size]


def checksum_of(values: torch.Tensor) -> int:
    """The sum of the bits of a flat tensor, as integers: any single flipped bit changes it. Reads them once."""
    start, size = values.storage_offset() * values.element_size(), values.nbytes
    # As the largest that fit, which in all but the smallest models are those that torch adds up as fast as it reads.
    kinds = (torch.int64, torch.int32, torch.int16, torch.uint8)
    kind = next(kind for kind in kinds if start % kind.itemsize == size % kind.itemsize == 0)
    return int(values.view(kind).sum(dtype=torch.int64)) % 2**64 % _MODULUS


def find_diverged(checksums: Sequence[float]) -> tuple[list[int], int]:
    """The ranks whose copy is not that of most, and a rank that has the right one. Of two halves rank 0's counts."""
    common = Counter(checksums).most_common()
    most = max(number for _, number in common)
    right = next(value for value in checksums if dict(common)[value] == most)
    return [rank for rank, value in enumerate(checksums) if value != right], list(checksums).index(right)
