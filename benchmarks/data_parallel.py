"""Data-parallel training with 2 workers of 1 thread: no communication at all, DistributedDataParallel, and shoal.

All contenders take turns in the same two processes. `alone` is one worker while the other sleeps; twice its speed is
the ideal. `none` are two workers that train a copy each and never talk; `meeting` are such that wait for each other
after every step and still exchange nothing, which is what being synchronous costs by itself. `fused` means the
optimizer's one-pass kernel, which shoal turns on by itself where it can. `DDP tuned` has it too, and gradients that
are views of buckets.

A second table sets two workers against one process that uses all cores on the same global batch, each in processes of
its own, started anew in every round.
"""

import os
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

from benchmarks.harness import check, ratio, summarize
from benchmarks.turns import (
    Ours,
    Step,
    launch,
    mean_over_workers,
    meet_in_memory,
    meeting_only,
    plain_step,
    process_group,
    take_turns,
    with_ddp,
    without_communication,
)
from benchmarks.workloads import OPTIMIZERS, WORKLOADS, Workload

NAMES = ("MLP", "CNN", "GPT")
CASES = [(name, chosen) for name in NAMES for chosen in OPTIMIZERS]
QUICK_CASES = [("CNN", "SGD")]
NUM_WORKERS = 2
SETTINGS = {"balance": False}
GOAL = {"MLP": "≥ 0.95", "CNN": "≥ 0.98", "GPT": "≥ 0.98"}
GOAL_DDP = {"MLP": "≥ 1.35"}

Samples = dict[str, list[float]]
Cases = dict[tuple[str, str], Samples]
Make = Callable[[Workload, str, ExitStack], dict[str, Step | None]]


def main(rounds: int, is_quick: bool = False) -> dict[str, Any]:
    chosen_cases = QUICK_CASES if is_quick else CASES
    cases = {case: measure_turns(*case, rounds, is_quick) for case in chosen_cases}
    against_one = measure_against_one(chosen_cases, rounds, is_quick)
    rows = [row for case, samples in cases.items() for row in _rows(*case, samples)]
    title = "2 workers of 1 thread against one process with all threads, same global batch"
    return {
        "rows": rows,
        "more": {title: [_row_against_one(*case, samples) for case, samples in against_one.items()]},
        "checks": [row for case, samples in cases.items() for row in _checks(*case, samples)],
        "notes": _notes(is_quick),
        "samples_seconds": {" ".join(case): samples for case, samples in cases.items()},
        "samples_seconds_against_one": {" ".join(case): samples for case, samples in against_one.items()},
    }


def _notes(is_quick: bool) -> list[str]:
    return [
        "ms a step, median of the rounds (quartiles), mean of the workers; the other columns are speeds relative to",
        "twice one worker alone, to no communication, to meeting without a message and to DDP, taken within a round.",
        "shoal loads its data in the background and records every step, the others get ready batches. `shards=2`",
        "computes batch statistics over a worker's whole part, as DDP does, instead of in 8 shards.",
        f"Trainer settings: {SETTINGS}, else default.",
        *(WORKLOADS[name](is_quick).about for name in NAMES),
        "SGD has momentum 0.9; `none`, `alone` and `DDP` use the optimizer as torch makes it.",
    ]


# Turns in the same two processes.


def measure_turns(name: str, chosen: str, rounds: int, is_quick: bool) -> Samples:
    """Seconds a step of every contender, round by round."""
    return mean_over_workers(launch(compete, NUM_WORKERS, name, chosen, rounds, is_quick))


def compete(name: str, chosen: str, rounds: int, is_quick: bool) -> Samples:
    """One worker: make every contender, then let them take turns."""
    workload, optimizer = WORKLOADS[name](is_quick), OPTIMIZERS[chosen]
    with process_group() as rank, ExitStack() as opened:

        def ours(**settings: Any) -> Ours:
            return opened.enter_context(
                Ours(workload, optimizer, workload.samples * NUM_WORKERS, **SETTINGS, **settings)
            )

        group = opened.enter_context(closing(meet_in_memory()))
        contenders: dict[str, Step | None] = {
            "alone": without_communication(workload, optimizer) if rank == 0 else None,
            "none": without_communication(workload, optimizer),
            "none fused": without_communication(workload, optimizer, fused=True),
            "none fused, meeting": meeting_only(without_communication(workload, optimizer, fused=True), group),
            "DDP": with_ddp(workload, optimizer, {}),
            "DDP tuned": with_ddp(workload, optimizer, {"gradient_as_bucket_view": True}, fused=True),
            "shoal": ours(),
        }
        if name == "CNN":
            contenders["shoal shards=2"] = ours(shards=NUM_WORKERS)
        return take_turns(contenders, workload.steps, rounds)


def _rows(name: str, chosen: str, samples: Samples) -> list[dict[str, Any]]:
    rows = []
    for contender, seconds in samples.items():
        row: dict[str, Any] = {"model": name, "optimizer": chosen, "": contender}
        row["ms a step"] = summarize([1e3 * second for second in seconds])
        row |= {label: "–" if peer == contender else ratio(samples[peer], seconds) for label, peer in _PEERS.items()}
        rows.append(row)
    return rows


_PEERS = {
    "of 2 × alone": "alone",
    "of none": "none",
    "of none fused": "none fused",
    "of meeting": "none fused, meeting",
    "× DDP": "DDP",
}


def _checks(name: str, chosen: str, samples: Samples) -> list[dict[str, Any]]:
    rows = []
    for ours in (contender for contender in samples if contender.startswith("shoal")):
        what = f"{name} {chosen}: {ours}"
        rows.append(check(f"{what} of none", ratio(samples["none"], samples[ours]), GOAL[name]))
        rows.append(check(f"{what} of none fused", ratio(samples["none fused"], samples[ours]), GOAL[name]))
        if name in GOAL_DDP:
            rows.append(check(f"{what} × DDP", ratio(samples["DDP"], samples[ours]), GOAL_DDP[name]))
    return rows


# Two workers against one process that has all cores.


def measure_against_one(chosen_cases: list[tuple[str, str]], rounds: int, is_quick: bool) -> Cases:
    """Seconds a step on the same global batch, each side in new processes in each round."""
    cases: Cases = {case: {} for case in chosen_cases}
    for _ in range(rounds):
        sides = (
            launch(run_one_process, 1, chosen_cases, is_quick, threads=len(os.sched_getaffinity(0))),
            launch(run_workers, NUM_WORKERS, chosen_cases, is_quick),
        )
        for results in sides:
            for case, measured in results[0].items():
                for contender, seconds in measured.items():
                    cases[case].setdefault(contender, []).extend(seconds)
    return cases


def run_one_process(chosen_cases: list[tuple[str, str]], is_quick: bool) -> Cases:
    """Plain PyTorch, and a Trainer, on the whole global batch in one process."""

    def make(workload: Workload, chosen: str, opened: ExitStack) -> dict[str, Step | None]:
        num_samples, optimizer = workload.samples * NUM_WORKERS, OPTIMIZERS[chosen]

        def plain(**options: Any) -> Step:
            model = workload.make()
            return plain_step(workload, model, optimizer(model.parameters(), **options), num_samples)

        ours = opened.enter_context(Ours(workload, optimizer, num_samples, **SETTINGS))
        return {"one process": plain(), "one process fused": plain(fused=True), "one worker": ours}

    return _run_all(make, chosen_cases, is_quick)


def run_workers(chosen_cases: list[tuple[str, str]], is_quick: bool) -> Cases:
    """A Trainer on this worker's part of the global batch."""

    def make(workload: Workload, chosen: str, opened: ExitStack) -> dict[str, Step | None]:
        ours = Ours(workload, OPTIMIZERS[chosen], workload.samples * NUM_WORKERS, **SETTINGS)
        return {"two workers": opened.enter_context(ours)}

    return _run_all(make, chosen_cases, is_quick)


def _run_all(make: Make, chosen_cases: list[tuple[str, str]], is_quick: bool) -> Cases:
    cases: Cases = {}
    with process_group():
        for name, chosen in chosen_cases:
            workload = WORKLOADS[name](is_quick)
            with ExitStack() as opened:
                contenders = make(workload, chosen, opened)
                cases[name, chosen] = take_turns(contenders, workload.steps, 1, warm_rounds=0)
    return cases


def _row_against_one(name: str, chosen: str, samples: Samples) -> dict[str, Any]:
    row: dict[str, Any] = {"model": name, "optimizer": chosen}
    row |= {contender: summarize([1e3 * second for second in seconds]) for contender, seconds in samples.items()}
    row["× one process"] = ratio(samples["one process"], samples["two workers"])
    row["× fused"] = ratio(samples["one process fused"], samples["two workers"])
    return row
