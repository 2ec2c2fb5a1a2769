"""Copies that should be equal and are not: found by checksums, named, and repaired from the others."""

from collections import Counter
from collections.abc import Sequence

import torch

NUM_PARTS = 64
"""In each step one part of the parameters is looked at, so all of them within so many steps."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MODULUS = 2**52  # what a float64 holds exactly, with room to spare


def checksum_of(values: torch.Tensor, step: int) -> int:
    """The sum of the bits of one part of a flat tensor, as integers: any single flipped bit changes it.

    Costs a 64th of reading the parameters once.
    """
    size = -(-values.numel() // NUM_PARTS)
    start = step % NUM_PARTS * size
    part = values[start : start + size].view(_INTEGERS[values.element_size()])
    return int(part.sum(dtype=torch.int64)) % _MODULUS


def find_diverged(checksums: Sequence[float]) -> tuple[list[int], int]:
    """The ranks whose copy is not that of most, and a rank that has the right one. Of two halves rank 0's counts."""
    common = Counter(checksums).most_common()
    most = max(number for _, number in common)
    right = next(value for value in checksums if dict(common)[value] == most)
    return [rank for rank, value in enumerate(checksums) if value != right], list(checksums).index(right)
