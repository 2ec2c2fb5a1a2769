"""Peak memory and step time where state is divided among the workers of one host: shoal against FSDP2 and the like.

A GPT of 50 million parameters, AdamW, float32, 2 and 4 workers of 1 thread. Every contender has new processes in
each round, and in the first one once more, for its memory.

Memory is the proportional set size (PSS) of a worker: pages that several processes share count once over all of them,
so that the sum over workers is what the machine gives. It is read from /proc/PID/smaps_rollup by a process of its
own, all the time; the peak is the largest sum over workers divided by their number. `VmHWM` is the largest resident
set of any worker, which counts shared pages in each.
"""

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.harness import check, ratio, summarize

WORKERS = (2, 4)
PEERS = ("ZeroRedundancyOptimizer", "FSDP2")
DEEPSPEED = tuple(f"DeepSpeed ZeRO-{stage}" for stage in (1, 2, 3))
OURS = ("shoal optimizer", "shoal parameters")
"""On one host "optimizer" is what all_reduce does there, and "gradients" and "parameters" are one thing."""
SIZE = (768, 7, 64, 2)
QUICK_SIZE = (16, 2, 8, 2)
"""Width, layers, tokens of a sequence, sequences a worker."""
NUM_STEPS, NUM_WARM = 6, 2
SECONDS = 900

Found = dict[str, list[float]]


def main(rounds: int, is_quick: bool = False) -> dict[str, Any]:
    workers = WORKERS[:1] if is_quick else WORKERS
    names = _contenders(is_quick)
    rows, checks = [], []
    for num_workers in workers:
        found = _measure_all(names, num_workers, 1 if is_quick else rounds, is_quick)
        rows += [_row(name, num_workers, found) for name in names]
        checks += _checks(num_workers, found)
    return {"rows": rows, "checks": [] if is_quick else checks, "notes": _notes(is_quick)}


def _contenders(is_quick: bool) -> list[str]:
    if is_quick:
        return ["FSDP2", "shoal parameters"]
    return [*PEERS, *(DEEPSPEED if _deepspeed_python() else ()), *OURS]


def _deepspeed_python() -> str | None:
    return harness.PEER_PYTHONS.get("deepspeed")


def _measure_all(names: list[str], num_workers: int, rounds: int, is_quick: bool) -> dict[str, Found]:
    """What each contender took, round by round; they take turns. Memory is looked at in runs that are not timed."""
    found: dict[str, Found] = {name: {} for name in names}
    for number in range(rounds):
        for name in names:
            harness.say(f"{name}, {num_workers} workers, round {number + 1} of {rounds}")
            seen = run(name, num_workers, is_quick, looks=True) if number == 0 else {}
            seconds = run(name, num_workers, is_quick, looks=False)["seconds"]
            for key, value in {**seen, "seconds": seconds}.items():
                found[name].setdefault(key, []).append(value)
    return found


def run(name: str, num_workers: int, is_quick: bool, *, looks: bool) -> dict[str, float]:
    """One run of a contender: seconds a step, and memory in MiB if it is looked at."""
    with ExitStack() as opened, socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
        found.close()
        home = opened.enter_context(tempfile.TemporaryDirectory())
        processes = [_start(name, rank, num_workers, is_quick, port, home) for rank in range(num_workers)]
        for process in processes:
            opened.enter_context(process)
            opened.callback(process.kill)
        try:
            return _follow(processes, looks)
        except RuntimeError as error:
            raise RuntimeError(f"{name}: {error}: {(Path(home) / '0').read_text()[-2000:]}") from error


def _start(name: str, rank: int, num_workers: int, is_quick: bool, port: int, home: str) -> subprocess.Popen[str]:
    python = _deepspeed_python() if name.startswith("DeepSpeed") else sys.executable
    assert python is not None
    facts = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": num_workers,
        "LOCAL_WORLD_SIZE": num_workers,
        "LOCAL_SIZE": num_workers,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": 1,
        "SHOAL_HOME": home,
        "DS_ACCELERATOR": "cpu",
    }
    size = QUICK_SIZE if is_quick else SIZE
    with open(Path(home) / str(rank), "w") as errors:
        return subprocess.Popen(
            [python, "-m", "benchmarks.sharded_worker", name, *map(str, (*size, NUM_STEPS))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **{key: str(value) for key, value in facts.items()}},
            cwd=Path(__file__).parent.parent,
        )


def _follow(processes: list[subprocess.Popen[str]], looks: bool) -> dict[str, float]:
    """Let the workers go from mark to mark, all together."""
    with Sampler([process.pid for process in processes] if looks else []) as sampler:
        _await(processes, "imported")
        sampler.look()
        base = sampler.peak
        _go_on(processes)
        _await(processes, "made")
        whole, sampler.peak = sampler.peak, 0.0
        _go_on(processes)
        seconds = [float(word) for word in _await(processes, "trained")[0].split()[1:]]
        sampler.look()
        top = max(_read_kib(process.pid, "status", "VmHWM:") for process in processes) / 1024
    steady = sorted(seconds[NUM_WARM:])
    return {
        "seconds": steady[len(steady) // 2],
        "peak": max(whole, sampler.peak),
        "peak in steps": sampler.peak,
        "net": sampler.peak - base,
        "VmHWM": top,
    }


def _await(processes: list[subprocess.Popen[str]], mark: str) -> list[str]:
    """Wait until all workers have come to a mark."""
    return [_line(process, mark) for process in processes]


def _go_on(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()


def _line(process: subprocess.Popen[str], mark: str) -> str:
    """The line of a mark; what libraries print besides is passed over."""
    assert process.stdout is not None
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        line = process.stdout.readline()
        if line.startswith(mark):
            return line
        if not line:
            break
    raise RuntimeError(f"a worker ended before it was {mark}")


class Sampler:
    """Looks at the memory of processes again and again. `peak` is the largest so far, in MiB for each process."""

    def __init__(self, pids: list[int]) -> None:
        self._pids = pids
        self.peak = 0.0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def look(self) -> None:
        if self._pids:
            total = sum(_read_kib(pid, "smaps_rollup", "Pss:") for pid in self._pids)
            self.peak = max(self.peak, total / 1024 / len(self._pids))

    def _run(self) -> None:
        while self._pids and not self._is_over.wait(0.002):
            self.look()

    def __enter__(self) -> "Sampler":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()


def _read_kib(pid: int, file: str, key: str) -> float:
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    except OSError:
        return 0.0
    return next((float(line.split()[1]) for line in lines if line.startswith(key)), 0.0)


def _row(name: str, num_workers: int, found: dict[str, Found]) -> dict[str, Any]:
    mine, peer = found[name], found["FSDP2"]
    return {
        "workers": num_workers,
        "": name,
        "ms a step": summarize([1e3 * second for second in mine["seconds"]]),
        "peak MiB": summarize(mine["peak"]),
        "in steps": summarize(mine["peak in steps"]),
        "of it state": summarize(mine["net"]),
        "VmHWM": summarize(mine["VmHWM"]),
        "memory / FSDP2": "–" if mine is peer else ratio(mine["peak"], peer["peak"]),
        "time / FSDP2": "–" if mine is peer else ratio(mine["seconds"], peer["seconds"]),
    }


def _checks(num_workers: int, found: dict[str, Found]) -> list[dict[str, Any]]:
    rows = []
    for name in OURS:
        if name not in found:
            continue
        what = f"{num_workers} workers, {name}"
        rows.append(check(f"{what}: memory / FSDP2", ratio(found[name]["peak"], found["FSDP2"]["peak"]), "≤ 1.05"))
        for peer in ("FSDP2", *(peer for peer in DEEPSPEED if peer in found)):
            measured = ratio(found[name]["seconds"], found[peer]["seconds"])
            rows.append(check(f"{what}: time / {peer}", measured, "≤ 1"))
    return rows


def _notes(is_quick: bool) -> list[str]:
    width, num_layers, length, samples = QUICK_SIZE if is_quick else SIZE
    missing = (
        []
        if _deepspeed_python()
        else [
            "DeepSpeed was not measured: name the Python of an environment that has it with",
            "`--peer-python deepspeed=PATH` (made by `DS_BUILD_OPS=0 pip install deepspeed`).",
        ]
    )
    return [
        f"GPT of {num_layers} layers, d={width}, {samples} sequences of {length} tokens a worker, AdamW (fused).",
        "ms a step: median of the rounds, of the median step of each. Memory: MiB a worker, PSS, largest mean over",
        "the workers; `peak` is from the start on, `in steps` while steps are taken, `of it state` without what a",
        "process has after imports. VmHWM counts shared pages in every worker. Memory is of the first round.",
        *missing,
    ]
