"""What copies that train by themselves tell each other, on its way while they train on."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shoal.comm.group import Group
from shoal.spec.errors import BugError
from shoal.train.sync.local_rounds import Round

STEP, WISH, SPEED, SECONDS, TRAVEL, NUM_COLUMNS = range(6)
"""Columns of a row: the step reached, what is wished, seconds a sample, seconds of computing in this round, seconds
that the last message travelled. Behind them samples, one column a fragment, and the changing buffers."""


@dataclass(frozen=True, slots=True)
class Told:
    """One row from each copy."""

    rows: np.ndarray
    num_fragments: int

    def weights(self, fragment: int) -> list[float]:
        """How many samples each copy has learned from since this fragment was last agreed on."""
        return [float(count) for count in self.rows[:, NUM_COLUMNS + fragment]]

    def column(self, which: int) -> list[float]:
        return [float(value) for value in self.rows[:, which]]

    def buffers(self) -> torch.Tensor | None:
        """Their mean over samples, added up in the order of copies, the same everywhere; None if nobody counts."""
        weights = self.weights(self.num_fragments - 1)
        values = self.rows[:, NUM_COLUMNS + self.num_fragments :]
        if not values.shape[1] or not sum(weights):
            return None
        total = np.zeros(values.shape[1])
        for row, weight in zip(values, weights, strict=True):
            if weight:
                total += row * weight
        return torch.from_numpy(total / sum(weights))


def gather(group: Group, row: torch.Tensor, num_fragments: int) -> Told:
    """Everybody's row, on every copy."""
    everyone = torch.empty(group.size * row.numel(), dtype=torch.float64)
    group.all_gather(everyone, row).wait()
    told = Told(everyone.view(group.size, -1).numpy(), num_fragments)
    if len(set(told.column(STEP))) > 1:
        raise BugError(f"The copies agree at different steps: {told.column(STEP)}.")
    return told


@dataclass(frozen=True, slots=True)
class Landing:
    """What came of a message: everybody's rows, what to add to each fragment's parameters, and seconds on the way."""

    told: Told
    moves: Sequence[torch.Tensor]
    travel_seconds: float


class Flight:
    """A message that left before step `step` and is taken in before step `due`; it holds `fragments`.

    `act` makes it travel, in a thread. Nothing else may use the group meanwhile.
    """

    def __init__(
        self,
        step: int,
        due: int,
        fragment: int,
        of: Round,
        buffers: torch.Tensor | None,
        act: Callable[[], Landing],
    ) -> None:
        self.step, self.due, self.fragment, self.round, self.buffers = step, due, fragment, of, buffers
        self._act = act
        self._landing: Landing | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="shoal-agree", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._landing = self._act()
        except Exception as error:
            self._error = error

    def wait(self) -> Landing:
        """What came of it; raises what went wrong."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._landing is not None
        return self._landing

    def abandon(self, seconds: float) -> None:
        """The group was closed: give the thread time to notice."""
        self._thread.join(seconds)


def travel(
    group: Group,
    row: torch.Tensor,
    num_fragments: int,
    moves: Callable[[Told], Sequence[torch.Tensor]],
) -> Landing:
    """Exchange rows, then what `moves` exchanges. The time on the way begins when all are there."""
    told = gather(group, row, num_fragments)
    started = time.perf_counter()
    found = moves(told)
    return Landing(told, found, time.perf_counter() - started)
