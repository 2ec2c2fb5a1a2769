"""`-n auto`: measure the job itself, with one worker and with many, and use what is faster."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.engine.env import inherited_env
from shoal.engine.machine import available_cores
from shoal.spec.job import Job

PATIENCE_SECONDS = 120.0
"""How long one measurement may take, the start of the workers included."""

CLEARLY = 1.03
"""More workers cost memory: they must be faster by this factor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A way to use the cores, and the samples per second it reached; None where it could not be measured."""

    num_workers: int
    num_threads: int
    samples_per_second: float | None = None

    def __str__(self) -> str:
        workers = f"{self.num_workers} worker{'s' if self.num_workers > 1 else ''}"
        threads = f"{self.num_threads} thread{'s' if self.num_threads > 1 else ''}"
        return f"{workers} with {threads}" + (" each" if self.num_workers > 1 else "")


def candidates(num_cores: int) -> list[Candidate]:
    """Ways to use all cores, the fewest workers first."""
    counts = sorted({1, num_cores // 2, num_cores} - {0})
    return [Candidate(num_workers=count, num_threads=num_cores // count) for count in counts]


def pick(measured: Sequence[Candidate]) -> Candidate:
    """The fastest; of those that are nearly as fast, the one with the fewest workers."""
    best = max(each.samples_per_second or 0.0 for each in measured)
    return next(each for each in measured if (each.samples_per_second or 0.0) * CLEARLY >= best)


def choose(job: Job) -> tuple[Job, str]:
    """The job with its number of workers and threads decided, and why."""
    cores = available_cores()
    ways = candidates(cores)
    if len(ways) == 1:
        return replace(job, num_workers=1), "1 worker: there is one core"
    if not uses_trainer(job):
        return replace(
            job, num_workers=cores
        ), f"{cores} workers, one a core; not measured: no shoal.Trainer in sight"
    measured = [replace(way, samples_per_second=measure(job, way)) for way in ways]
    if not any(each.samples_per_second for each in measured):
        return replace(job, num_workers=cores), f"{cores} workers, one a core; the script made no step to measure"
    best = pick(measured)
    speeds = ", ".join(
        f"{each}: {each.samples_per_second:.0f} samples/s" for each in measured if each.samples_per_second
    )
    chosen = replace(job, num_workers=best.num_workers, threads_per_worker=best.num_threads)
    return chosen, f"{best}. Measured {speeds}"


def uses_trainer(job: Job) -> bool:
    """Whether the script speaks of shoal: only then can it be measured and stopped after a few steps."""
    if job.script is None:
        return True
    try:
        with open(os.path.join(job.working_dir, job.script), encoding="utf-8", errors="replace") as file:
            return "shoal" in file.read()
    except OSError:
        return False


def measure(job: Job, way: Candidate) -> float | None:
    """Samples per second of the first steps, from a run of its own that ends after them."""
    with tempfile.TemporaryDirectory(prefix="shoal-measure-") as folder:
        target = ("-m", job.module) if job.module is not None else (job.script or "",)
        options = [text for name, value in job.options.items() for text in ("-o", f"{name}={value}")]
        variables = [text for name, value in job.env.items() for text in ("--env", f"{name}={value}")]
        python = ["--python", job.python] if job.python else []
        size = ["-n", str(way.num_workers), "--threads", str(way.num_threads)]
        command = [sys.executable, "-m", "shoal", "run", "--quiet", "--log-dir", os.path.join(folder, "run")]
        try:
            subprocess.run(
                [*command, *size, *python, *options, *variables, *target, *job.args],
                cwd=job.working_dir,
                env={**inherited_env(), "SHOAL_MEASURE": "1", "SHOAL_HOME": folder},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=PATIENCE_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None
        return read_measured(os.path.join(folder, "run", "journal.jsonl"))


def read_measured(path: str) -> float | None:
    """What the workers wrote down."""
    try:
        with open(path, encoding="utf-8") as file:
            events = [json.loads(line) for line in file if '"measured"' in line]
    except (OSError, ValueError):
        return None
    return float(events[0]["data"]["samples_per_second"]) if events else None
