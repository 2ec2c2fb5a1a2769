"""What it costs to measure the noise of gradients: a pass over them, in one step of sixteen.

A difference below half a percent drowns in the noise of the box, so steps that all look take turns with steps that
never do, in one Trainer of 2 workers, and the difference is divided by sixteen.
"""

from collections.abc import Callable
from typing import Any

from benchmarks.bookkeeping import in_rounds, small_step
from benchmarks.harness import check, summarize
from benchmarks.turns import Ours, launch, mean_over_workers, process_group, take_turns
from benchmarks.workloads import OPTIMIZERS, WORKLOADS
from shoal.train import noise

STEPS, TURNS = 10, 10
NEVER = 10**9
USUAL = noise.EVERY


def main(rounds: int, is_quick: bool = False) -> dict[str, Any]:
    rows, checks, samples = [], [], {}
    for transport in ("shm", "tcp"):
        found = samples[transport] = mean_over_workers(launch(compete, 2, transport, rounds, is_quick))
        looking, blind = (in_rounds(found[each], rounds) for each in ("looking", "blind"))
        cost = summarize([100 * (a / b - 1) / USUAL for a, b in zip(looking, blind, strict=True)])
        rows.append(
            {
                "transport": transport,
                "step ms": summarize([1e3 * second for second in blind]),
                "a look ms": summarize([1e3 * (a - b) for a, b in zip(looking, blind, strict=True)]),
            }
        )
        checks.append(check(f"% of a step, {transport}", cost, "≤ 0.5"))
    notes = [
        f"a look in each step against none at all, divided by {USUAL}; 2 workers of 1 thread, SGD, an MLP whose step",
        "takes about 20 ms on a core that does nothing else: few samples for its parameters, so looks weigh much",
    ]
    return {"rows": rows, "checks": checks, "notes": notes, "samples_seconds": samples}


def compete(transport: str, rounds: int, is_quick: bool) -> dict[str, list[float]]:
    """One worker: turns in which each step looks, and turns in which none does."""
    workload = WORKLOADS["MLP"](True) if is_quick else small_step()
    steps, turns = (2, 1) if is_quick else (STEPS, TURNS)
    settings = {"balance": False, "transport": transport}
    with process_group(), Ours(workload, OPTIMIZERS["SGD"], 2 * workload.samples, **settings) as ours:

        def stepping(every: int) -> Callable[[], None]:
            def step() -> None:
                noise.EVERY = every
                ours()

            return step

        return take_turns({"looking": stepping(1), "blind": stepping(NEVER)}, steps, turns * rounds)
