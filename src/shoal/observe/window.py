"""The last steps of a worker, one by one, small enough to be told to the launcher a few times a second."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from shoal.spec.event import StepMetrics

MAX_ROWS = 24


class StepRow(NamedTuple):
    """One step of one rank, in seconds. `between` is what passed since the step before, outside of any step.

    `num_values` is how many numbers its samples had, 0 where nobody counted.
    """

    step: int
    compute: float
    communicate: float
    wait: float
    load: float
    other: float
    between: float = 0.0
    num_samples: int = 0
    num_values: int = 0
    waited_for: int = -1

    @property
    def own(self) -> float:
        """What the rank spent on its own part: what others wait for."""
        return self.compute + self.load + self.other + self.between

    @property
    def seconds(self) -> float:
        return self.own + self.communicate + self.wait


class Window:
    """Steps since the last `take`, at most 24 of them: where there were more, those whose numbers are multiples of 2,
    of 4, and so on. All ranks leave out alike, so that what is left can be compared. `add` costs about a microsecond.
    """

    def __init__(self) -> None:
        self._rows: list[tuple[StepMetrics, float]] = []
        self._stride = 1
        self._ended: float | None = None

    def add(self, metrics: StepMetrics, now: float) -> None:
        """Take a step that ended at `now`."""
        ended, self._ended = self._ended, now
        if metrics.step % self._stride:
            return
        self._rows.append((metrics, 0.0 if ended is None else now - ended))
        if len(self._rows) > MAX_ROWS:
            self._stride *= 2
            self._rows = [row for row in self._rows if row[0].step % self._stride == 0]

    def take(self) -> list[list[int]]:
        """The rows as whole numbers, durations in microseconds; `read_rows` reads them."""
        rows, self._rows = self._rows, []
        self._stride = max(1, self._stride // 2)
        return [_pack(metrics, passed) for metrics, passed in rows]


def _pack(row: StepMetrics, passed: float) -> list[int]:
    parts = (row.compute, row.communicate, row.wait, row.load, row.other)
    between = max(0.0, passed - sum(parts))
    last = -1 if row.waited_for is None else row.waited_for
    return [row.step, *(round(1e6 * part) for part in (*parts, between)), row.num_samples, row.num_values, last]


def read_rows(packed: Any) -> Sequence[StepRow]:
    """The rows that a worker told; none where it is something else."""
    if not isinstance(packed, list):
        return ()
    return [_unpack(row) for row in packed if _is_row(row)]


def _is_row(numbers: Any) -> bool:
    return isinstance(numbers, list) and len(numbers) == 10 and all(isinstance(one, int) for one in numbers)


def _unpack(numbers: Sequence[int]) -> StepRow:
    compute, communicate, wait, load, other, between = (1e-6 * part for part in numbers[1:7])
    num_samples, num_values, last = numbers[7:]
    return StepRow(numbers[0], compute, communicate, wait, load, other, between, num_samples, num_values, last)
