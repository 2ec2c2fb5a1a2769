"""Rank x step: how long each rank took for the parts of a step, in a bounded number of columns. Pure."""

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.spec.event import StepMetrics

MAX_COLUMNS = 1024
_PARTS = ("count", "compute", "communicate", "wait", "load", "other")
_WIDTH = len(_PARTS)

Cell = Sequence[float]
"""The sums of a cell, in the order of `_PARTS`."""

QUANTITIES: Mapping[str, Callable[[Cell], float]] = {
    "own": lambda cell: cell[1] + cell[4] + cell[5],
    "step": lambda cell: sum(cell[1:]),
    "compute": lambda cell: cell[1],
    "communicate": lambda cell: cell[2],
    "wait": lambda cell: cell[3],
    "load": lambda cell: cell[4],
}
"""What can be shown. `own` is a rank's own part of a step, which others wait for."""


class HeatMap:
    """Sums of every rank's times by columns of `column_steps` steps each, a power of two that grows with the run."""

    def __init__(self, max_columns: int = MAX_COLUMNS) -> None:
        self.column_steps = 1
        self.last_step = -1
        self._max_columns = max_columns
        self._sums: dict[int, array[float]] = {}

    def add(self, rank: int, rows: Sequence[StepMetrics]) -> None:
        """Take some steps of a rank."""
        if not rows:
            return
        self._make_room(max(row.step for row in rows))
        sums = self._sums.setdefault(rank, array("d", bytes(8 * self._max_columns * _WIDTH)))
        for row in rows:
            if row.num_steps > 1:
                self._spread(sums, row)
                continue
            at = row.step // self.column_steps * _WIDTH
            sums[at] += 1
            sums[at + 1] += row.compute
            sums[at + 2] += row.communicate
            sums[at + 3] += row.wait
            sums[at + 4] += row.load
            sums[at + 5] += row.other

    def _spread(self, sums: "array[float]", row: StepMetrics) -> None:
        """Steps of long ago that are kept as one row: each of their columns gets its part."""
        first = max(0, row.step - row.num_steps + 1) // self.column_steps
        columns = range(first, row.step // self.column_steps + 1)
        parts = (row.num_steps, row.compute, row.communicate, row.wait, row.load, row.other)
        for column in columns:
            for place, value in enumerate(parts, start=column * _WIDTH):
                sums[place] += value / len(columns)

    def forget(self, rank: int) -> None:
        """Leave out what was added of a rank."""
        self._sums.pop(rank, None)

    def _make_room(self, last_step: int) -> None:
        self.last_step = max(self.last_step, last_step)
        while self.last_step // self.column_steps >= self._max_columns:
            self.column_steps *= 2
            self._sums = {rank: _halve(sums) for rank, sums in self._sums.items()}

    def grid(self, quantity: str, max_columns: int) -> dict[str, Any]:
        """Mean seconds by rank and column, at most so many; null where a rank took no step."""
        of = QUANTITIES[quantity]
        used = self.last_step // self.column_steps + 1
        first = min(map(_first_used, self._sums.values()), default=0)
        merged = max(1, -(-(used - first) // max(1, max_columns)))
        rows = {
            rank: [_mean(sums, start, min(start + merged, used), of) for start in range(first, used, merged)]
            for rank, sums in sorted(self._sums.items())
        }
        return {
            "of": quantity,
            "first_step": first * self.column_steps,
            "last_step": self.last_step,
            "column_steps": self.column_steps * merged,
            "ranks": list(rows),
            "seconds": list(rows.values()),
        }


def _halve(sums: "array[float]") -> "array[float]":
    """The same with two columns in each, and room for as many again."""
    halved = array("d", bytes(8 * len(sums)))
    for at in range(len(sums)):
        column, part = divmod(at, _WIDTH)
        halved[column // 2 * _WIDTH + part] += sums[at]
    return halved


def _first_used(sums: "array[float]") -> int:
    return next((at // _WIDTH for at in range(0, len(sums), _WIDTH) if sums[at]), 0)


def _mean(sums: "array[float]", start: int, end: int, of: Callable[[Cell], float]) -> float | None:
    cell = [sum(sums[start * _WIDTH + part : end * _WIDTH : _WIDTH]) for part in range(_WIDTH)]
    return of(cell) / cell[0] if cell[0] else None
