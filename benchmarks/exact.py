"""What exact mode costs: the same step, cut into the same shards, with exact=True and without.

Both Trainers take turns in the same processes. `same pieces` also computes each shard by itself, as exact mode must;
`exact=False` merges neighbouring shards where the model allows it (no dropout, no batch statistics).
"""

from contextlib import ExitStack
from typing import Any

from benchmarks.harness import check, ratio, summarize
from benchmarks.turns import Ours, launch, mean_over_workers, process_group, take_turns
from benchmarks.workloads import OPTIMIZERS, WORKLOADS

NAMES = ("CNN", "GPT", "GPT dropout")
OPTIMIZER = "AdamW"
NUM_SHARDS = 8
BATCH_WORKERS = 2
GOAL = "≤ 1.1"


def main(rounds: int, is_quick: bool = False) -> dict[str, Any]:
    cases = {
        (name, num_workers): mean_over_workers(launch(compete, num_workers, name, rounds, is_quick))
        for name in (NAMES[-1:] if is_quick else NAMES)
        for num_workers in ((2,) if is_quick else (1, 2))
    }
    rows, checks = [], []
    for (name, num_workers), samples in cases.items():
        cost = ratio(samples["exact=True"], samples["exact=False"])
        row: dict[str, Any] = {"model": name, "workers": num_workers}
        row |= {contender: summarize([1e3 * second for second in of]) for contender, of in samples.items()}
        row["cost"] = cost
        row["cost of same pieces"] = ratio(samples["exact=True"], samples["same pieces"])
        rows.append(row)
        checks.append(check(f"{name}, {num_workers} worker(s): exact=True / exact=False", cost, GOAL))
    return {
        "rows": rows,
        "checks": checks,
        "notes": [
            "ms a step, median of the rounds (quartiles); cost = time with exact=True / without, taken in a round.",
            f"Trainer settings: shards={NUM_SHARDS}, balance=False, else default; {OPTIMIZER}; 1 thread a worker;",
            f"the global batch is the one of {BATCH_WORKERS} workers, for 1 worker too.",
            *(WORKLOADS[name](is_quick).about for name in NAMES),
        ],
        "samples_seconds": {f"{name} {num_workers}": samples for (name, num_workers), samples in cases.items()},
    }


def compete(name: str, rounds: int, is_quick: bool) -> dict[str, list[float]]:
    """One worker: two Trainers, and one that cuts as the exact one must, take turns."""
    workload = WORKLOADS[name](is_quick)
    num_samples = workload.samples * BATCH_WORKERS
    settings = {
        "exact=False": {},
        "same pieces": {"microbatch_size": -(-num_samples // NUM_SHARDS)},
        "exact=True": {"exact": True},
    }
    with process_group(), ExitStack() as opened:
        contenders = {
            label: opened.enter_context(
                Ours(workload, OPTIMIZERS[OPTIMIZER], num_samples, shards=NUM_SHARDS, balance=False, **chosen)
            )
            for label, chosen in settings.items()
        }
        return take_turns(contenders, workload.steps, rounds)
