"""Processor time of the commands people type again and again, beside that of a bare interpreter."""

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import check, interleave, ratio, summarize
from shoal.observe.folder import create
from shoal.observe.metrics import MetricsWriter
from shoal.spec.event import StepMetrics

NUM_RUNS = 50
NUM_STEPS = 200
GOAL = "≤ 150"


def main(rounds: int, is_quick: bool = False) -> dict[str, Any]:
    installed = Path(sys.executable).with_name("shoal")
    shoal = [str(installed)] if installed.exists() else [sys.executable, "-m", "shoal"]
    commands = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "import shoal": [sys.executable, "-c", "import shoal"],
        "shoal --help": [*shoal, "--help"],
        "shoal --version": [*shoal, "--version"],
        f"shoal ps, {NUM_RUNS} runs": [*shoal, "ps"],
        f"shoal ps --json, {NUM_RUNS} runs": [*shoal, "ps", "--json"],
    }
    with tempfile.TemporaryDirectory() as home:
        make_runs(home)
        env = {**os.environ, "SHOAL_HOME": home}
        contenders = {name: lambda command=command: measure(command, env) for name, command in commands.items()}
        interleave(contenders, 1)  # compiled files and the disk's cache are there from now on
        samples = interleave(contenders, rounds)
    bare = samples["python -c pass"]
    measured = {name: summarize([1e3 * second for second in seconds]) for name, seconds in samples.items()}
    return {
        "rows": [
            {"command": name, "cpu ms": measured[name], "/ bare python": ratio(seconds, bare)}
            for name, seconds in samples.items()
        ],
        "checks": [check(f"{name}, cpu ms", measured[name], GOAL) for name in commands if "python" not in name],
        "notes": [
            "user + system time of the process, median of the rounds (quartiles); no terminal, output is dropped;",
            f"each run that `ps` lists has 2 workers and {NUM_STEPS} recorded steps",
        ],
        "samples_seconds": samples,
    }


def measure(command: list[str], env: Mapping[str, str]) -> float:
    """Seconds of processor time of one command."""
    process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{command} ended with {process.returncode}")
    return usage.ru_utime + usage.ru_stime


def make_runs(home: str) -> None:
    """Folders of runs that have finished, as `shoal run` leaves them."""
    names, now = random.Random(0), time.time()
    for number in range(NUM_RUNS):
        began = now - 3600 * (NUM_RUNS - number)
        facts = {"command": ["shoal", "run", "-n", "2", "train.py"], "num_workers": 2}
        with create(home, "train.py", facts, began, names) as folder:
            for rank in (0, 1):
                with MetricsWriter(folder.path, rank) as metrics:
                    for step in range(NUM_STEPS):
                        metrics.write(make_metrics(step, began + 0.02 * step))
            folder.update(status="finished", exit_code=0, ended=began + 0.02 * NUM_STEPS)


def make_metrics(step: int, when: float) -> StepMetrics:
    return StepMetrics(
        step=step,
        time=when,
        epoch=0,
        loss=2.5,
        num_samples=128,
        global_samples=256,
        lr=1e-3,
        compute=0.018,
        communicate=0.001,
        wait=0.0005,
        load=0.0001,
        other=0.0004,
        waited_for=None,
        grad_norm=1.0,
    )
