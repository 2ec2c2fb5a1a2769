"""Mixed clusters and fairness: our policies on the traces of Gavel (OSDI '20) and Shockwave (NSDI '23).

Beside them the results their authors published, and their policies in this simulator, which says how faithful it is.
Traces of the same families with other seeds, on which nothing was published, say whether the result is luck.
Everything is counted in virtual time, so the numbers are the same on every machine; only what decisions cost is
measured.
"""

import itertools
import json
import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks import scheduler_hetero_peers as peers
from shoal.place.cluster import Ask, Node, Queued
from shoal.place.policies import POLICIES
from shoal.place.simulate import Policy, Result, Setting, Work, simulate
from shoal.place.traces import shockwave
from shoal.place.traces.gavel import (
    PairSpeeds,
    Speeds,
    StepsWork,
    Throughputs,
    read_gavel,
    read_tabbed,
    read_throughputs,
)
from shoal.place.traces.shockwave import EpochsWork, read_shockwave

DATA = Path(__file__).parents[2] / "shared" / "data" / "sched"
GAVEL, SHOCKWAVE = DATA / "gavel-osdi20", DATA / "shockwave-nsdi23"
MIXED = {"v100": 8, "p100": 16, "k80": 24}
HOUR = 3600.0
UNFAIR = 1.05
SHARED = ", two jobs may share a GPU"
KNOWS_NOTHING = ("fifo", "las", "fair")
LEAST_MAKESPAN = "least makespan with one job on a GPU, hours"
LEAST_IN_PAIRS = "least makespan with two jobs on a GPU, hours"
PUBLISHED = {
    "max_min_fairness": {"gavel aware": 3.82, "gavel blind": 5.20, "gavel fifo": 9.85},
    "minimize_makespan": {"gavel early end": 17.40},
    "shockwave": {
        "shockwave": {"makespan": 24197.4, "average": 9958.5, "worst": 1.784, "jain": 0.9075},
        "max_min_fairness": {"makespan": 33207.7, "average": 11274.1, "worst": 2.947, "jain": 0.8023},
        "min_total_duration": {"makespan": 24204.8, "average": 19806.7, "worst": 7.741, "jain": 0.6457},
        "max_sum_throughput": {"makespan": 31909.0, "average": 9654.7, "worst": 4.976, "jain": 0.5998},
    },
}


def nodes(gpus: dict[str, int], per_node: int = 4) -> tuple[Node, ...]:
    return tuple(
        Node(name=f"{kind}-{number}", kind=kind, gpus=per_node, cores=64.0)
        for kind, count in gpus.items()
        for number in range(count // per_node)
    )


def play(work: Iterable[Work], policy: Policy, gpus: dict[str, int], round_seconds: float) -> Result:
    """The whole trace, the first decision when the first job is there, as in both originals."""
    setting = Setting(nodes=nodes(gpus), round_seconds=round_seconds, since=-round_seconds)
    return simulate(work, policy, setting, clock=time.perf_counter)


def tell(result: Result) -> dict[str, float]:
    jcts = sorted(outcome.jct_seconds or math.inf for outcome in result.outcomes)
    return {
        "jobs": len(jcts),
        "average_hours": sum(jcts) / len(jcts) / HOUR,
        "p99_hours": jcts[math.ceil(0.99 * len(jcts)) - 1] / HOUR,
        "makespan_hours": max(outcome.ended_at or math.inf for outcome in result.outcomes) / HOUR,
        "stops": sum(outcome.num_stops for outcome in result.outcomes),
        "changes": sum(outcome.num_changes for outcome in result.outcomes),
        "decision_ms": 1e3 * sum(result.decision_seconds) / len(result.decision_seconds),
    }


def tell_fair(result: Result, work: Sequence[EpochsWork], num_gpus: int) -> dict[str, float]:
    """As Shockwave counts: rho is the time a job took by the time it would take alone on a part of the cluster."""
    crowd = max(len(work) / num_gpus, 1.0)
    alone = {job.queued.id: job.alone_seconds * crowd for job in work}
    rhos = [(outcome.jct_seconds or math.inf) / alone[outcome.job] for outcome in result.outcomes]
    told = tell(result)
    return {
        "makespan": told["makespan_hours"] * HOUR,
        "average": told["average_hours"] * HOUR,
        "worst": max(rhos),
        "jain": sum(rhos) ** 2 / len(rhos) / sum(rho * rho for rho in rhos),
        "unfair": sum(rho > UNFAIR for rho in rhos) / len(rhos),
        "stops": told["stops"],
        "changes": told["changes"],
        "decision_ms": told["decision_ms"],
    }


# -- traces of the same families ---------------------------------------------------------------------------------


def like_gavel(
    seed: int,
    table: Throughputs,
    *,
    num_jobs: int,
    every: float,
    hours: tuple[float, float],
    shares_gpus: bool = False,
) -> list[StepsWork]:
    """Types of the table drawn evenly, hours on a V100 evenly, 70 : 10 : 20 with 1, 2 and 4 workers."""
    draw = random.Random(seed)
    types = sorted({name for _, name, _ in table.steps})
    work: list[StepsWork] = []
    at = 0.0
    while len(work) < num_jobs:
        name, workers = draw.choice(types), draw.choices((1, 2, 4), (70, 10, 20))[0]
        speeds = table.speeds(name, workers)
        if speeds.get("v100", 0.0) <= 0:
            continue
        queued = Queued(
            id=f"job-{len(work)}",
            ask=Ask(cores=0.0, gpus=1.0),
            min_workers=workers,
            max_workers=workers,
            submitted_at=float(int(at)),
            rate=Speeds(speeds),
            pair_rate=PairSpeeds(table, name, workers) if shares_gpus else None,
        )
        work.append(StepsWork(queued, speeds, draw.uniform(*hours) * HOUR * speeds["v100"]))
        at += draw.expovariate(1 / every) if every else 0.0
    return work


def like_shockwave(
    seed: int, table: Throughputs, folder: Path, num_jobs: int = 120, every: float = 40.0
) -> list[EpochsWork]:
    """As its generator: 72 : 20 : 5 : 3 of four ranges between 0.2 and 5 hours, 60 : 30 : 9 : 1 with 1, 2, 4, 8."""
    draw = random.Random(seed)
    types = [
        f"{model} (batch size {size})"
        for model, sizes in {
            "ResNet-18": (32, 64, 128, 256),
            "ResNet-50": (16, 32, 64),
            "Transformer": (16, 32, 64, 128),
            "LM": (5, 10, 20, 40, 80),
            "Recommendation": (512, 1024, 2048, 4096, 8192),
        }.items()
        for size in sizes
    ]
    lines: list[str] = []
    at = 0.0
    while len(lines) < num_jobs:
        name = draw.choice(types)
        workers = 1 if name.startswith("Recommendation") else draw.choices((1, 2, 4, 8), (60, 30, 9, 1))[0]
        low, high = draw.choices(((0.2, 1.16), (1.16, 2.6), (2.6, 4.5), (4.5, 5.0)), (72, 20, 5, 3))[0]
        seconds, mode = draw.uniform(low, high) * HOUR, draw.choice(("accordion", "gns"))
        speed = table.steps.get((shockwave.KIND, name, workers))
        if not speed:
            continue
        mode = "static" if seconds < 1000 and mode == "accordion" else mode
        cells = (name, "", "", "", 1, max(int(seconds * speed), 1), workers, mode, 1, -1, int(seconds), int(at))
        lines.append("\t".join(map(str, cells)))
        at += draw.expovariate(1 / every)
    path = folder / f"like-shockwave-{seed}.trace"
    path.write_text("\n".join(lines) + "\n")
    return read_shockwave(path, table)


# -- what is run -------------------------------------------------------------------------------------------------


def on_gavel(names: Sequence[str]) -> dict[str, Any]:
    table = read_throughputs(GAVEL / "physical_cluster_throughputs.json")
    found: dict[str, Any] = {}
    for trace in names:
        harness.say(f"scheduler_hetero: {trace}")
        path = GAVEL / "physical_cluster" / f"{trace}.trace"
        found[trace] = {
            name: tell(play(read_gavel(path, table, is_length_known=name not in KNOWS_NOTHING), policy, MIXED, 360.0))
            for name, policy in POLICIES.items()
            if name != "goodput"
        }
        unknown = read_gavel(path, table, is_length_known=False)
        found[trace]["finish, lengths unknown"] = tell(play(unknown, POLICIES["finish"], MIXED, 360.0))
        for name in ("las", "finish"):
            shared = read_gavel(path, table, is_length_known=name not in KNOWS_NOTHING, shares_gpus=True)
            found[trace][f"{name}{SHARED}"] = tell(play(shared, POLICIES[name], MIXED, 360.0))
    return found


def on_peers() -> dict[str, Any]:
    """Their policies here, to compare with what they published."""
    table = read_throughputs(GAVEL / "physical_cluster_throughputs.json")
    fair = GAVEL / "physical_cluster" / "max_min_fairness.trace"
    batch = GAVEL / "physical_cluster" / "minimize_makespan.trace"
    runs: dict[str, tuple[Path, Callable[[], Policy]]] = {
        "gavel aware": (fair, lambda: peers.Gavel(peers.fair_aware)),
        "gavel blind": (fair, lambda: peers.Gavel(peers.fair_blind, is_aware=False)),
        "gavel fifo": (fair, peers.BlindFifo),
        "gavel early end": (batch, lambda: peers.Gavel(peers.early_end)),
    }
    found: dict[str, Any] = {}
    for name, (path, policy) in runs.items():
        harness.say(f"scheduler_hetero: {name}")
        found[name] = tell(play(read_gavel(path, table), policy(), MIXED, 360.0))
    found[LEAST_MAKESPAN] = least_makespan(read_gavel(batch, table), MIXED)
    found[LEAST_IN_PAIRS] = least_makespan_in_pairs(batch, table, MIXED)
    return found


def least_makespan(work: Sequence[StepsWork], gpus: dict[str, int]) -> float:
    """No schedule with one job on a GPU ends earlier: the linear program with jobs cut at will."""
    import numpy as np

    speeds = np.array([[job.speeds.get(kind, 0.0) for kind in gpus] for job in work])
    sizes = np.array([float(job.queued.min_workers) for job in work])
    left = np.array([job.left for job in work])
    shares = peers.early_end(speeds, sizes, np.array([float(count) for count in gpus.values()]), left)
    return float((left / (speeds * shares).sum(axis=1)).max()) / HOUR


def least_makespan_in_pairs(trace: Path, table: Throughputs, gpus: dict[str, int]) -> float:
    """The same where two jobs with as many workers may share their GPUs, at the speeds that were measured so."""
    from scipy.optimize import linprog
    from scipy.sparse import coo_array

    measured = json.loads(table.path.read_text())
    jobs = read_gavel(trace, table)
    names = [f"({row.text('type')!r}, {row.whole('workers', least=1)})" for row in read_tabbed(trace, (7, 10))]
    num_jobs, kinds = len(jobs), list(gpus)
    cells: list[tuple[int, int, float]] = []
    width = 0
    for one, at in itertools.product(range(num_jobs), range(len(kinds))):
        here = measured[kinds[at]].get(names[one], {})
        others = [(one, [here.get("null", 0.0)])]
        others += [
            (other, here[names[other]])
            for other in range(one)
            if names[other] in here and jobs[other].queued.min_workers == jobs[one].queued.min_workers
        ]
        for other, speeds in others:
            for job, speed in zip((one, other), speeds, strict=False):
                # Progress must reach the end of all, and a job is in one place at a time.
                cells += [(job, width, -speed / jobs[job].left), (num_jobs + job, width, 1.0)]
            cells.append((2 * num_jobs + at, width, float(jobs[one].queued.min_workers)))
            width += 1
    cells += [(job, width, 1.0) for job in range(num_jobs)]
    rows, columns, values = zip(*cells, strict=True)
    limits = [0.0] * num_jobs + [1.0] * num_jobs + [float(count) for count in gpus.values()]
    matrix = coo_array((values, (rows, columns)), shape=(len(limits), width + 1)).tocsr()
    found = linprog([0.0] * width + [-1.0], A_ub=matrix, b_ub=limits, bounds=(0, None), method="highs-ipm")
    return 1.0 / float(found.x[-1]) / HOUR


def on_shockwave() -> dict[str, Any]:
    table = read_throughputs(SHOCKWAVE / "tacc_throughputs.json")
    path, gpus = SHOCKWAVE / "trace-120jobs.trace", {"v100": 32}
    contenders: dict[str, tuple[Policy, bool]] = {
        **{name: (policy, name not in KNOWS_NOTHING) for name, policy in POLICIES.items() if name != "goodput"},
        "finish, lengths unknown": (POLICIES["finish"], False),
        "max_min_fairness (peer)": (peers.Gavel(peers.fair_blind, is_aware=False), True),
        "min_total_duration (peer)": (peers.Gavel(peers.early_end), True),
        "max_sum_throughput (peer)": (peers.Gavel(peers.most_steps), True),
    }
    found: dict[str, Any] = {}
    for name, (policy, is_known) in contenders.items():
        harness.say(f"scheduler_hetero: shockwave, {name}")
        work = read_shockwave(path, table, is_length_known=is_known)
        found[name] = tell_fair(play(work, policy, gpus, 120.0), work, 32)
    return found


def on_others(num_seeds: int) -> dict[str, Any]:
    """Seeds of the same families: each policy's mean over them."""
    import tempfile

    table = read_throughputs(GAVEL / "physical_cluster_throughputs.json")
    tacc = read_throughputs(SHOCKWAVE / "tacc_throughputs.json")
    found: dict[str, Any] = {"seeds": list(range(101, 101 + num_seeds))}
    with tempfile.TemporaryDirectory() as folder:
        for seed in found["seeds"]:
            harness.say(f"scheduler_hetero: seed {seed}")
            for name in ("fifo", "las", "srtf", "finish"):
                work = like_gavel(seed, table, num_jobs=96, every=360.0, hours=(0.1, 4.0))
                found.setdefault(f"like max_min_fairness, {name}", []).append(
                    tell(play(work, POLICIES[name], MIXED, 360.0))
                )
            for shares in (False, True):
                batch = like_gavel(seed, table, num_jobs=100, every=0.0, hours=(0.2, 5.0), shares_gpus=shares)
                least = least_makespan(batch, MIXED)
                told = tell(play(batch, POLICIES["finish"], MIXED, 360.0)) | {"least_makespan_hours": least}
                found.setdefault(f"like minimize_makespan, finish{SHARED if shares else ''}", []).append(told)
            for name in ("srtf", "las", "finish"):
                fair = like_shockwave(seed, tacc, Path(folder))
                told = tell_fair(play(fair, POLICIES[name], {"v100": 32}, 120.0), fair, 32)
                found.setdefault(f"like shockwave, {name}", []).append(told)
    return found


def on_msr() -> dict[str, Any]:
    """Months of jobs, in rounds of an hour; rows whose type was never measured with so many workers are left out."""
    table = read_throughputs(GAVEL / "simulation_throughputs.json")
    found: dict[str, Any] = {}
    for trace, gpus in (("11cb48", MIXED), ("6214e9", {"v100": 64, "p100": 64, "k80": 64})):
        for name in ("las", "srtf", "finish"):
            harness.say(f"scheduler_hetero: msr {trace}, {name}")
            path = GAVEL / "msr-seed0" / f"{trace}.trace"
            work = read_gavel(path, table, is_length_known=name not in KNOWS_NOTHING, skips_unmeasured=True)
            found.setdefault(trace, {"gpus": gpus})[name] = tell(play(work, POLICIES[name], gpus, HOUR))
    return found


def main(rounds: int, is_quick: bool) -> dict[str, Any]:
    if not DATA.exists():
        raise SystemExit(f"{DATA} is not there: these traces are not part of the repository")
    if is_quick:
        return {"gavel": on_gavel(["small_test"])}
    traces = ["max_min_fairness", "minimize_makespan", "small_test", "medium_test", "artifact_evaluation"]
    found = {
        "published": PUBLISHED,
        "gavel": on_gavel(traces),
        "peers here": on_peers(),
        "shockwave": on_shockwave(),
        "other seeds": on_others(3),
        "msr": on_msr(),
    }
    return {"rows": bounds_of(found), **found, "checks": checks_of(found)}


def bounds_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    """How early Gavel's batch is done, beside what no schedule can pass: linear programs in which jobs are cut."""
    here = found["peers here"]
    hours = {
        "finish": found["gavel"]["minimize_makespan"]["finish"]["makespan_hours"],
        LEAST_MAKESPAN: here[LEAST_MAKESPAN],
        f"finish{SHARED}": found["gavel"]["minimize_makespan"][f"finish{SHARED}"]["makespan_hours"],
        LEAST_IN_PAIRS: here[LEAST_IN_PAIRS],
    }
    return [{"Gavel's batch trace": name, "hours": value} for name, value in hours.items()]


def checks_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The goals, each for one policy."""
    gavel, fair = found["gavel"], found["shockwave"]["finish"]
    shared = gavel["minimize_makespan"][f"finish{SHARED}"]
    goals = (
        ("Gavel, average hours, las", gavel["max_min_fairness"]["las"]["average_hours"], "≤ 3.5"),
        (f"Gavel, makespan hours, finish{SHARED}", shared["makespan_hours"], "≤ 17.0"),
        ("Shockwave, worst rho, finish", fair["worst"], "≤ 1.6"),
        ("Shockwave, makespan s, finish", fair["makespan"], "≤ 24000"),
        ("Shockwave, average s, finish", fair["average"], "≤ 9700"),
        ("Shockwave, Jain's index of rho, finish", fair["jain"], "≥ 0.93"),
    )
    return [harness.check(what, harness.summarize([value]), goal) for what, value, goal in goals]
