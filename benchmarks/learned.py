"""What it costs that throughput must be learned: average completion time against an oracle, on Pollux's workloads.

Three times the goodput policy, in the same simulator, with jobs whose lengths nobody knows. The oracle knows the
measured step time of every size, and the noise of gradients, from the start. The others know what they have seen:
their own steps only, at most twice the workers that were tried; or besides a prior that was learned from profiles of
the five other applications, and what jobs that ended before have taught.
"""

import math
import statistics
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.scheduler import DATA, WORKLOADS, facts, run
from benchmarks.throughput_model import INITIAL, read, traits_of
from benchmarks.throughput_model import past as past_job
from shoal.place.batching import best_batch
from shoal.place.cluster import Rate
from shoal.place.gaussian import Floats, Gaussian
from shoal.place.policies import POLICIES
from shoal.place.prior import learn
from shoal.place.traces.pollux import KIND, MAX_WORKERS, Past, PolluxWork, read_pollux
from shoal.place.traces.profiles import Application

GPUS = 4
NUM_MICRO = 24


@dataclass(eq=False)
class Measured:
    """`Throughput.seconds` of an application as it was measured, on whole nodes and one that is not."""

    application: Application
    known_to: dict[tuple[int, int], tuple[Floats, Floats, Floats]] = field(default_factory=dict)

    def seconds(self, nodes: Any, workers: Any, micro: Any, accumulation: Any = 0, **_: Any) -> Floats:
        arrays = np.broadcast_arrays(*(np.asarray(each, float) for each in (nodes, workers, micro, accumulation)))
        out = np.empty(arrays[0].shape)
        flat = [array.ravel() for array in arrays]
        for size in {(int(n), int(w)) for n, w in zip(flat[0], flat[1], strict=True)}:
            at = (flat[0] == size[0]) & (flat[1] == size[1])
            micros, steps, syncs = self._known(*size)
            step, sync = (np.interp(flat[2][at], micros, times) for times in (steps, syncs))
            out.ravel()[at] = step + flat[3][at] * (step - sync)
        return out

    def _known(self, nodes: int, workers: int) -> tuple[Floats, Floats, Floats]:
        found = self.known_to.get((nodes, workers))
        if found is None:
            app = self.application
            whole, left = divmod(workers, nodes)
            placement = (whole + 1,) * left + (whole,) * (nodes - left)
            if workers > (nodes - 1) * GPUS:
                placement = (GPUS,) * (nodes - 1) + (workers - (nodes - 1) * GPUS,)
            largest = max(min(app.largest_micro, app.largest_batch // workers), app.smallest_micro)
            micros = np.unique(np.geomspace(app.smallest_micro, largest, NUM_MICRO).round())
            times = np.array([app.step_seconds(placement, int(micro)) for micro in micros])
            found = self.known_to[nodes, workers] = (micros, times[:, 0], times[:, 1])
        return found


@cache
def measured(application: Application) -> Measured:
    return Measured(application)


@dataclass(slots=True)
class Knowing:
    """A rate out of measurements, worked out when it is asked for."""

    work: "Oracle"
    found: dict[tuple[int, int], float] = field(default_factory=dict)

    def __call__(self, kind: str, workers: int, nodes: int) -> float:
        value = self.found.get((workers, nodes))
        if value is None:
            value = self.work.goodput(workers, nodes)
            self.found[workers, nodes] = value
        return value


@dataclass(slots=True)
class Oracle(PolluxWork):
    """A job of which all step times are known from the start."""

    def __post_init__(self) -> None:
        if not self._is_fixed:
            sqr, var = self.application.gradient(self.application.initial_batch, 0)
            self.noise = self.application.initial_batch * var / sqr
            self.throughput = measured(self.application)  # type: ignore[assignment]

    @property
    def most_workers(self) -> int:
        return min(MAX_WORKERS, self.application.largest_batch // self.application.smallest_micro)

    def rate(self) -> Rate | None:
        if self._rate is None and not self._is_fixed:
            self._rate = Knowing(self)
        return self._rate

    def goodput(self, workers: int, nodes: int) -> float:
        if workers == 1:
            return self.application.initial_batch / self._choose(1, 1)[2]
        return float(best_batch(self.throughput, self._batching(), nodes, workers, kind=KIND).goodput)

    def _refit(self) -> None:
        pass


@cache
def priors() -> dict[str, Gaussian]:
    """By application, from the five others."""
    profiles = {app: read(app) for app in INITIAL}
    history = {app: past_job(seen) for app, seen in profiles.items()}
    found = {}
    for app, seen in profiles.items():
        prior = learn([job for other, job in history.items() if other != app])
        found[app] = prior.expect(traits_of(seen))
    return found


def jobs_of(workload: Path, what: str) -> list[PolluxWork]:
    jobs = read_pollux(workload, DATA / "profiles")
    if what == "own steps":
        return jobs
    if what == "oracle":
        return [Oracle(job.name, job.application, job.submitted_at) for job in jobs]
    # Any size from the start, as the prior thinks best.
    past = Past(tells_lengths=False, beliefs=dict(priors()))
    return [PolluxWork(job.name, job.application, job.submitted_at, past=past) for job in jobs]


KNOW = ("oracle", "own steps", "own steps, prior and past jobs")


def predictions(jobs: list[PolluxWork]) -> list[float]:
    """How far the fits of jobs that have ended are from sizes they never had, as logarithms: median of each job."""
    found = []
    for job in jobs:
        if job.throughput is None or isinstance(job, Oracle):
            continue
        seen = {(key[0], key[1]) for key in job.observations}
        sizes = [(1, 1), (1, 2), (1, 4), (2, 8), (3, 12), (4, 16), (8, 32)]
        app, off = job.application, []
        for nodes, workers in sizes:
            if (nodes, workers) not in seen:
                micro = min(app.largest_micro, app.largest_batch // workers)
                true = app.step_seconds((workers // nodes,) * nodes, micro)[0]
                off.append(abs(float(job.throughput.seconds(nodes, workers, micro, kind=KIND)) / true - 1))
        if off:
            found.append(statistics.median(off))
    return [each for each in found if math.isfinite(each)]


def main(rounds: int, is_quick: bool) -> dict[str, Any]:
    """Everything; deterministic, so `rounds` change nothing."""
    if not DATA.is_dir():
        return {"rows": [], "notes": ["skipped: Pollux's workloads are not beside the repository"]}
    rows = []
    for name in WORKLOADS[2:3] if is_quick else WORKLOADS:
        averages = {}
        for what in KNOW:
            jobs = jobs_of(DATA / "workloads" / f"{name}.csv", what)
            average, p99, makespan = facts(run(jobs, POLICIES["goodput"]))
            averages[what] = average
            errors = predictions(jobs)
            rows.append(
                {
                    "workload": name,
                    "knows": what,
                    "average s": round(average, 1),
                    "p99 s": round(p99, 1),
                    "makespan s": round(makespan, 1),
                    "average / oracle": average / averages["oracle"],
                    "error on unseen sizes": statistics.median(errors) if errors else None,
                }
            )
            harness.say(f"{name}, {what}: {average:.0f} s, {average / averages['oracle']:.3f} of the oracle's")
    checks = []
    for what in KNOW[1:]:
        ratios = [row["average / oracle"] for row in rows if row["knows"] == what]
        measured_ratio = harness.summarize(ratios) | {"median": statistics.fmean(ratios)}
        checks.append(harness.check(f"average JCT / oracle's, {what}", measured_ratio, "≤ 1.05"))
    notes = ["the goal is for the mean over workloads; beside it their quartiles"]
    return {"rows": rows, "checks": checks, "notes": notes}
