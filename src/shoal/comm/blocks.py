"""Arithmetic on flat arrays, cut so that it happens in the cache.

Adding two 50 MB halves and copying the sum back costs four trips through memory when done in one go, because the sum
has left the cache when the copy begins. In blocks that fit a core's own cache it costs two reads and two writes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from shoal.comm.group import Op

# A quarter of the 1 MiB second-level cache of a current server core: the terms and the sum fit with room to spare.
BLOCK_BYTES = 256 << 10
# What ranks show each other at once: large enough that meetings are few, small enough to stay in the shared cache.
STAGE_BYTES = 1 << 20
LINE_BYTES = 64

Array = Any  # a numpy array, or a torch tensor for dtypes numpy does not have


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How to combine and copy arrays of some dtype, with as little overhead a call as can be had."""

    view: Callable[[torch.Tensor], Array]
    combine: Mapping[Op, Callable[[Array, Array, Array], object]]
    copy: Callable[[Array, Array], object]


def _torch_copy(to: torch.Tensor, source: torch.Tensor) -> None:
    to.copy_(source)


_NUMPY = Arithmetic(
    view=torch.Tensor.numpy,
    combine={Op.SUM: np.add, Op.MAX: np.maximum, Op.MIN: np.minimum},
    copy=np.copyto,
)
_TORCH = Arithmetic(
    view=lambda tensor: tensor,
    combine={
        Op.SUM: lambda a, b, out: torch.add(a, b, out=out),
        Op.MAX: lambda a, b, out: torch.maximum(a, b, out=out),
        Op.MIN: lambda a, b, out: torch.minimum(a, b, out=out),
    },
    copy=_torch_copy,
)


def arithmetic_of(dtype: torch.dtype) -> Arithmetic:
    """numpy's calls cost a third of torch's on small arrays; bfloat16 it does not know."""
    return _TORCH if dtype is torch.bfloat16 else _NUMPY


def cut_evenly(numel: int, parts: int, item_bytes: int) -> list[slice]:
    """Contiguous slices, near equal, cut between cache lines so that no two ranks write the same line."""
    per_line = LINE_BYTES // item_bytes
    num_lines = -(-numel // per_line)
    edges = [min(num_lines * part // parts * per_line, numel) for part in range(parts + 1)]
    return [slice(begin, end) for begin, end in pairwise(edges)]


def cut_blocks(part: slice, block: int) -> list[slice]:
    """A slice in pieces of at most `block` elements; an empty one is one empty piece, so that nobody skips a turn."""
    begins = range(part.start, max(part.stop, part.start + 1), block)
    return [slice(begin, min(begin + block, part.stop)) for begin in begins]


def reduce_terms(
    terms: Sequence[Array], out: Array, scratch: Array, combine: Callable[[Array, Array, Array], object]
) -> None:
    """Combine arrays into `out`, first to last. `out` may be one of them; `scratch` may not."""
    total = terms[0]
    if len(terms) == 1:
        out[...] = total
        return
    for term in terms[1:-1]:
        combine(total, term, scratch)
        total = scratch
    combine(total, terms[-1], out)
