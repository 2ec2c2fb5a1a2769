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

STEP, WISH, SPEED, SECONDS, TRAVEL, BUSY, NUM_COLUMNS = range(7)
"""Columns of a row: the step reached, what is wished, seconds a sample, seconds of computing in this round, seconds
that the last message travelled, seconds since it arrived. Behind them samples, one column a fragment, and the
changing buffers."""


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
class Met:
    """What all copies have said: their rows, the mean of their ways of each fragment, and seconds on the way.

    `ended` is when that was, by our clock.
    """

    told: Told
    means: Sequence[torch.Tensor]
    travel_seconds: float
    ended: float


def travel(
    group: Group,
    row: torch.Tensor,
    num_fragments: int,
    means: Callable[[Told], Sequence[torch.Tensor]],
) -> Met:
    """Exchange rows, then what `means` exchanges. The time on the way begins when all are there."""
    told = gather(group, row, num_fragments)
    started = time.perf_counter()
    found = means(told)
    ended = time.perf_counter()
    return Met(told, found, ended - started, ended)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What a copy keeps of a message that is on its way, for when it arrives, and for when it never does.

    turn: which agreement of the copies it is, counted over all Worlds. It left before step `step` and is taken in
    before step `due`; `mark` is how much of the book is in it. `of` is the round in which it left, None where the
    copies only take their mean. The rest is what leaving has changed: samples of the fragment and of the round, and
    when the fragment had left before. `buffers` are those that we had.
    """

    turn: int
    step: int
    due: int
    fragments: tuple[int, ...]
    mark: int
    of: Round | None = None
    samples: int = 0
    round_samples: int = 0
    left: int = 0
    buffers: torch.Tensor | None = None


class Flight:
    """A message on its way, in a thread. Nothing else may use the group meanwhile.

    `meet` exchanges it. Then all vote, each in the knowledge that it has all it needs; only then `move` changes what
    is agreed on, and returns what is to be added to our parameters. So if a member is lost and one of the others has
    come to `move`, all can `complete` it.
    """

    def __init__(
        self,
        sent: Sent,
        meet: Callable[[], Met],
        vote: Callable[[], None],
        move: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
    ) -> None:
        self.sent = sent
        self._meet, self._vote, self._move = meet, vote, move
        self.met: Met | None = None
        self.moves: Sequence[torch.Tensor] | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="shoal-agree", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.met = self._meet()
            self._vote()
            self.complete()
        except Exception as error:
            self._error = error

    def complete(self) -> None:
        """All have voted for it: have what comes of it."""
        if self.moves is None:
            assert self.met is not None
            self.moves = self._move(self.met.means)

    def wait(self) -> None:
        """Until it has arrived; raises what went wrong."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def stop(self, seconds: float | None = None) -> None:
        """The group is of no use any more: let the thread notice. So long at most, if that is given."""
        self._thread.join(seconds)
