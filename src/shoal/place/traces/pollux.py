"""Pollux's workloads (OSDI'21): jobs of measured applications, in the authors' setting, as the simulator's `Work`.

60 s rounds, 16 nodes with 4 T4 each, and 30 s for every start and change. What a policy sees of a job is what a real
one would have measured of it by then: the model that was fitted to its own steps, its gradient's noise, what it got.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from shoal.place.batching import Batching, Grid, LearnedRate, choose, grid_of
from shoal.place.cluster import Allocation, Ask, Node, Queued, Rate
from shoal.place.gaussian import Floats, Gaussian
from shoal.place.lengths import Lengths
from shoal.place.throughput import Observation, Throughput, fit
from shoal.place.traces.profiles import Application, read_application
from shoal.place.traces.table import read_rows

RESTART_SECONDS = 30.0
MAX_WORKERS = 64
KIND = "t4"
FIXED_BATCH = {"ncf": 32768}
"""Applications that the authors run with one batch, on one GPU."""

REFIT_ERROR = 0.03
"""A step whose time the fit tells this well teaches nothing new."""

SEED_SPREAD = 0.3
"""How far jobs of one application may be from each other, as a logarithm, where one's fit begins with another's."""

NODES = tuple(Node(name=f"node-{number:02}", kind=KIND, cores=64, gpus=4) for number in range(16))


@dataclass(slots=True)
class Past:
    """What jobs of the same run have taught, by application: how long they are, how they step, and how noisy their
    gradients are at first. `tells_lengths`: policies see what was learned of lengths, too."""

    tells_lengths: bool = True
    lengths: Lengths = field(default_factory=Lengths)
    beliefs: dict[str, Gaussian] = field(default_factory=dict)
    noise: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SingleRate:
    """A learned rate; on one worker, as the authors' agents train: a larger batch than the first is accumulated."""

    rate: LearnedRate
    single: float

    def __call__(self, kind: str, workers: int, nodes: int) -> float:
        return self.single if workers == 1 else self.rate(kind, workers, nodes)


@dataclass(slots=True)
class PolluxWork:
    """One job. With `batch` it trains with that and does not change its size; without, both are chosen by goodput.

    `knows_length`: policies see how much is left, in epochs. `past`: they see what earlier jobs have taught of it.
    """

    name: str
    application: Application
    submitted_at: float
    batch: int | None = None
    workers: int | None = None
    knows_length: bool = False
    past: Past | None = None
    first_workers: int = 4
    placement: tuple[int, ...] = ()
    micro_batch: int = 0
    accumulation: int = 0
    pause: float = 0.0
    progress: float = 0.0
    epoch: int = 0
    noise: float = 0.0
    observations: dict[tuple[int, int, int], Observation] = field(default_factory=dict)
    throughput: Throughput | None = None
    _prior: Gaussian | None = None
    _rate: Rate | None = None
    _learned: LearnedRate | None = None
    _chosen: dict[tuple[int, int], tuple[int, int, float]] = field(default_factory=dict)
    _grids: dict[tuple[int, int], Grid] = field(default_factory=dict)
    _alone: tuple[Floats, Floats, Floats] | None = None
    _base: Queued | None = None

    @property
    def _is_fixed(self) -> bool:
        return self.workers is not None or self.application.name in FIXED_BATCH

    @property
    def most_workers(self) -> int:
        """At first a node's worth; then at most twice what was tried: a fit is not trusted far from what it saw.
        Any size where its fit began with those of other jobs of its application."""
        app = self.application
        largest = min(MAX_WORKERS, app.largest_batch // app.smallest_micro)
        if self._prior is not None:
            return largest
        tried = max((o.workers for o in self.observations.values()), default=0)
        return min(max(2 * tried, self.first_workers), largest)

    def seen(self) -> Queued:
        if self._base is None:
            self._base = Queued(
                id=self.name,
                ask=Ask(cores=0.0, gpus=1.0),
                min_workers=self.workers or 1,
                max_workers=self.workers or 1,
                submitted_at=self.submitted_at,
                stop_seconds=RESTART_SECONDS,
                is_elastic=not self._is_fixed,
            )
        if not self.observations and not self._is_fixed:
            self._recall()
        left = self._left()
        if self._is_fixed:
            speed = self._fixed_speed()
            return self._base if left is None or not speed else self._base.having(remaining_seconds=left / speed)
        most, rate = self.most_workers, self.rate()
        if left is not None and rate is not None:
            left *= self.application.initial_batch / rate(KIND, most, -(-most // 4))
        return self._base.having(max_workers=most, rate=rate, remaining_seconds=left if rate is not None else None)

    def _recall(self) -> None:
        """Before its first step it is thought to be as others of its application were."""
        name = self.application.name
        if self.past is None or name not in self.past.beliefs:
            return
        self.noise = self.past.noise.get(name, float(self.application.initial_batch))
        self._refit()

    def _left(self) -> float | None:
        """How much progress is left, as far as that can be known."""
        if self.knows_length:
            return self.application.total_progress - self.progress
        if self.past is not None and self.past.tells_lengths:
            return self.past.lengths.expect((self.application.name,), self.progress)
        return None

    def _fixed_speed(self) -> float:
        if not self.observations:
            return 0.0
        last = next(reversed(self.observations.values()))
        return 1.0 / last.step_seconds

    def rate(self) -> Rate | None:
        if self._rate is None and self.throughput is not None and self.noise > 0:
            if self._learned is None:
                self._learned = LearnedRate(
                    throughput=self.throughput, batching=self._batching(), most_workers=self.most_workers
                )
            learned = self._learned = self._learned.with_noise(self.noise).ready(KIND)
            single = self.application.initial_batch / self._choose(1, 1)[2]
            self._rate = SingleRate(learned, single)
        return self._rate

    def _batching(self) -> Batching:
        app = self.application
        return Batching(
            initial=app.initial_batch,
            largest=app.largest_batch,
            largest_micro=app.largest_micro,
            smallest_micro=app.smallest_micro,
            noise=self.noise,
        )

    def place(self, allocation: Allocation, nodes: Mapping[str, Node]) -> None:
        self.placement = tuple(workers for workers in allocation.values() if workers)
        if self.placement:
            self.pause = RESTART_SECONDS
            self._choose_batch()

    def _choose_batch(self) -> None:
        app, nodes, workers = self.application, len(self.placement), sum(self.placement)
        batch = self.batch if self.batch is not None else FIXED_BATCH.get(app.name)
        if batch is None and (self.throughput is None or self.noise <= 0):
            batch = max(app.initial_batch, app.smallest_micro * workers)
        if batch is None:
            self.micro_batch, self.accumulation, _ = self._choose(nodes, workers)
        else:
            each = math.ceil(batch / workers - 1e-8)
            self.accumulation = math.ceil(each / app.largest_micro - 1e-8) - 1
            if workers == 1 and batch > app.initial_batch:
                self.accumulation = max(1, self.accumulation)
            self.micro_batch = math.ceil(each / (self.accumulation + 1) - 1e-8)
        self.micro_batch = min(self.micro_batch, int(app.largest_batch / (workers * (self.accumulation + 1))))

    def _choose(self, nodes: int, workers: int) -> tuple[int, int, float]:
        """Micro batch, accumulation and seconds for the progress of one initial batch, by the fit."""
        found = self._chosen.get((nodes, workers))
        if found is None:
            found = self._chosen[nodes, workers] = self._search(nodes, workers)
        return found

    def _search(self, nodes: int, workers: int) -> tuple[int, int, float]:
        assert self.throughput is not None
        app, batching = self.application, self._batching()
        if workers > 1:
            grid = self._grids.get((nodes, workers))
            if grid is None:
                grid = self._grids[nodes, workers] = grid_of(self.throughput, batching, nodes, workers, kind=KIND)
            best = choose(grid, batching)
            micro, again = math.ceil(float(best.micro_batch) - 1e-8), int(best.accumulation)
            return max(micro, app.smallest_micro), again, app.initial_batch / max(float(best.goodput), 1e-12)
        micros, agains, samples = self._alone = self._alone or self._batches_alone(self.throughput)
        batches = micros * (agains + 1)
        goodput = samples * (self.noise + app.initial_batch) / (self.noise + batches)
        at = int(np.argmax(goodput))
        return int(micros[at]), int(agains[at]), app.initial_batch / float(goodput[at])

    def _batches_alone(self, throughput: Throughput) -> tuple[Floats, Floats, Floats]:
        """What one worker may take: micro batches, accumulations, and samples a second with them.

        It cannot tell the noise of a larger batch from one micro batch: it takes at least two.
        """
        app = self.application
        repeats = np.arange(1, max(math.ceil(app.largest_batch / app.largest_micro), 2))
        sizes = np.ceil(np.geomspace(max(app.smallest_micro, app.initial_batch / 2), app.largest_micro, 8))
        micros, agains = (grid.ravel() for grid in np.meshgrid(sizes, repeats))
        micros = np.append(micros, min(app.initial_batch, app.largest_micro))
        agains = np.append(agains, math.ceil(app.initial_batch / app.largest_micro) - 1)
        batches = micros * (agains + 1)
        samples = batches / throughput.seconds(1, 1, micros, agains, kind=KIND)
        samples[(batches > app.largest_batch) | (batches < app.initial_batch)] = 0.0
        return np.asarray(micros, np.float64), np.asarray(agains, np.float64), np.asarray(samples, np.float64)

    def work(self, seconds: float) -> float | None:
        app, whole = self.application, seconds
        waited = min(self.pause, seconds)
        self.pause -= waited
        seconds -= waited
        workers = sum(self.placement)
        while seconds > 0:
            batch = workers * self.micro_batch * (self.accumulation + 1)
            step, sync = app.step_seconds(self.placement, self.micro_batch)
            sqr, var = app.gradient(batch, self.epoch)
            gain = (var + sqr) / (var / (batch / app.initial_batch) + sqr)
            self._learn(step, sync, app.initial_batch * var / sqr)
            speed = gain / (step + (step - sync) * self.accumulation)
            end = float(app.ends[self.epoch])
            if self.progress + speed * seconds < end:
                self.progress += speed * seconds
                seconds = 0.0
            else:
                # Whole seconds, as the authors count them.
                spent = round((end - self.progress) / speed)
                self.epoch, self.progress = self.epoch + 1, end
                seconds -= spent
                if self.epoch >= app.num_epochs:
                    self._teach()
                    return whole - seconds
            self._choose_batch()
        return None

    def _learn(self, step: float, sync: float, noise: float) -> None:
        if noise != self.noise:
            self.noise, self._rate, self._chosen = noise, None, {}
        key = len(self.placement), sum(self.placement), self.micro_batch
        if self.past is not None:
            self.past.noise.setdefault(self.application.name, noise)
        if key in self.observations:
            return
        nodes, workers, micro = key
        self.observations[key] = Observation(
            nodes=nodes, workers=workers, micro_batch=micro, step_seconds=step, sync_seconds=sync, kind=KIND
        )
        if self._is_fixed:
            return
        is_new = not any(other[:2] == key[:2] for other in self.observations if other != key)
        if self.throughput is not None and not is_new:
            told = float(self.throughput.seconds(nodes, workers, micro, kind=KIND))
            if abs(math.log(told / step)) < REFIT_ERROR:
                return
        self._refit()

    def _refit(self) -> None:
        if self.past is not None and len(self.observations) <= 1:
            self._prior = self.past.beliefs.get(self.application.name)
        self.throughput = fit(list(self.observations.values()), self._prior, kinds=(KIND,))
        self._forget()
        if self.past is not None and self.observations:
            belief = self.throughput.belief
            spread = np.eye(len(belief.mean)) * SEED_SPREAD**2
            self.past.beliefs[self.application.name] = replace(belief, covariance=belief.covariance + spread)

    def _forget(self) -> None:
        """What was worked out with the fit before."""
        self._rate, self._learned, self._alone = None, None, None
        self._chosen, self._grids = {}, {}

    def _teach(self) -> None:
        if self.past is None:
            return
        name = self.application.name
        self.past.lengths = self.past.lengths.learned((name,), self.progress)


def read_pollux(
    workload: Path,
    profiles: Path,
    *,
    is_rigid: bool = False,
    knows_length: bool = False,
    past: Past | None = None,
    first_workers: int = 4,
) -> list[PolluxWork]:
    """The jobs of one workload file. `is_rigid`: with the workers and batch sizes that it names for each."""
    applications: dict[str, Application] = {}
    jobs = []
    for row in read_rows(workload, ("name", "time", "application", "num_replicas", "batch_size")):
        name = row.text("application")
        if name not in applications:
            applications[name] = read_application(profiles / name)
        jobs.append(
            PolluxWork(
                row.text("name"),
                applications[name],
                row.number("time"),
                row.whole("batch_size", least=1) if is_rigid else None,
                row.whole("num_replicas", least=1) if is_rigid else None,
                knows_length,
                past,
                first_workers,
            )
        )
    return jobs
