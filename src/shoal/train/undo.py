"""Updates that somebody else can complete: what chunks were before they are changed, kept where all can see it."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

BATCH_CHUNKS = 4
"""Chunks that are kept and updated at a time: few calls, and what is kept stays in the cache."""


class Undo:
    """One rank's record of how far its update of a turn is, in memory that outlives it.

    Chunks are updated in batches. Before a batch is changed its values are copied here, so whoever finds the record
    of a rank that died in the middle puts the batch back and goes on from there, to the same result. A dead
    process's last writes are all visible and in order: the kernel stops it between two instructions.

    `words` are two counters, of batches begun and of batches done, which only grow over all turns.
    """

    def __init__(
        self, memory: torch.Tensor, words: np.ndarray, reach: Callable[[str], None] = lambda point: None
    ) -> None:
        self._memory = memory
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
            tensors = changes(done)
            if tensors:
                torch._foreach_copy_(tensors, self._parts(tensors))
        for number in range(done, num_batches):
            tensors = changes(number)
            if tensors:
                torch._foreach_copy_(self._parts(tensors), tensors)
            self._words[0] = base + number + 1
            act(number)
            self._reach("updating")
            self._words[1] = base + number + 1

    def _parts(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        sizes = [tensor.numel() for tensor in tensors]
        return list(self._memory[: sum(sizes)].split(sizes))
