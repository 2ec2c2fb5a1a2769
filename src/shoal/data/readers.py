"""Turn a plan into batches, wherever loading takes place: in a thread, a process, or between two steps."""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from shoal.data.ledger import StepPlan
from shoal.data.randomness import preserved_generators, seed_generators
from shoal.data.sources import IndexedSource

Loaded = tuple[StepPlan, tuple[Any, ...]]


class Reader(Protocol):
    """Loads the steps of one run in order."""

    def load(self, plan: StepPlan) -> Loaded | None:
        """The step's plan, corrected where only reading could tell, and a batch for each piece; None at the end."""


class IndexedReader:
    """Reads samples by their ids. Random numbers are those of (seed, epoch, sample); generators are put back."""

    def __init__(self, source: IndexedSource, seed: int) -> None:
        self._source = source
        self._seed = seed

    def load(self, plan: StepPlan) -> Loaded:
        with preserved_generators():
            return plan, _fetch(self._source, plan, partial(seed_generators, self._seed, plan.epoch))


class PlainReader:
    """Reads samples by their ids, without random numbers."""

    def __init__(self, source: IndexedSource) -> None:
        self._source = source
        self._is_interrupted = False

    def load(self, plan: StepPlan) -> Loaded:
        return plan, _fetch(self._source, plan, self._check)

    def interrupt(self) -> None:
        """Stop at the next sample. Called from another thread."""
        self._is_interrupted = True

    def _check(self, sample: int) -> None:
        if self._is_interrupted:
            raise Interrupted


class Interrupted(Exception):
    """Nobody wants the rest."""


def _fetch(source: IndexedSource, plan: StepPlan, before: Callable[[int], None]) -> tuple[Any, ...]:
    return tuple(source.fetch(piece.ids, before) for piece in plan.pieces)
