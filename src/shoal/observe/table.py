"""The numbers of a run as one table: a row for each step, a column for each name."""

import math
from array import array
from collections.abc import Iterable

from shoal.observe.scalars import Scalars

_NOTHING = math.nan


class Table:
    """Rows by step, in order of steps. Of a step that was taken again, the last one counts.

    Takes eight bytes for each number. `has` tells apart a number that is missing from one that is not a number.
    """

    def __init__(self, rows: Iterable[Scalars] = ()) -> None:
        self._place: dict[int, int] = {}
        self._steps = array("q")
        self._times = array("d")
        self._values: dict[str, array[float]] = {}
        self._known: dict[str, bytearray] = {}
        self.extend(rows)

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def names(self) -> list[str]:
        """The columns after `step` and `time`."""
        return list(self._values)

    def extend(self, rows: Iterable[Scalars]) -> None:
        for row in rows:
            place = self._place.get(row.step)
            if place is None:
                place = self._place[row.step] = len(self._steps)
                self._steps.append(row.step)
                self._times.append(row.time)
            elif "loss" in row.values:
                self._times[place] = row.time
            for name, value in row.values.items():
                self._set(name, place, value)

    def _set(self, name: str, place: int, value: float) -> None:
        values = self._values.setdefault(name, array("d"))
        known = self._known.setdefault(name, bytearray())
        missing = place + 1 - len(values)
        if missing > 0:
            values.extend([_NOTHING] * missing)
            known.extend(bytes(missing))
        values[place] = value
        known[place] = 1

    def columns(self) -> dict[str, list[int] | list[float] | list[float | None]]:
        """`step`, `time` and every name, sorted by step. None: there is no such number for that step."""
        order = range(len(self._steps))
        if any(self._steps[place] > self._steps[place + 1] for place in range(len(self._steps) - 1)):
            order = sorted(order, key=self._steps.__getitem__)  # type: ignore[assignment]
        columns: dict[str, list[int] | list[float] | list[float | None]] = {
            "step": [self._steps[place] for place in order],
            "time": [self._times[place] for place in order],
        }
        for name, values in self._values.items():
            known = self._known[name]
            # The user may have called a number of theirs `step`.
            column = name if name not in ("step", "time") else f"{name}_"
            columns[column] = [values[place] if place < len(values) and known[place] else None for place in order]
        return columns
