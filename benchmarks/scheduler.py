"""The goodput policy on Pollux's workloads, against the authors' published completion times, job by job.

Deterministic but for the time of decisions. The peers are run in the same simulator first: Tiresias and Optimus must
give the published time of every job, else the numbers beside them mean nothing.
"""

import csv
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.scheduler_peers import Optimus, Tiresias
from shoal.place.policies import POLICIES
from shoal.place.report import quantile
from shoal.place.simulate import Policy, Result, Setting, Simulation, simulate
from shoal.place.traces.generate import draw_workload, read_requests, write_workload
from shoal.place.traces.pollux import NODES, Past, PolluxWork, read_pollux

DATA = Path(__file__).parents[2] / "shared" / "data" / "sched" / "pollux-osdi21"
WORKLOADS = ("workload-1", "workload-2", "workload-3", "workload-6")
GOALS = {"none": "≤ 0.97", "learned": "≤ 0.92", "known": "≤ 0.85"}
NEARLY_ALL = 130
MEANS = {0.5: 0.426, 2.0: 1.469}
"""Pollux's published averages in hours over eight workloads with half and twice the jobs."""
SEEDS = (101,)


def published(policy: str) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    with open(DATA / "published-results" / "jcts.csv", newline="") as file:
        for row in csv.DictReader(file):
            if row["setting"] == "jobload-1.0" and row["policy"] == policy:
                found.setdefault(row["workload"], {})[row["job"]] = float(row["jct_s"])
    return found


def jobs_of(path: Path, know: str = "none", *, is_rigid: bool = False) -> list[PolluxWork]:
    past = None if is_rigid else Past(tells_lengths=know == "learned")
    return read_pollux(path, DATA / "profiles", is_rigid=is_rigid, knows_length=know == "known", past=past)


def run(work: Sequence[PolluxWork], policy: Policy) -> Result:
    return simulate(work, policy, Setting(nodes=NODES), clock=time.perf_counter)


def facts(result: Result) -> tuple[float, float, float]:
    """Average, p99 and makespan (from the beginning of the trace), seconds."""
    times = [outcome.jct_seconds or 0.0 for outcome in result.outcomes]
    return statistics.fmean(times), quantile(times, 0.99), max(outcome.ended_at or 0.0 for outcome in result.outcomes)


def reproduce(name: str) -> dict[str, Any]:
    """How many jobs of each peer take exactly as long as published."""
    row: dict[str, Any] = {"workload": name}
    for peer in ("tiresias", "optimus"):
        work = jobs_of(DATA / "workloads" / f"{name}.csv", is_rigid=True)
        policy = Tiresias() if peer == "tiresias" else Optimus({job.name: job for job in work})
        expected = published(peer)[name]
        result = run(work, policy)
        same = sum(outcome.jct_seconds == expected[outcome.job] for outcome in result.outcomes)
        row[f"{peer} average s"] = round(facts(result)[0], 2)
        row[f"{peer} jobs as published"] = f"{same} of {len(expected)}"
    return row


def compare(name: str, know: str, decisions: list[float]) -> dict[str, Any]:
    """One workload beside what Pollux's authors got."""
    expected = published("pollux")[name]
    submitted = {job.name: job.submitted_at for job in jobs_of(DATA / "workloads" / f"{name}.csv", is_rigid=True)}
    theirs = (
        statistics.fmean(expected.values()),
        quantile(list(expected.values()), 0.99),
        max(submitted[job] + seconds for job, seconds in expected.items()),
    )
    result = run(jobs_of(DATA / "workloads" / f"{name}.csv", know), POLICIES["goodput"])
    decisions += result.decision_seconds
    ours = facts(result)
    row: dict[str, Any] = {"workload": name, "lengths": know}
    for what, mine, other in zip(("average", "p99", "makespan"), ours, theirs, strict=True):
        row |= {f"{what} s": round(mine, 1), f"{what} / Pollux": mine / other}
    return row


def other_loads() -> list[dict[str, Any]]:
    """Drawn workloads with half and twice the jobs, beside the published means of Pollux's own."""
    rows = []
    requests = read_requests(sorted((DATA / "workloads").glob("*.csv")))
    with tempfile.TemporaryDirectory() as folder:
        for load, hours in MEANS.items():
            for know in GOALS:
                averages = []
                for seed in SEEDS:
                    path = Path(folder) / f"{load}-{seed}.csv"
                    drawn = draw_workload(DATA / "philly.csv", requests, seed=seed, num_jobs=int(160 * load))
                    write_workload(path, drawn)
                    averages.append(facts(run(jobs_of(path, know), POLICIES["goodput"]))[0] / 3600)
                    harness.say(f"load {load}, {know}, seed {seed}: {averages[-1]:.3f} h")
                rows.append(
                    {"load": load, "lengths": know, "average h": statistics.fmean(averages), "Pollux h": hours}
                )
    return rows


def crowded() -> list[float]:
    """Seconds of decisions on 64 GPUs while nearly all of 160 jobs, submitted at once, are still there."""
    work = jobs_of(DATA / "workloads" / "workload-6.csv")
    for job in work:
        job.submitted_at = 0.0
    simulation = Simulation(work, POLICIES["goodput"], Setting(nodes=NODES), clock=time.perf_counter)
    while not simulation.decision_seconds or len(simulation.live) >= NEARLY_ALL:
        simulation.step()
    return simulation.decision_seconds


def main(rounds: int, is_quick: bool) -> dict[str, Any]:
    """Everything. `rounds` repeats only what is timed: a simulation gives the same result each time."""
    names = WORKLOADS[2:3] if is_quick else WORKLOADS
    peers = [reproduce(name) for name in names]
    rows, decisions = [], []
    for know in GOALS:
        for name in names:
            rows.append(compare(name, know, decisions))
            harness.say(f"{name}, lengths {know}: {rows[-1]['average / Pollux']:.3f} of Pollux's average")
    checks = []
    for know, goal in GOALS.items():
        mine = [row for row in rows if row["lengths"] == know]
        for what, limit in (("average", goal), ("p99", "≤ 1.05"), ("makespan", "≤ 1.05")):
            ratios = [row[f"{what} / Pollux"] for row in mine]
            # The goal is the mean over workloads; the spread beside it is over workloads too.
            measured = harness.summarize(ratios) | {"median": statistics.fmean(ratios)}
            checks.append(harness.check(f"{what} / Pollux, lengths {know}", measured, limit))
    samples = [second for _ in range(1 if is_quick else rounds) for second in crowded()]
    timed = {"160 jobs at once": samples, "the workloads as they are": decisions}
    for part, limit in ((0.5, "≤ 5"), (0.95, "≤ 20")):
        spent = quantile(samples, part) * 1e3
        what = f"decision ms at 64 GPUs and 160 jobs, p{part * 100:.0f}"
        checks.append(harness.check(what, harness.summarize([spent]), limit))
    more = {
        "the peers in our simulator": peers,
        "decisions": [
            {"jobs": name, **{f"p{part * 100:.0f} ms": quantile(took, part) * 1e3 for part in (0.5, 0.95)}}
            for name, took in timed.items()
        ],
    }
    if not is_quick:
        more["other loads (drawn workloads; Pollux's mean is over its own eight)"] = other_loads()
    return {"rows": rows, "more": more, "checks": checks}
