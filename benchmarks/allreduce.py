"""all_reduce of float32 between 2 processes of 1 thread each: gloo, OpenMPI, and shoal's shared memory.

gloo and shoal take turns in the same two processes; OpenMPI's processes are started once a round, between them.
`shoal` reduces tensors that live in shared memory, where a trainer keeps its gradients; `private` ones that do not.
Every contender leaves the whole sum in the tensors of both processes.

OpenMPI: `apt install openmpi-bin libopenmpi-dev`, then `python3 -m venv .venv-mpi` and
`.venv-mpi/bin/pip install mpi4py numpy` in the root of the repository. Skipped, and said so, where it is absent.
"""

import json
import multiprocessing
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import ratio, summarize
from shoal.comm.connect import connect
from shoal.comm.rendezvous import open_store

SIZES = {"4 KB": 4096, "256 KB": 262_144, "4 MB": 4_000_000, "25 MB": 25_000_000, "100 MB": 100_000_000}
CALLS = {"4 KB": 1000, "256 KB": 500, "4 MB": 50, "25 MB": 10, "100 MB": 4}
GOALS = {"gloo": (30, 25, 11, 6.5, 6), "OpenMPI": (0, 1.5, 2, 2, 3.5)}
NUM_RANKS = 2
WARM_SECONDS = 0.03


def main(rounds: int, is_quick: bool = False) -> dict[str, Any]:
    mpi, labels = find_mpi(), list(SIZES)[: 2 if is_quick else None]
    samples: dict[str, dict[str, list[float]]] = {label: {} for label in labels}
    with Workers(labels) as workers:
        for _ in range(rounds):
            for label in labels:
                for name in CONTENDERS:
                    samples[label].setdefault(name, []).append(workers.measure(name, label))
            for label, seconds in (measure_mpi(mpi, labels) if mpi else {}).items():
                samples[label].setdefault("OpenMPI", []).append(seconds)
    rows = [_row(index, label, samples[label]) for index, label in enumerate(labels)]
    notes = ["milliseconds a call, median of the rounds (quartiles); × = times faster than, taken within a round"]
    if not mpi:
        notes.append("OpenMPI skipped: no mpirun, or no python with mpi4py and numpy (python3, .venv-mpi/bin/python)")
    return {"rows": rows, "notes": notes, "samples_seconds": samples, "goals": GOALS}


def _row(index: int, label: str, samples: dict[str, list[float]]) -> dict[str, Any]:
    row: dict[str, Any] = {"size": label}
    for name, seconds in samples.items():
        row[name] = summarize([1e3 * second for second in seconds])
    for peer, goals in GOALS.items():
        if peer in samples:
            row[f"× {peer}"] = ratio(samples[peer], samples["shoal"])
            row["goal" if peer == "gloo" else "goal "] = f"≥ {goals[index]:g}" if goals[index] else "–"
    return row


class Workers:
    """Two processes that measure what they are told to, at the same time."""

    def __init__(self, labels: list[str]) -> None:
        context = multiprocessing.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        pipes = [context.Pipe() for _ in range(NUM_RANKS)]
        self._pipes = [ours for ours, _ in pipes]
        self._processes = [
            context.Process(target=serve, args=(rank, port, labels, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            process.kill()

    def measure(self, name: str, label: str) -> float:
        """Seconds a call, of the slower process."""
        for pipe in self._pipes:
            pipe.send((name, label))
        return max(pipe.recv() for pipe in self._pipes)


Call = Callable[[], object]


def serve(rank: int, port: int, labels: list[str], pipe: Connection) -> None:
    """One worker: prepare every contender at every size once, then measure on demand until the pipe closes."""
    torch.set_num_threads(1)
    store = open_store("127.0.0.1", port, rank, NUM_RANKS)
    group = connect(rank, NUM_RANKS, store, transport="shm")
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    calls = {(name, label): prepare(group, SIZES[label]) for name, prepare in CONTENDERS.items() for label in labels}
    while True:
        try:
            name, label = pipe.recv()
        except EOFError:
            break
        pipe.send(_measure(group, calls[name, label], CALLS[label]))
    dist.destroy_process_group()
    group.close()


def _measure(group: Any, call: Call, num_calls: int) -> float:
    flag, end = torch.zeros(1), time.perf_counter() + WARM_SECONDS
    while flag.item() == 0:
        call()
        flag.fill_(time.perf_counter() >= end)
        group.all_reduce(flag).wait()
    group.barrier()
    began = time.perf_counter()
    for _ in range(num_calls):
        call()
    return (time.perf_counter() - began) / num_calls


def _check(tensor: torch.Tensor, call: Call) -> Call:
    """Every contender must have summed before it is timed. Zeros then stay zeros however often they are."""
    tensor.fill_(dist.get_rank() + 1)
    call()
    if tensor.unique().tolist() != [3.0]:
        raise AssertionError(f"1 + 2 became {tensor.unique().tolist()}")
    tensor.zero_()
    return call


def prepare_gloo(_: Any, num_bytes: int) -> Call:
    tensor = torch.empty(num_bytes // 4)
    return _check(tensor, lambda: dist.all_reduce(tensor))


def prepare_shared(group: Any, num_bytes: int) -> Call:
    tensor = group.share(num_bytes).mine.view(torch.float32)
    return _check(tensor, group.all_reduce_plan(tensor))


def prepare_private(group: Any, num_bytes: int) -> Call:
    tensor = torch.empty(num_bytes // 4)
    return _check(tensor, group.all_reduce_plan(tensor))


CONTENDERS = {"gloo": prepare_gloo, "shoal": prepare_shared, "private": prepare_private}


def find_mpi() -> list[str]:
    """The command that runs `allreduce_mpi.py`, or nothing where OpenMPI is not installed."""
    mpirun, here = shutil.which("mpirun"), Path(__file__).parent
    for python in (sys.executable, str(here.parent / ".venv-mpi/bin/python"), shutil.which("python3") or ""):
        probe = [python, "-c", "import mpi4py, numpy"]
        if (
            mpirun
            and Path(python).exists()
            and subprocess.run(probe, capture_output=True, check=False).returncode == 0
        ):
            launch = [mpirun, "-np", str(NUM_RANKS), "--allow-run-as-root", "--oversubscribe"]
            return [*launch, python, str(here / "allreduce_mpi.py")]
    return []


def measure_mpi(command: list[str], labels: list[str]) -> dict[str, float]:
    plan = {"warm_seconds": WARM_SECONDS, "calls": {str(SIZES[label]): CALLS[label] for label in labels}}
    answer = subprocess.run([*command, json.dumps(plan)], capture_output=True, text=True, check=True, timeout=120)
    seconds = json.loads(answer.stdout)
    return {label: seconds[str(SIZES[label])] for label in labels}
