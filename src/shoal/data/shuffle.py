"""The order of an epoch as a pure function: any stretch of it, in constant memory, on any machine.

A keyed permutation takes the place of a shuffled list. Position p of an epoch is written as two digits (left,
right) of a rectangle `rows x columns` that just covers the samples. Each round adds a keyed hash of one digit to
the other, modulo its range: a Feistel network, which can be undone round by round and is therefore a permutation of
the rectangle. A result outside the samples is sent through again until it falls inside (cycle walking), which keeps
it a permutation.

All arithmetic is on unsigned 64-bit integers and wraps, so the order is the same for every numpy and every platform.
"""

from functools import lru_cache
from math import isqrt

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

MAX_SAMPLES = 2**62
_MASK = 2**64 - 1
_HALF = np.uint64(32)
_SPREAD = np.uint64(0x9FB21C651E98DF25)
_STIR = np.uint64(0xD6E8FEB86659FD93)


def mix(*words: int) -> int:
    """A well mixed 64-bit number made of integers of any size and sign; the same one everywhere and for ever."""
    state = 0x9E3779B97F4A7C15
    for word in words:
        state = ((state ^ (word & _MASK)) * 0xD1342543DE82EF95 + 0x2545F4914F6CDD1D) & _MASK
        state = ((state ^ (state >> 32)) * 0x9FB21C651E98DF25) & _MASK
        state ^= state >> 29
    return state


def order(seed: int, epoch: int, num_samples: int, start: int, stop: int, shuffle: bool = True) -> Ids:
    """The sample ids at positions [start, stop) of the epoch's order.

    The positions 0 .. num_samples - 1 give every id exactly once. Costs about 0.1 ms for 512 ids whatever the size of
    the epoch; nothing of that size is ever built.
    """
    positions = np.arange(start, stop, dtype=np.uint64)
    if not shuffle:
        return positions.view(np.int64)
    network = _network(seed, epoch, num_samples)
    ids = network.scramble(positions)
    outside = np.flatnonzero(ids >= num_samples)
    while outside.size:
        ids[outside] = network.scramble(ids[outside])
        outside = outside[ids[outside] >= num_samples]
    return ids.view(np.int64)


class _Network:
    """The keyed permutation of the rectangle that covers one epoch."""

    def __init__(self, seed: int, epoch: int, num_samples: int) -> None:
        # An even number of rows: with two odd sides only even permutations could come out.
        rows = isqrt(num_samples - 1) + 1
        rows += rows % 2
        self.rows = np.uint64(rows)
        self.columns = np.uint64(-(-num_samples // rows))
        # Eight rounds pass the tests of order from a few dozen samples on; tiny rectangles need more to reach all
        # orders.
        num_rounds = 8 if num_samples >= 256 else 16
        self.keys = [np.uint64(mix(seed, epoch, number)) for number in range(num_rounds)]

    def scramble(self, positions: Words) -> Words:
        """Where each position of the rectangle goes. As rounds are even in number, digits end in their places."""
        moved, fixed = np.divmod(positions, self.columns)
        size, other_size = self.rows, self.columns
        for key in self.keys:
            moved += _hash_below(fixed, key, size)
            np.subtract(moved, size, out=moved, where=moved >= size)
            moved, fixed, size, other_size = fixed, moved, other_size, size
        moved *= self.columns
        moved += fixed
        return moved


@lru_cache(maxsize=16)
def _network(seed: int, epoch: int, num_samples: int) -> _Network:
    return _Network(seed, epoch, num_samples)


def _hash_below(words: Words, key: np.uint64, limit: np.uint64) -> Words:
    """A keyed hash of each word, in [0, limit); limit is below 2**32, so scaling the upper 32 bits is fair enough."""
    hashed = words * _SPREAD
    hashed += key
    hashed ^= hashed >> _HALF
    hashed *= _STIR
    hashed >>= _HALF
    hashed *= limit
    hashed >>= _HALF
    return hashed
