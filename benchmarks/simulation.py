"""How long it takes to simulate 100,000 jobs on 10,000 nodes of 8 GPUs, and how much memory.

The jobs come within five hours, run for 1.5 hours on average with a long tail, and ask for 1 to 16 workers; two in
ten are elastic. That is about as much as the cluster can do: decisions are about tens of thousands of running jobs.
"""

import random
import resource
import time
from typing import Any

from benchmarks import harness
from shoal.place.cluster import Ask, Node, Queued
from shoal.place.policies import POLICIES
from shoal.place.report import summarize
from shoal.place.simulate import Setting, simulate
from shoal.place.traces.plain import PlainWork

NODES, JOBS, HOURS, ROUND_SECONDS = 10_000, 100_000, 5.0, 300.0
NAMES = ("fifo", "las", "srtf")


def work(num_jobs: int) -> list[PlainWork]:
    dice, jobs = random.Random(7), []
    for number in range(num_jobs):
        workers = dice.choices((1, 2, 4, 8, 16), (50, 20, 15, 10, 5))[0]
        is_elastic = dice.random() < 0.2
        queued = Queued(
            id=f"job-{number}",
            ask=Ask(cores=4.0, gpus=1.0),
            min_workers=max(workers // 2, 1) if is_elastic else workers,
            max_workers=2 * workers if is_elastic else workers,
            owner=f"user-{dice.randrange(200)}",
            submitted_at=number * HOURS * 3600.0 / num_jobs,
            is_elastic=is_elastic,
        )
        jobs.append(PlainWork(queued, max(dice.lognormvariate(8.2, 1.2), 30.0), workers))
    return jobs


def main(rounds: int, is_quick: bool = False) -> dict[str, Any]:
    """Each policy once: the result is the same every time, and it takes minutes."""
    num_nodes, num_jobs = (100, 1000) if is_quick else (NODES, JOBS)
    nodes = tuple(Node(name=f"node-{at}", kind="a100", cores=64.0, gpus=8) for at in range(num_nodes))
    rows = []
    for name in NAMES[:1] if is_quick else NAMES:
        began, spent = time.monotonic(), time.process_time()
        result = simulate(
            work(num_jobs),
            POLICIES[name],
            Setting(nodes=nodes, round_seconds=ROUND_SECONDS),
            clock=time.perf_counter,
        )
        told = summarize(result)
        rows.append(
            {
                "policy": name,
                "jobs ended": told["num_ended"],
                "minutes": (time.monotonic() - began) / 60,
                "of processor": (time.process_time() - spent) / 60,
                "most running": max(moment.num_running for moment in result.moments),
                "decisions": told["num_decisions"],
                "s of decisions, p50": told["decision_p50_seconds"],
                "p95": told["decision_p95_seconds"],
                "MB at most": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000,
                "in use": told["utilisation"],
            }
        )
        harness.say(f"{name}: {rows[-1]['minutes']:.1f} minutes")
    return {"rows": rows, "notes": [f"{num_jobs} jobs, {num_nodes} nodes of 8 GPUs, rounds of {ROUND_SECONDS:g} s"]}
