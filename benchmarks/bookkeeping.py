"""What it costs to write down every step: journal, metrics, time stamps and progress for the launcher.

Three looks at the same thing. In the loop: a Trainer of 2 workers on a model with a step of about 20 ms, with its
recording and with a `_record` that does nothing, taking turns. A call: what the loop itself spends in it. Processor:
all of it, the writing thread too, in a process that records a step every 20 ms and does nothing else.
"""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks.harness import check, ratio, summarize
from benchmarks.turns import Ours, launch, mean_over_workers, process_group, take_turns
from benchmarks.workloads import OPTIMIZERS, WORKLOADS, Workload, make_mlp

STEP_SECONDS = 0.02
STEPS, TURNS = 10, 10
"""Steps of a turn, and turns of a round: a difference below a percent needs many."""

CALLS = 2000
PACED_STEPS = 100


def main(rounds: int, is_quick: bool = False) -> dict[str, Any]:
    results = launch(compete, 2, rounds, is_quick)
    samples = mean_over_workers([result["turns"] for result in results])
    recorded, silent = (in_rounds(samples[name], rounds) for name in ("recording", "silent"))
    steps_ms = [summarize([1e3 * second for second in seconds]) for seconds in (recorded, silent)]
    in_loop = summarize([100 * (a / b - 1) for a, b in zip(recorded, silent, strict=True)])
    call_us = summarize([1e6 * second for second in results[0]["call"]])
    processor_us = summarize([1e6 * second for second in results[0]["processor"]])
    of_20_ms = {name: percent_of_step(value) for name, value in (("call", call_us), ("processor", processor_us))}
    return {
        "rows": [
            {"what": "step of a Trainer, recording", "measured": steps_ms[0], "unit": "ms"},
            {"what": "the same, silent", "measured": steps_ms[1], "unit": "ms"},
            {"what": "a call, in the loop's thread", "measured": call_us, "unit": "µs a step"},
            {"what": "processor, all threads", "measured": processor_us, "unit": "µs a step"},
        ],
        "checks": [
            check("recording in the loop, % of the step", in_loop, "≤ 1"),
            check("a call, % of 20 ms", of_20_ms["call"], "≤ 1"),
            check("processor time, % of 20 ms", of_20_ms["processor"], "≤ 1"),
        ],
        "notes": [
            f"median of the rounds (quartiles); a round of the first two is the median of {TURNS} turns of {STEPS}",
            "steps each; 2 workers of 1 thread, balance=False, else default settings",
        ],
        "ratio": ratio(recorded, silent),
        "samples_seconds": samples,
        "samples_call_seconds": results[0]["call"],
        "samples_processor_seconds": results[0]["processor"],
    }


def in_rounds(seconds: list[float], rounds: int) -> list[float]:
    """The median turn of each round."""
    num = len(seconds) // rounds
    return [summarize(seconds[at : at + num])["median"] for at in range(0, num * rounds, num)]


def percent_of_step(microseconds: dict[str, float]) -> dict[str, float]:
    scale = 100 / (1e6 * STEP_SECONDS)
    return {name: value if name == "rounds" else scale * value for name, value in microseconds.items()}


def small_step() -> Workload:
    """About 20 ms on one core of a common machine."""
    return replace(WORKLOADS["MLP"](False), make=lambda: make_mlp(1024), samples=128)


def compete(rounds: int, is_quick: bool) -> dict[str, Any]:
    """One worker: turns with and without recording, then the call by itself, then its processor time."""
    workload = WORKLOADS["MLP"](True) if is_quick else small_step()
    steps, turns, calls, paced = (2, 1, 20, 5) if is_quick else (STEPS, TURNS, CALLS, PACED_STEPS)
    with process_group(), Ours(workload, OPTIMIZERS["SGD"], 2 * workload.samples, balance=False) as ours:
        record, last = ours.trainer._steps._record, []

        def keep(*args: Any) -> None:
            last[:] = args
            record(*args)

        def stepping(with_record: Callable[..., None]) -> Callable[[], None]:
            def step() -> None:
                ours.trainer._steps._record = with_record
                ours()

            return step

        contenders = {"recording": stepping(keep), "silent": stepping(lambda *_: None)}
        return {
            "turns": take_turns(contenders, steps, turns * rounds),
            "call": [time_calls(lambda: record(*last), calls) for _ in range(rounds)],
            "processor": [cost_of(lambda: record(*last), paced) for _ in range(rounds)],
        }


def time_calls(act: Callable[[], None], count: int) -> float:
    """Seconds of one call, of many in a row."""
    began = time.perf_counter()
    for _ in range(count):
        act()
    return (time.perf_counter() - began) / count


def cost_of(act: Callable[[], None], count: int) -> float:
    """Processor seconds that one `act` every 20 ms adds to this process, threads included."""
    return max(0.0, pace(act, count) - pace(os.getpid, count)) / count


def pace(act: Callable[[], object], count: int) -> float:
    began = time.process_time()
    for _ in range(count):
        time.sleep(STEP_SECONDS)
        act()
    return time.process_time() - began
