"""`shoal run --engine ray` against the same on this machine alone, and against Ray's own TorchTrainer.

Everything happens on a Ray cluster that is started here, with 2 workers, once a first job of each kind has run.

**Start** is from just before the command until the slower worker has taken its first step of training. The connection
to the cluster is included on both sides. TorchTrainer and shoal train the same model, the first with gloo.

**Steps** are those of two runs that are there at the same time and take turns, one here and one on Ray: while one
trains for some seconds, the workers of the other sleep. So both have the same cores, and Ray's own processes run
beside both.

**Recovery** is on a cluster of two nodes with one worker each. All workers of one node are killed at a random moment,
and the time is taken until the first step that is committed without them, as in `recovery.py`. Beside it, in the same
round, TorchTrainer loses a worker: from the kill to the first step after its restart, which goes on from a checkpoint
of the last step.

**Spark**: from a DataFrame to the first step, as in `spark_data.py`, where pyspark and Java are there.
"""

import importlib.util
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import launch, recovery, spark_data
from benchmarks.engines_jobs.turns import put
from benchmarks.harness import check, interleave, ratio, say, summarize
from benchmarks.workloads import WORKLOADS
from shoal.testing.rigs.rays import RayCluster, ray_cluster

NUM_WORKERS = 2
CPUS = 4
TURNS_A_ROUND = 3
TURN_SECONDS = 2.0
WARM_STEPS = 5
KILLS_A_ROUND = 5
RAY_SECONDS = 120.0
TRAIN = ["-m", "shoal", "run", "-n", str(NUM_WORKERS)]
PEER = "Ray TorchTrainer"

Samples = dict[str, list[float]]


def main(rounds: int, is_quick: bool = False) -> dict[str, Any]:
    if not importlib.util.find_spec("ray") or not importlib.util.find_spec("pyarrow"):
        raise SystemExit("engines needs Ray and its TorchTrainer: `pip install 'shoal[ray]' 'ray[train]'`")
    notes = ["median (quartiles)"]
    if os.geteuid() or os.nice(0):
        notes.append("workers on Ray and here differ in priority: only as root and at nice 0 they do not")
    with ray_cluster(CPUS) as cluster:
        starts, ends = measure_starts(cluster, rounds, is_quick, notes)
        steps = measure_steps(cluster, rounds, is_quick)
    with ray_cluster(1, 1) as cluster:
        kills, restarts = measure_recoveries(cluster, rounds, 1 if is_quick else KILLS_A_ROUND)
    ours = [seconds for one in kills for seconds in one]
    spark: spark_data.Pairs = {}
    if spark_data.is_possible():
        spark = spark_data.measure_all(rounds, is_quick)
    else:
        notes.append("Spark skipped: it needs pyspark and Java (`pip install 'shoal[spark]'`)")
    return {
        "rows": [_start_row(name, starts, ends) for name in starts],
        "more": {
            f"{WORKLOADS['CNN'](is_quick).about}: ms a step": [
                {"": name, "ms a step": summarize([1e3 * each for each in seconds])}
                for name, seconds in steps.items()
            ],
            "recovery: s from the kill to the next step": [
                {"": name, "kills": len(seconds), "recovery s": summarize(seconds), "max": max(seconds)}
                for name, seconds in (("shoal on Ray", ours), (PEER, restarts))
            ],
            "from a DataFrame of Spark to the first step": spark_data.rows_of(spark),
        },
        "checks": [
            check("first step on Ray, s", summarize(starts["shoal on Ray"]), "≤ 5"),
            check(f"first step on Ray / {PEER}", ratio(starts["shoal on Ray"], starts[PEER]), "≤ 0.25"),
            check("steps a second on Ray / here", ratio(steps["here"], steps["on Ray"]), "≥ 0.99"),
            check("recovery on Ray, s", summarize(ours), "≤ 1"),
            check(f"recovery {PEER} / shoal", ratio(restarts, [statistics.median(one) for one in kills]), "≥ 20"),
            *spark_data.checks_of(spark),
        ],
        "notes": notes,
        "samples_seconds": starts,
        "samples_seconds_to_end": ends,
        "samples_seconds_a_step": steps,
        "samples_seconds_recovery": {"shoal on Ray": kills, PEER: restarts},
        "samples_seconds_spark": spark_data.totals_of(spark),
    }


def _start_row(name: str, starts: Samples, ends: Samples) -> dict[str, Any]:
    return {
        "": name,
        "first step s": summarize(starts[name]),
        "end s": summarize(ends[name]),
        f"/ {PEER}": ratio(starts[name], starts[PEER]) if name != PEER else "–",
    }


def on(cluster: RayCluster) -> list[str]:
    """What tells `shoal run` to use it."""
    return ["--engine", "ray", "--address", cluster.address]


def env_of(cluster: RayCluster) -> dict[str, str]:
    """What leads other programs to it."""
    return {**cluster.env, "RAY_ADDRESS": cluster.address}


# Start.


def measure_starts(cluster: RayCluster, rounds: int, is_quick: bool, notes: list[str]) -> tuple[Samples, Samples]:
    """Seconds to the first step, and to the end of the command, by way."""
    ways = _ways(cluster)
    if not shutil.which("mpirun"):
        del ways["shoal by mpirun"]
        notes.append("mpirun skipped: it is not installed (`apt install openmpi-bin`)")
    for name, start in ways.items() if not is_quick else ():
        say(f"start: {name}, to get warm")
        launch.measure_again(name, start, notes)
    starts: Samples = {name: [] for name in ways}
    ends: Samples = {name: [] for name in ways}
    for number in range(rounds):
        for name, start in ways.items():
            say(f"start: round {number + 1} of {rounds}: {name}")
            first, end = launch.measure_again(name, start, notes)
            starts[name].append(first)
            ends[name].append(end)
    return starts, ends


def _ways(cluster: RayCluster) -> dict[str, launch.Start]:
    script = str(launch.SCRIPTS / "trainer.py")

    def peer(folder: str, env: Mapping[str, str]) -> list["subprocess.Popen[bytes]"]:
        # It keeps its results in the user's home.
        home = {"HOME": str(Path(folder).parent)}
        return launch.start_command(
            [str(launch.SCRIPTS / "ray_train.py")], folder, {**env, **env_of(cluster), **home}
        )

    def ours(*options: str) -> launch.Start:
        return lambda folder, env: launch.start_command(
            [*TRAIN, *options, script], folder, {**env, **env_of(cluster)}
        )

    return {
        "shoal on Ray": ours(*on(cluster)),
        PEER: peer,
        "shoal here": ours(),
        "shoal by mpirun": ours("--engine", "mpi"),
    }


# Steps.


class Turns:
    """A run that trains when it is asked to, seen through the folder it looks into."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0

    def take(self, num_steps: int) -> float:
        """Seconds a step, of so many."""
        answer = self._folder / f"seconds-{self._count}"
        put(self._folder / f"turn-{self._count}", str(num_steps))
        self._count += 1
        recovery.wait_for(answer.exists, "its turn is over", 0.05)
        return float(answer.read_text())


@contextmanager
def taking_turns(options: list[str], env: Mapping[str, str], is_quick: bool) -> Iterator[Turns]:
    with tempfile.TemporaryDirectory() as name:
        command = [*TRAIN, "--threads", "1", *options, "-m", "benchmarks.engines_jobs.turns"]
        with recovery.running([*command, name, "quick" if is_quick else "whole"], {**env, "SHOAL_HOME": name}):
            yield Turns(Path(name))


def measure_steps(cluster: RayCluster, rounds: int, is_quick: bool) -> Samples:
    """Seconds a step, turn by turn."""
    say(f"steps: {rounds} rounds of {TURNS_A_ROUND} turns")
    with (
        taking_turns([], {}, is_quick) as here,
        taking_turns(on(cluster), env_of(cluster), is_quick) as on_ray,
    ):
        sides = {"here": here, "on Ray": on_ray}
        seconds = max(side.take(WARM_STEPS) for side in sides.values())
        num_steps = WARM_STEPS if is_quick else max(WARM_STEPS, math.ceil(TURN_SECONDS / seconds))
        return interleave(
            {name: partial(side.take, num_steps) for name, side in sides.items()}, rounds * TURNS_A_ROUND
        )


# Recovery.


def measure_recoveries(cluster: RayCluster, rounds: int, num_kills: int) -> tuple[list[list[float]], list[float]]:
    """Seconds from each kill to the next step, of shoal by round, and of its peer."""
    chance = random.Random(0)
    ours: list[list[float]] = []
    peers: list[float] = []
    for number in range(rounds):
        say(f"recovery: round {number + 1} of {rounds}: shoal on Ray")
        ours.append(measure_kills(cluster, num_kills, chance))
        say(f"recovery: round {number + 1} of {rounds}: {PEER}")
        peers.append(measure_restart(cluster, chance))
    return ours, peers


def measure_kills(cluster: RayCluster, count: int, chance: random.Random) -> list[float]:
    """Lose the worker of one node again and again, each time when both are there."""
    kills: list[tuple[float, str]] = []
    with elastic_run(cluster) as run:
        for _ in range(count):
            recovery.wait_for(lambda: len(run.members()) == NUM_WORKERS, "both nodes are there")
            kills.append(recovery.strike(run, chance, signal.SIGKILL))
            recovery.wait_for(lambda: None not in recovery.next_steps(run, kills), "it goes on", 0.05)
        return [seconds for seconds in recovery.next_steps(run, kills) if seconds is not None]


@contextmanager
def elastic_run(cluster: RayCluster) -> Iterator[recovery.Run]:
    with tempfile.TemporaryDirectory() as home:
        command = ["-m", "shoal", "run", "-n", f"1:{NUM_WORKERS}", *on(cluster), "--name", "fire"]
        script = str(recovery.SCRIPTS / "trainer.py")
        with recovery.running([*command, script], {**env_of(cluster), "SHOAL_HOME": home}):
            run = recovery.Run(Path(home))
            recovery.wait_for(lambda: len(run.step_times()) > 5, "steps are taken")
            yield run


def measure_restart(cluster: RayCluster, chance: random.Random) -> float:
    """Seconds from a kill to the first step after Ray Train has started everybody again."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with recovery.running(["-m", "benchmarks.engines_jobs.ray_train", name], env_of(cluster)):
            recovery.wait_for(lambda: len(_peer_steps(folder, 0)) > 5, "steps are taken")
            time.sleep(chance.uniform(0.0, 0.3))
            pid = int((folder / "pids" / str(chance.randrange(NUM_WORKERS))).read_text())
            now = time.time()
            os.kill(pid, signal.SIGKILL)
            recovery.wait_for(lambda: _peer_steps(folder, 1), "it goes on")
            return _peer_steps(folder, 1)[0] - now


def _peer_steps(folder: Path, num_starts: int) -> list[float]:
    path = folder / "steps.jsonl"
    lines = recovery.read_lines(path) if path.exists() else []
    return [line["time"] for line in lines if line["starts"] >= num_starts]
