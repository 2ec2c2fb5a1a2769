"""Many calls of one function in two worker processes: `shoal.map`, the pools of Python, and Ray if it is there.

The clock runs from before the pool exists until it is gone: starting and ending processes counts. `tiny`: 10,000
calls that do next to nothing. `sleep`: 64 calls of 50 ms, for which two workers need 1.6 s. `start`: one call a
worker, which is what starting and ending costs.
"""

import importlib.util
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from benchmarks.harness import check, interleave, ratio, summarize

WORKERS = 2
SLEEP_SECONDS = 0.05

Function = Callable[[int], int]
Way = Callable[[Function, Sequence[int]], list[int]]


def tiny(number: int) -> int:
    return number * number


def sleep(number: int) -> int:
    time.sleep(SLEEP_SECONDS)
    return number


def by_shoal(function: Function, items: Sequence[int]) -> list[int]:
    import shoal

    return shoal.map(function, items, WORKERS, is_quiet=True)


def by_pool(function: Function, items: Sequence[int]) -> list[int]:
    with multiprocessing.Pool(WORKERS) as pool:
        return pool.map(function, items)


def by_spawning_pool(function: Function, items: Sequence[int]) -> list[int]:
    """New interpreters, as ours: what forks inherits locks and threads, and breaks where a library has some."""
    with multiprocessing.get_context("spawn").Pool(WORKERS) as pool:
        return pool.map(function, items)


def by_futures(function: Function, items: Sequence[int]) -> list[int]:
    with ProcessPoolExecutor(WORKERS) as pool:
        return list(pool.map(function, items))


def by_ray(function: Function, items: Sequence[int]) -> list[int]:
    import ray

    ray.init(num_cpus=WORKERS, include_dashboard=False, log_to_driver=False)
    try:
        remote = ray.remote(function)
        return list(ray.get([remote.remote(item) for item in items]))
    finally:
        ray.shutdown()


WAYS: dict[str, Way] = {
    "shoal.map": by_shoal,
    "Pool, fork": by_pool,
    "Pool, spawn": by_spawning_pool,
    "futures, fork": by_futures,
    "ray": by_ray,
}


GOALS = (
    ("sleep", "Pool, fork", "≤ 1.15"),
    ("tiny", "futures, fork", "≤ 1"),
    ("start", "Pool, spawn", "≤ 1"),
)
"""Forking is faster than starting anew, and stays so; all else should be as fast."""


def main(rounds: int, is_quick: bool = False) -> dict[str, Any]:
    notes = ["seconds for all calls, with the start and the end of the workers; median of the rounds (quartiles)"]
    ways = dict(WAYS)
    if not importlib.util.find_spec("ray"):
        del ways["ray"]
        notes.append("Ray skipped: it is not installed (`pip install ray`)")
    if is_quick:
        ways = {name: ways[name] for name in ("shoal.map", "Pool, fork")}
    jobs: dict[str, tuple[Function, Sequence[int]]] = {
        "start": (tiny, range(WORKERS)),
        "tiny": (tiny, range(500 if is_quick else 10_000)),
        "sleep": (sleep, range(4 if is_quick else 64)),
    }
    with tempfile.TemporaryDirectory() as home:
        os.environ["SHOAL_HOME"] = home
        samples = {job: interleave(_contenders(ways, *what), rounds) for job, what in jobs.items()}
    rows = [{"way": way, **{f"{job} s": summarize(samples[job][way]) for job in jobs}} for way in ways]
    return {
        "rows": rows,
        "checks": [
            check(f"{job}, shoal.map / {peer}", ratio(samples[job]["shoal.map"], samples[job][peer]), goal)
            for job, peer, goal in GOALS
            if peer in ways
        ],
        "notes": notes,
        "samples_seconds": samples,
    }


def _contenders(ways: dict[str, Way], function: Function, items: Sequence[int]) -> dict[str, Callable[[], float]]:
    def measure(way: Way) -> float:
        began = time.perf_counter()
        results = way(function, items)
        seconds = time.perf_counter() - began
        assert results == [number * number if function is tiny else number for number in items]
        return seconds

    return {name: lambda way=way: measure(way) for name, way in ways.items()}  # type: ignore[misc]
