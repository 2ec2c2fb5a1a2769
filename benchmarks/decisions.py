"""How long a decision takes, placement included: every policy, small busy clusters and 10,000 nodes and jobs.

Jobs ask for all sorts of things, on nodes of two kinds, and three in ten are elastic, with models of their speed
fitted to observations, as the service has them. There is also the plain case: nodes of one kind, whole
GPUs, and nothing known of speeds.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.harness import check, say, summarize
from shoal.place.batching import Batching, LearnedRate
from shoal.place.cluster import CLASSES, Ask, Cluster, Node, Queued
from shoal.place.decision import Place
from shoal.place.policies import POLICIES, Policy
from shoal.place.throughput import Observation, fit

GIB = 2**30
NEEDS = tuple(
    Ask(cores=cores, memory_bytes=memory * GIB, gpus=gpus)
    for cores, memory, gpus in (
        (4, 16, 0.25), (6, 24, 0.5), (3, 16, 0.8), (4, 16, 1), (8, 32, 1), (12, 48, 1), (16, 64, 2), (32, 128, 4),
        (80, 320, 8), (8, 32, 0), (16, 64, 0), (2, 8, 0),
    )
)  # fmt: skip
SIZES = {
    "64 GPUs, 160 jobs, plain": (16, 4, 160, 200),
    "64 GPUs, 160 jobs": (16, 4, 160, 200),
    "10,000 nodes, 10,000 jobs, plain": (10_000, 8, 10_000, 12),
    "10,000 nodes, 10,000 jobs": (10_000, 8, 10_000, 12),
}
"""Nodes, GPUs on each, jobs, and how many decisions are timed."""


NUM_MODELS = 50


def models(dice: random.Random) -> list[LearnedRate]:
    """Models of jobs that were seen on 1, 2, 4 and 16 workers: from those that scale well to those that hardly do."""
    found = []
    for _ in range(NUM_MODELS):
        work, talk = dice.uniform(0.05, 0.5), dice.uniform(0.001, 0.1)
        seen = [
            Observation(
                nodes=nodes, workers=workers, micro_batch=32.0, kind=kind,
                step_seconds=slow * work + (talk * workers**0.5 if workers > 1 else 0.0),
            )
            for kind, slow in (("a", 1.0), ("b", 1.7))
            for nodes, workers in ((1, 1), (1, 2), (1, 4), (4, 16))
        ]  # fmt: skip
        noise = dice.uniform(100.0, 5000.0)
        batching = Batching(initial=128.0, largest=4096.0, largest_micro=64.0, noise=noise)
        found.append(LearnedRate(throughput=fit(seen), batching=batching).ready("a").ready("b"))
    return found


def busy_cluster(
    num_nodes: int, gpus: int, num_jobs: int, policy: Policy, seed: int, is_plain: bool = False
) -> Cluster:
    """A cluster in which the first 70 % of the jobs have been placed, and the rest has just come."""
    dice = random.Random(seed)
    nodes = tuple(
        Node(name=f"n{at}", kind="ab"[at % 2], cores=12.0 * gpus, memory_bytes=48 * gpus * GIB, gpus=gpus)
        for at in range(num_nodes)
    )
    rates = models(dice)
    jobs = [_job(number, dice, rates) for number in range(num_jobs)]
    cluster = Cluster(now=10_000.0, nodes=nodes, jobs=tuple(jobs))
    cluster = plain(cluster) if is_plain else cluster
    early, late = cluster.jobs[: num_jobs * 7 // 10], cluster.jobs[num_jobs * 7 // 10 :]
    cluster = replace(cluster, jobs=early)
    return replace(cluster, jobs=_follow(cluster, policy) + late)


def plain(cluster: Cluster) -> Cluster:
    """The same nodes and jobs, but of one kind, with whole GPUs and without rates; nobody runs yet."""
    return replace(
        cluster,
        nodes=tuple(replace(node, kind="a") for node in cluster.nodes),
        jobs=tuple(
            replace(job, ask=Ask(cores=8, memory_bytes=32 * GIB, gpus=1.0), rate=None, allocation={}, devices={})
            for job in cluster.jobs
        ),
    )


def _job(number: int, dice: random.Random, rates: Sequence[LearnedRate]) -> Queued:
    fewest = dice.choice((1, 1, 1, 2, 4))
    is_elastic = dice.random() < 0.3
    return Queued(
        id=f"j{number}",
        ask=dice.choice(NEEDS),
        min_workers=fewest,
        max_workers=fewest * (dice.choice((2, 4, 8)) if is_elastic else 1),
        owner=f"u{dice.randrange(40)}",
        account=f"lab{dice.randrange(5)}/u{dice.randrange(40)}",
        job_class=dice.choice(CLASSES),
        submitted_at=float(number % 9000),
        remaining_seconds=dice.expovariate(1 / 3600),
        is_elastic=is_elastic,
        rate=dice.choice(rates) if is_elastic else None,
    )


def _follow(cluster: Cluster, policy: Policy) -> tuple[Queued, ...]:
    """The jobs after what the policy decides, as if they had run for a while since."""
    jobs = {job.id: job for job in cluster.jobs}
    for decision in policy(cluster):
        if isinstance(decision, Place):
            jobs[decision.job] = replace(
                jobs[decision.job],
                allocation=decision.allocation,
                devices=decision.devices,
                run_seconds=4000.0,
                service_seconds=4000.0 * sum(decision.allocation.values()),
            )
    return tuple(jobs.values())


def time_decisions(policy: Policy, clusters: Sequence[Cluster], count: int) -> tuple[list[float], list[float]]:
    """Milliseconds for each decision, and of processor time in them; the first warms up and is not counted."""
    samples, spent = [], []
    for number in range(count + 1):
        cluster = clusters[number % len(clusters)]
        began, used = time.perf_counter(), time.process_time()
        policy(cluster)
        samples.append((time.perf_counter() - began) * 1000)
        spent.append((time.process_time() - used) * 1000)
    return samples[1:], spent[1:]


def main(rounds: int, is_quick: bool = False) -> dict[str, Any]:
    rows, checks, samples = [], [], {}
    for size, (nodes, gpus, jobs, count) in SIZES.items():
        if is_quick and nodes > 1000:
            continue
        for name, policy in POLICIES.items():
            seeds = range(1 if nodes > 1000 else 4)
            is_plain = size.endswith("plain")
            clusters = [busy_cluster(nodes, gpus, jobs, policy, seed, is_plain) for seed in seeds]
            taken, spent = time_decisions(policy, clusters, 4 if is_quick else count)
            found = sorted(taken)
            samples[f"{size}, {name}"] = found
            late = found[min(len(found) * 95 // 100, len(found) - 1)]
            rows.append(
                {
                    "size": size,
                    "policy": name,
                    "ms": summarize(found),
                    "p95 ms": late,
                    "of processor": summarize(spent),
                }
            )
            say(f"{size}, {name}: median {found[len(found) // 2]:.1f} ms, p95 {late:.1f} ms")
            limits = (5, 20) if nodes < 1000 else (500, 500)
            checks.append(check(f"{size}, {name}: median ms", summarize(found), f"≤ {limits[0]}"))
            checks.append(check(f"{size}, {name}: p95 ms", {**summarize(found), "median": late}, f"≤ {limits[1]}"))
    notes = ["whole decisions: order, placement, reasons; where others use the machine, their turns are in the ms"]
    return {"rows": rows, "checks": checks, "notes": notes, "samples_ms": samples}
