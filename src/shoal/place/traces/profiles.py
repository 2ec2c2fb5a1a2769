"""Applications as Pollux's authors measured them (OSDI'21): step times by placement, and training runs by batch size.

A folder for each application: `placements.csv`, `scalability.csv` and a `validation-B.csv` for every batch size B.
Between measurements everything is interpolated as their simulator does, so that the same jobs take the same time.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from shoal.place.gaussian import Floats
from shoal.place.traces.table import read_rows
from shoal.spec.errors import UserError

NUM_EPOCHS = {"bert": 2, "cifar10": 100, "ncf": 10, "imagenet": 90, "deepspeech2": 80, "yolov3": 50}
"""After how many epochs the authors' jobs end; applications that are not named take all that were measured."""

LARGEST_MICRO = {"yolov3": 8}
"""What a T4's memory holds, where that is less than what was measured."""

MAX_NODES = 16


@dataclass(frozen=True, slots=True)
class Epochs:
    """One training run: after each epoch, progress and iterations so far; in each, the gradient's noise."""

    progress: Floats
    iteration: Floats
    grad_sqr: Floats
    grad_var: Floats


@dataclass(eq=False)
class Application:
    """One application. Batches are in samples; `smallest_micro` and `largest_micro` are those of one worker at once.

    Progress is counted in iterations of the initial batch, whatever batch they were made with.
    """

    name: str
    runs: Mapping[int, Epochs]
    placements: Mapping[str, tuple[Floats, Floats]]
    points: Floats
    times: Floats
    smallest_micro: int
    largest_micro: int
    num_epochs: int
    _steps: dict[tuple[tuple[int, ...], int], tuple[float, float]] = field(default_factory=dict)
    _noise: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    _between: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        self.batches = sorted(self.runs)
        shortest = min(len(run.progress) for run in self.runs.values())
        self.ends = np.min([run.progress[:shortest] for run in self.runs.values()], axis=0)

    @property
    def initial_batch(self) -> int:
        return self.batches[0]

    @property
    def largest_batch(self) -> int:
        return self.batches[-1]

    @property
    def total_progress(self) -> float:
        return float(self.ends[self.num_epochs - 1])

    def gradient(self, batch: int, epoch: int) -> tuple[float, float]:
        """Square of the gradient's norm and its variance at that batch in that epoch, from 0."""
        found = self._noise.get((batch, epoch))
        if found is None:
            found = self._noise[batch, epoch] = (
                self._at(batch, [run.grad_sqr[epoch] for run in self._near(batch)]),
                self._at(batch, [run.grad_var[epoch] for run in self._near(batch)]),
            )
        return found

    def iterations(self, batch: int, epoch: int) -> float:
        """How many a run at that batch has taken after that epoch, from 0."""
        return self._at(batch, [run.iteration[epoch] for run in self._near(batch)])

    def _bounds(self, batch: int) -> tuple[int, int]:
        low, high = bisect_right(self.batches, batch) - 1, bisect_left(self.batches, batch)
        if low < 0 or high >= len(self.batches):
            known = f"{self.batches[0]} to {self.batches[-1]}"
            raise UserError(f"{self.name} was not measured with a batch of {batch}.", hint=f"it was with {known}")
        return self.batches[low], self.batches[high]

    def _near(self, batch: int) -> list[Epochs]:
        return [self.runs[bound] for bound in self._bounds(batch)]

    def _at(self, batch: int, pair: list[Any]) -> float:
        low, high = self._bounds(batch)
        if low == high:
            return float(pair[0])
        return float(((batch - low) * pair[1] + (high - batch) * pair[0]) / (high - low))

    def step_seconds(self, placement: tuple[int, ...], micro_batch: int) -> tuple[float, float]:
        """Seconds of a step, and of them for agreeing, with so many workers on each node. Rotations are the same."""
        found = self._steps.get((placement, micro_batch))
        if found is None:
            found = self._steps[placement, micro_batch] = self._measure(placement, micro_batch)
        return found

    def _measure(self, placement: tuple[int, ...], micro_batch: int) -> tuple[float, float]:
        first = min(placement[i:] + placement[:i] for i in range(len(placement)))
        measured = self.placements.get("".join(map(str, first)))
        if measured is not None and measured[0][0] <= micro_batch <= measured[0][-1]:
            batches, times = measured
            step, sync = (float(np.interp(micro_batch, batches, times[:, i])) for i in (0, 1))
        else:
            if self._between is None:
                self._between = _interpolator(self.points, self.times)
            asked = [min(len(first), MAX_NODES), sum(first), micro_batch]
            step, sync = map(float, self._between(asked)[0])
        if step != step:
            where = f"{len(first)} nodes, {sum(first)} workers, {micro_batch} samples each"
            raise UserError(f"{self.name} was not measured on {where}.", hint="use a smaller cluster")
        return step, sync


def _interpolator(points: Floats, times: Floats) -> Callable[[Any], Any]:
    try:
        scipy_interpolate: Any = import_module("scipy.interpolate")
    except ImportError:
        raise UserError(
            "scipy is not installed, and Pollux's profiles need it.", hint="`pip install scipy`"
        ) from None
    found: Callable[[Any], Any] = scipy_interpolate.LinearNDInterpolator(points, times)
    return found


@cache
def read_application(folder: Path) -> Application:
    """The profiles of one application; read once, as what is between measured sizes takes seconds to prepare."""
    if not folder.is_dir():
        raise UserError(f"There are no profiles of {folder.name!r}.", why=f"{folder} is not a folder")
    runs = {}
    for path in sorted(folder.glob("validation-*.csv")):
        names = ("progress", "iteration", "grad_sqr", "grad_var")
        rows = read_rows(path, names)
        columns = [np.array([row.number(name, least=-np.inf) for row in rows]) for name in names]
        runs[int(path.stem.split("-")[1])] = Epochs(*columns)
    if not runs:
        raise UserError(f"{folder} has no validation-B.csv.", hint="one for each batch size B is needed")
    placements, points, times = _read_times(folder)
    every = [batch for batches, _ in placements.values() for batch in batches.tolist()]
    shortest = min(len(run.progress) for run in runs.values())
    return Application(
        name=folder.name,
        runs=runs,
        placements=placements,
        points=points,
        times=times,
        smallest_micro=int(min(every)),
        largest_micro=int(LARGEST_MICRO.get(folder.name, max(every))),
        num_epochs=min(NUM_EPOCHS.get(folder.name, shortest), shortest),
    )


def _read_times(folder: Path) -> tuple[dict[str, tuple[Floats, Floats]], Floats, Floats]:
    """Step times by placement; and of all placements, means by (nodes, workers, micro batch), with larger ones."""
    by_placement: dict[str, list[tuple[float, float, float]]] = {}
    groups: dict[tuple[float, float, float], list[tuple[float, float]]] = {}
    for row in read_rows(folder / "placements.csv", ("placement", "local_bsz", "step_time", "sync_time")):
        name, micro = str(row.whole("placement", least=1)), row.number("local_bsz", above=0)
        step, sync = row.number("step_time", above=0), row.number("sync_time")
        by_placement.setdefault(name, []).append((micro, step, sync))
        groups.setdefault((len(name), sum(map(int, name)), micro), []).append((step, sync))
    points = [list(map(float, key)) for key in sorted(groups)]
    times = [np.mean(groups[key], axis=0).tolist() for key in sorted(groups)]
    larger = read_rows(
        folder / "scalability.csv", ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time")
    )
    for row in larger:
        points.append([row.number(name) for name in ("num_nodes", "num_replicas", "local_bsz")])
        times.append([row.number(name) for name in ("step_time", "sync_time")])
    placements = {}
    for name, rows in by_placement.items():
        table = np.array(sorted(rows))
        placements[name] = table[:, 0], table[:, 1:]
    return placements, np.array(points), np.array(times)
