"""How far the clock of another machine is off ours, from questions and answers that pass anyway. Pure.

An answer was given somewhere between question and arrival. Half of the way there and back is the best guess, and can
be wrong by as much; so of many readings the quickest counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

FIRST_READINGS = 4
"""So many come before something is said for the first time: two seconds, with beats twice a second."""
WINDOW_READINGS = 60
LEAST_CHANGE_SECONDS = 5e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """The clock of `node` is ahead of the launcher's by so many seconds, give or take `error_seconds`.

    `ranks` are those that have it.
    """

    node: str
    offset_seconds: float
    error_seconds: float
    ranks: tuple[int, ...]


@dataclass(slots=True)
class ClockReadings:
    """The readings of one clock. Nothing is said twice: only what is new by more than it may be wrong."""

    _readings: list[tuple[float, float]] = field(default_factory=list)
    _said: ClockOffset | None = None

    def add(self, round_trip_seconds: float, theirs: float, ours: float) -> None:
        """They had `theirs` on their clock; it arrived at `ours`, so long after we had asked."""
        half = max(0.0, round_trip_seconds) / 2.0
        self._readings.append((half, theirs - (ours - half)))

    def news(self, node: str, ranks: Sequence[int]) -> ClockOffset | None:
        """What is to be said now, if anything: after the first readings, after a window full, or for other ranks."""
        is_other = self._said is not None and self._said.ranks != tuple(ranks)
        if len(self._readings) < (FIRST_READINGS if self._said is None or is_other else WINDOW_READINGS) or not ranks:
            return None
        error, offset = min(self._readings)
        self._readings.clear()
        found = ClockOffset(node=node, offset_seconds=offset, error_seconds=error, ranks=tuple(ranks))
        if self._said is not None and not is_other and not _differs(self._said, found):
            return None
        self._said = found
        return found


def _differs(before: ClockOffset, after: ClockOffset) -> bool:
    change = abs(after.offset_seconds - before.offset_seconds)
    is_moved = change > max(LEAST_CHANGE_SECONDS, before.error_seconds + after.error_seconds)
    return is_moved or after.error_seconds < before.error_seconds / 2.0
