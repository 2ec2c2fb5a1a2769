"""A Trainer that takes steps when it is its turn: `shoal run -m benchmarks.engines_jobs.turns FOLDER quick|whole`.

It goes on until it is stopped. FOLDER/turn-N says how many steps to take in turn N. Rank 0 writes the seconds one
took to FOLDER/seconds-N. In between everybody sleeps, so that another run can have the cores.
"""

import itertools
import os
import sys
import time
from pathlib import Path

from benchmarks.turns import Ours
from benchmarks.workloads import OPTIMIZERS, WORKLOADS

NUM_WORKERS = 2
LOOK_SECONDS = 0.05


def main(folder: Path, is_quick: bool) -> None:
    workload = WORKLOADS["CNN"](is_quick)
    with Ours(workload, OPTIMIZERS["SGD"], NUM_WORKERS * workload.samples, balance=False) as step:
        for number in itertools.count():
            num_steps = await_turn(folder / f"turn-{number}")
            step()  # everybody is awake
            began = time.perf_counter()
            for _ in range(num_steps):
                step()
            seconds = (time.perf_counter() - began) / num_steps
            if step.trainer.rank == 0:
                put(folder / f"seconds-{number}", repr(seconds))


def await_turn(path: Path) -> int:
    while not path.exists():
        time.sleep(LOOK_SECONDS)
    return int(path.read_text())


def put(path: Path, text: str) -> None:
    """Whoever sees the file sees all of it."""
    path.with_suffix(".part").write_text(text)
    os.replace(path.with_suffix(".part"), path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "quick")
