"""Two workers on two hosts with a 100 Mbit link between them: DDP, PowerSGD, and local steps that agree now and then.

The hosts are network namespaces; each worker has one thread. First the time of a step: contenders take turns in the
same two processes, with an MLP of 6.1 million parameters. Then *time to loss*: the loss on samples held out that the
synchronous run has after so many steps is the goal, and each contender trains until a whole run of it ends there.

A synchronous step gives the same whatever the link, so its losses are found on a fast one, and its time is the number
of steps times the milliseconds measured before; all others are timed on the slow link. `SHOAL_BENCH_TEXT` names a
text to learn; without it, that is `../shared/data/tinyshakespeare.txt` beside the repository, or Python's help topics
where there is none. The notes of a result say which it was.

Needs root and iproute2.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import check, ratio, summarize
from shoal.testing import rigs

RATE_MBIT = 100
GOAL_MS = "≤ 58"
GOAL_DDP, GOAL_POWER = "≥ 20", "≥ 1"
OURS = {
    "DiLoCo H=32": "diloco:32",
    "streaming DiLoCo H=32": "diloco:32,fragments=4",
    "local H=32, int8": "local:32,codec=int8",
}
QUICK_OURS = {"streaming DiLoCo H=4": "diloco:4,fragments=2"}
TEXT = Path(__file__).parents[2] / "shared" / "data" / "tinyshakespeare.txt"
STEPS = {"digits": 192, "text": 320}
"""Steps of the synchronous run whose loss is the goal."""
MOST_TIMES_STEPS = 4.0
SECONDS = 1200


def main(rounds: int, is_quick: bool = False) -> dict[str, Any]:
    ours = QUICK_OURS if is_quick else OURS
    speeds = measure_speed(rounds, is_quick, ours)
    rows = [
        {
            "": name,
            "ms a step": summarize([1e3 * second for second in seconds]),
            "× DDP": ratio(speeds["DDP"], seconds),
            "of no communication": ratio(speeds["none"], seconds),
        }
        for name, seconds in speeds.items()
    ]
    step_seconds = {name: summarize(seconds)["median"] for name, seconds in speeds.items()}
    found = {task: time_to_loss(task, step_seconds, is_quick, ours) for task in STEPS}
    checks = [check(f"ms a step, {name}", _milliseconds(speeds[name]), GOAL_MS) for name in ours]
    for task, times in found.items():
        for name in ours:
            checks.append(_check_time(task, name, "DDP", times, GOAL_DDP))
            checks.append(_check_time(task, name, "PowerSGD", times, GOAL_POWER))
    return {
        "rows": rows,
        "more": {
            f"time to loss, {task}": [_row(name, each) for name, each in times.items()]
            for task, times in found.items()
        },
        "checks": checks,
        "notes": [
            "MLP 784-2048-2048-10, 128 samples a worker and step, AdamW; PowerSGD of rank 1 in one bucket.",
            "Time to loss: width 2048, too; the same optimizer and learning rate for all; loss on held-out samples.",
            f"Text: {name_text(find_text())}.",
        ],
        "samples_seconds": speeds,
        "time_to_loss": found,
    }


def find_text() -> Path | None:
    """The text to learn; None for Python's help topics."""
    if named := os.environ.get("SHOAL_BENCH_TEXT"):
        return Path(named)
    return TEXT if TEXT.exists() else None


def name_text(path: Path | None) -> str:
    """Which text it is, wherever it was found."""
    if path is None:
        return "Python's help topics"
    return f"{path.name}, sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}"


def _milliseconds(seconds: list[float]) -> dict[str, float]:
    return summarize([1e3 * second for second in seconds])


def _check_time(task: str, name: str, peer: str, times: Mapping[str, Any], goal: str) -> dict[str, Any]:
    seconds = times[name]["seconds"]
    times_faster = times[peer]["seconds"] / seconds if times[name]["is_reached"] else 0.0
    return check(f"{task}: {name} × {peer}", summarize([times_faster]), goal)


def _row(name: str, found: Mapping[str, Any]) -> dict[str, Any]:
    reached = {"": name, "steps": found["steps"], "loss": found["loss"], "seconds": found["seconds"]}
    return reached | {"reached": "yes" if found["is_reached"] else "no"}


def measure_speed(rounds: int, is_quick: bool, ours: Mapping[str, str]) -> dict[str, list[float]]:
    """Seconds a step of every contender, round by round, the mean of both workers."""
    results = run({"kind": "speed", "rounds": rounds, "is_quick": is_quick, "ours": dict(ours)}, RATE_MBIT)
    return {
        name: [sum(each) / len(each) for each in zip(*(r[name] for r in results), strict=True)] for name in results[0]
    }


def time_to_loss(
    task: str, step_seconds: Mapping[str, float], is_quick: bool, ours: Mapping[str, str]
) -> dict[str, Any]:
    """Steps, loss and seconds of each contender's first whole run that ends at the synchronous run's loss."""
    steps = 8 if is_quick else STEPS[task]
    text = find_text()
    spec = {"kind": "train", "task": task, "is_quick": is_quick, "text": str(text) if text is not None else None}
    goal = run({**spec, "way": "DDP", "steps": steps}, None)[0]["loss"]
    seconds = steps * step_seconds["DDP"]
    found: dict[str, Any] = {"DDP": {"steps": steps, "loss": goal, "seconds": seconds, "is_reached": True}}
    for name, way in {"PowerSGD": "PowerSGD", **ours}.items():
        found[name] = _train_until(goal, steps, {**spec, "way": way})
    return found


def _train_until(goal: float, steps: int, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Longer and longer runs, each from the beginning, until one ends at the goal."""
    times, num_steps = 1.0, steps
    while True:
        results = run({**spec, "steps": num_steps}, RATE_MBIT)
        loss, seconds = results[0]["loss"], max(result["seconds"] for result in results)
        is_reached, times = loss <= goal, times * 1.25
        if is_reached or times > MOST_TIMES_STEPS:
            return {"steps": num_steps, "loss": loss, "seconds": seconds, "is_reached": is_reached}
        num_steps = int(steps * times)


def run(spec: Mapping[str, Any], rate_mbit: float | None) -> list[Any]:
    """What two workers found, each on a host of its own."""
    with rigs.hosts(2, rate_mbit=rate_mbit) as hosts, tempfile.TemporaryDirectory() as home:
        command = [sys.executable, "-m", "benchmarks.local_worker", json.dumps(spec)]
        workers = [
            hosts.start(
                rank,
                command,
                env=_environment(rank, hosts.address(0), hosts.interface, home),
                cwd=Path(__file__).parents[1],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        outputs = [worker.communicate(timeout=SECONDS)[0] for worker in workers]
        if any(worker.returncode for worker in workers):
            codes = [worker.returncode for worker in workers]
            raise RuntimeError(f"a worker failed ({codes}): {spec}")
        return [json.loads(output.splitlines()[-1]) for output in outputs]


def _environment(rank: int, address: str, interface: str, home: str) -> dict[str, str]:
    return {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": address,
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": interface,
        "OMP_NUM_THREADS": "1",
        "SHOAL_HOME": home,
    }
