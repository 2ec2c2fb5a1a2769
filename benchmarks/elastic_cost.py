"""What being ready for a loss costs while nobody is lost: steps of an elastic run against those of a fixed one.

Both are the same script with 2 workers, started in turns: `shoal run -n 2` and `shoal run -n 2:2`. Which of them is
first changes from round to round. In each of them every model takes a block of steps after a few that do not count. A
step is as long as the slower worker says.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import check, ratio, summarize
from benchmarks.workloads import OPTIMIZERS, WORKLOADS

NAMES = ("MLP", "CNN", "GPT")
WAYS = {"fixed": "2", "elastic": "2:2"}
NUM_WORKERS = 2
NUM_STEPS = {"MLP": 60, "CNN": 14, "GPT": 14}
NUM_WARM = 3
OPTIMIZER = "AdamW"
GOAL = "≤ 1.03"
TIMEOUT_SECONDS = 300


def main(rounds: int, is_quick: bool = False) -> dict[str, Any]:
    samples: dict[str, dict[str, list[float]]] = {name: {way: [] for way in WAYS} for name in NAMES}
    for number in range(rounds):
        for way in list(WAYS)[:: 1 if number % 2 else -1]:
            for name, seconds in measure(WAYS[way], is_quick).items():
                samples[name][way].append(seconds)
    costs = {name: ratio(of["elastic"], of["fixed"]) for name, of in samples.items()}
    return {
        "rows": [
            {
                "model": name,
                **{f"{way}, ms a step": summarize([1e3 * second for second in samples[name][way]]) for way in WAYS},
                "cost": costs[name],
            }
            for name in NAMES
        ],
        "checks": [check(f"{name}: elastic / fixed", cost, GOAL) for name, cost in costs.items()],
        "notes": [
            "median step of each run; `cost` is elastic over fixed within a round, median of the rounds (quartiles)",
            *(WORKLOADS[name](is_quick).about for name in NAMES),
        ],
        "samples_seconds": {f"{name} {way}": seconds for name, of in samples.items() for way, seconds in of.items()},
    }


def measure(num_workers: str, is_quick: bool) -> dict[str, float]:
    """Seconds a step of each model, in a run of its own."""
    with tempfile.TemporaryDirectory() as home:
        command = ["shoal", "run", "-n", num_workers, "--quiet", __file__, home, *(["quick"] if is_quick else [])]
        env = {**os.environ, "SHOAL_HOME": home, "OMP_NUM_THREADS": "1"}
        env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent.parent), env.get("PYTHONPATH", "")])
        subprocess.run(
            [sys.executable, "-m", *command], env=env, check=True, capture_output=True, timeout=TIMEOUT_SECONDS
        )
        told = [json.loads(path.read_text()) for path in Path(home).glob("seconds-*.json")]
    return {name: max(each[name] for each in told) for name in NAMES}


def work(folder: str, is_quick: bool) -> None:
    """One worker: train every model for a few steps and write down how long each of them took."""
    import shoal

    seconds: dict[str, float] = {}
    for name in NAMES:
        workload = WORKLOADS[name](is_quick)
        model, count = workload.make(), NUM_WARM + (4 if is_quick else NUM_STEPS[name])
        batch_size = NUM_WORKERS * workload.samples
        optimizer, data = OPTIMIZERS[OPTIMIZER](model.parameters()), workload.data(count * batch_size)
        with shoal.Trainer(model, workload.loss, optimizer, data, batch_size=batch_size, balance=False) as trainer:
            seconds[name] = statistics.median(time_steps(trainer)[NUM_WARM:])
    Path(folder, f"seconds-{os.environ['RANK']}.json").write_text(json.dumps(seconds))


def time_steps(trainer: Any) -> list[float]:
    """Seconds of each step of an epoch."""
    seconds, began = [], time.perf_counter()
    for batch in trainer:
        trainer.step(batch)
        now = time.perf_counter()
        seconds.append(now - began)
        began = now
    return seconds


if __name__ == "__main__":
    work(sys.argv[1], "quick" in sys.argv[2:])
