"""Updates that somebody else can complete: what chunks were before they are changed, kept where all can see it."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

BATCH_CHUNKS = 4
"""Chunks that are kept and updated at a time: few calls, and what is kept stays in the cache."""


class Undo:
    """One rank's record of how far its update of a turn is, in memory that outlives it.

    Chunks are updated in batches. Before a batch is changed its values are copied here, so whoever finds the record
    of a rank that died in the middle puts the batch back and goes on from there, to the same result. A dead
    process's last writes are all visible and in order: the kernel stops it between two instructions.

    `memory` is of bytes. `words` are two counters, of batches begun and of batches done, which only grow over all
    turns.
    """

    def __init__(
        self, memory: torch.Tensor, words: np.ndarray, reach: Callable[[str], None] = lambda point: None
    ) -> None:
        self._memory = memory.numpy()
        self._words = words
        self._reach = reach

    def run(
        self, turn: int, num_batches: int, changes: Callable[[int], list[torch.Tensor]], act: Callable[[int], None]
    ) -> None:
        """Update each batch with `act(number)`, beginning where the record says.

        `changes(number)` is what that changes.
        """
        base = turn * (num_batches + 1)
        begun, done = (max(0, int(word) - base) for word in self._words)
        if begun > done:
            for kept, values in self._pairs(changes(done)):
                values[:] = kept
        for number in range(done, num_batches):
            for kept, values in self._pairs(changes(number)):
                kept[:] = values
            self._words[0] = base + number + 1
            act(number)
            self._reach("updating")
            self._words[1] = base + number + 1

    def _pairs(self, tensors: Sequence[torch.Tensor]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Where each tensor is kept, and the tensor, as bytes: numpy copies them faster than torch does."""
        start = 0
        for tensor in tensors:
            values = tensor.view(torch.uint8).numpy()
            stop = start + len(values)
            yield self._memory[start:stop], values
            start = stop
