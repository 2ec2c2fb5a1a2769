"""The numbers of a run as others take them: one row a step, over all ranks, while it goes on or after it."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shoal.observe.metrics import MetricsReader
from shoal.observe.noise import NoiseScale
from shoal.observe.points import MergedPoint, Point, PointsReader
from shoal.observe.series import NAMES, OWN
from shoal.observe.turns import step_seconds
from shoal.spec.event import StepMetrics

AWAY_SECONDS = 5.0
"""A worker whose newest step is so much older than that of others is not there any more, or not yet again."""
PARTS = NAMES[6:]
_GROUPS = {
    **dict.fromkeys(NAMES[:4], "train"),
    **dict.fromkeys(NAMES[4:6], "speed"),
    **dict.fromkeys(PARTS, "time"),
    **dict.fromkeys(("grad_signal", "grad_variance", "noise_scale"), "train"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalars:
    """The numbers that belong to one step, by name: those that all ranks have measured, or the user's own."""

    step: int
    time: float
    values: Mapping[str, float]


def tag_of(name: str) -> str:
    """A name as tools that group by folders want it: `train/loss`, `time/wait`. The user's own stay as they are."""
    group = _GROUPS.get(name)
    return f"{group}/{name}" if group else name


class ScalarsReader:
    """Follows the files of a run and puts the ranks' numbers together.

    A step is given once all ranks that are there have reached it, with shares of time as the mean over them. Reads
    only files, so anybody who sees the run folder can do it, during the run or after. Nothing from before `since`
    is given: a run that was resumed holds what earlier attempts have measured, too.

    Numbers of the user's own are rows of their own. What several workers say of one step under one name is one
    number, their mean; for this such rows wait until the next call.
    """

    def __init__(self, run_dir: str, since: float = 0.0) -> None:
        self._reader = MetricsReader(run_dir)
        self._points = PointsReader(run_dir)
        self._held: list[Point | MergedPoint] = []
        self._since = since
        self._waiting: dict[int, deque[StepMetrics]] = {}
        self._newest: dict[int, float] = {}
        self._noise = NoiseScale()

    def read_new(self) -> list[Scalars]:
        """What is new and complete."""
        for rank, steps in self._reader.read_new().items():
            self._waiting.setdefault(rank, deque()).extend(step for step in steps if step.time >= self._since)
            self._newest[rank] = steps[-1].time
        held, self._held = self._held, self._read_points()
        rows = self._own_rows(held)
        present = self._present()
        while present and all(self._waiting[rank] for rank in present):
            rows.append(self._take_next())
        return rows

    def read_rest(self) -> list[Scalars]:
        """Everything there is, of steps that not all ranks have, too: the run is over."""
        rows = self.read_new()
        held, self._held = self._held, []
        rows += self._own_rows(held)
        while any(self._waiting.values()):
            rows.append(self._take_next())
        return rows

    def _read_points(self) -> list[Point | MergedPoint]:
        return [point for points in self._points.read_new().values() for point in points if point.time >= self._since]

    def _own_rows(self, points: Sequence[Point | MergedPoint]) -> list[Scalars]:
        found: dict[int, dict[str, list[float]]] = {}
        times: dict[int, float] = {}
        for point in points:
            times[point.step] = max(point.time, times.get(point.step, point.time))
            values = found.setdefault(point.step, {})
            numbers = point.values if isinstance(point, Point) else {point.name: point.mean}
            for name, value in numbers.items():
                shown = f"{OWN}{name}" if name in NAMES and self._newest else name
                values.setdefault(shown, []).append(value)
        return [
            Scalars(
                step=step, time=times[step], values={name: sum(each) / len(each) for name, each in values.items()}
            )
            for step, values in found.items()
        ]

    def _present(self) -> list[int]:
        newest = max(self._newest.values(), default=0.0)
        return [rank for rank, moment in self._newest.items() if moment > newest - AWAY_SECONDS]

    def _take_next(self) -> Scalars:
        """The lowest step that waits, of every rank that has it."""
        number = min(queue[0].step for queue in self._waiting.values() if queue)
        steps = [queue.popleft() for queue in self._waiting.values() if queue and queue[0].step == number]
        values = dict(scalars_of(steps))
        before, self._noise = self._noise, self._noise.with_step(steps[0])
        if self._noise is not before and self._noise.samples is not None:
            values["noise_scale"] = self._noise.samples
        return Scalars(step=number, time=steps[0].time, values=values)


def scalars_of(steps: Sequence[StepMetrics]) -> Iterator[tuple[str, float]]:
    """Names and values of one step, from the ranks that recorded it; what is global comes from the first of them."""
    first = steps[0]
    # Of long ago several steps are one row.
    seconds = step_seconds(first) / first.num_steps
    yield "loss", first.loss
    yield "lr", first.lr
    yield "epoch", first.epoch
    if first.grad_norm is not None:
        yield "grad_norm", first.grad_norm
    if first.grad_signal is not None and first.grad_variance is not None:
        yield "grad_signal", first.grad_signal
        yield "grad_variance", first.grad_variance
    if seconds > 0:
        yield "samples_per_second", first.global_samples / first.num_steps / seconds
        yield "step_seconds", seconds
    total = sum(map(step_seconds, steps))
    if total > 0:
        for part in PARTS:
            yield part, sum(float(getattr(step, part)) for step in steps) / total
