"""all_reduce of float32 over MPI, beside shoal's shared memory and sockets (gloo): on one host, and between two.

`mpi`, `shm` and `tcp` are groups of shoal, in the same processes, in turns; shm reduces tensors that live in shared
memory, where a trainer keeps its gradients. `OpenMPI` is its blocking Allreduce without a group around it. The two
hosts are network namespaces, joined at 1 Gbit/s; they share the cores of this machine.

Needs OpenMPI and mpi4py; for the hosts also root and iproute2. What is missing is skipped, and said so.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import ratio, summarize
from shoal.testing import rigs
from shoal.testing.rigs.mpi import mpirun, mpirun_on_hosts

SIZES = {
    "4 KB": 4096,
    "64 KB": 65_536,
    "256 KB": 262_144,
    "4 MB": 4_000_000,
    "25 MB": 25_000_000,
    "100 MB": 100_000_000,
}
CALLS = {"4 KB": 1000, "64 KB": 500, "256 KB": 200, "4 MB": 30, "25 MB": 8, "100 MB": 3}
CALLS_BETWEEN_HOSTS = {"4 KB": 300, "64 KB": 100, "256 KB": 50, "4 MB": 8, "25 MB": 2, "100 MB": 1}
RATE_MBIT = 1000.0
TIMEOUT_SECONDS = 1800.0

Samples = dict[str, dict[str, list[float]]]


def main(rounds: int, is_quick: bool = False) -> dict[str, Any]:
    rigs.require("benchmarks mpi_transport", "mpirun", "mpi4py")
    num_sizes = 2 if is_quick else len(SIZES)
    samples = {
        f"{num_ranks} ranks, one host": measure_here(num_ranks, rounds, num_sizes)
        for num_ranks in ((2,) if is_quick else (2, 4))
    }
    notes = ["milliseconds a call, median of the rounds (quartiles); × = times as fast as, taken within a round"]
    if not is_quick:
        try:
            samples[f"2 ranks, two hosts, {RATE_MBIT:g} Mbit/s"] = measure_between_hosts(rounds, num_sizes)
        except rigs.RigMissing as error:
            notes.append(f"two hosts skipped: {error.message}")
    rows = [_row(place, label, found) for place, sizes in samples.items() for label, found in sizes.items()]
    return {"rows": rows, "notes": notes, "samples_seconds": samples}


def _row(place: str, label: str, samples: dict[str, list[float]]) -> dict[str, Any]:
    row: dict[str, Any] = {"where": place, "size": label}
    row |= {name: summarize([1e3 * second for second in seconds]) for name, seconds in samples.items()}
    row |= {f"mpi × {peer}": ratio(samples[peer], samples["mpi"]) for peer in ("tcp", "shm") if peer in samples}
    return row


def measure_here(num_ranks: int, rounds: int, num_sizes: int) -> Samples:
    with tempfile.TemporaryDirectory() as folder:
        return _measure(mpirun(num_ranks), ["mpi", "OpenMPI", "tcp", "shm"], CALLS, rounds, num_sizes, Path(folder))


def measure_between_hosts(rounds: int, num_sizes: int) -> Samples:
    with rigs.hosts(2, rate_mbit=RATE_MBIT) as hosts, tempfile.TemporaryDirectory() as folder:
        command = mpirun_on_hosts(2, hosts, Path(folder))
        return _measure(command, ["mpi", "OpenMPI", "tcp"], CALLS_BETWEEN_HOSTS, rounds, num_sizes, Path(folder))


def _measure(
    command: Sequence[str], contenders: list[str], calls: dict[str, int], rounds: int, num_sizes: int, folder: Path
) -> Samples:
    labels, out = list(SIZES)[:num_sizes], folder / "samples.json"
    plan = {"rounds": rounds, "contenders": contenders, "out": str(out)}
    plan["calls"] = {str(SIZES[label]): calls[label] for label in labels}
    worker = [sys.executable, "-m", "shoal.engine.joined", "-m", "benchmarks.mpi_transport_worker", json.dumps(plan)]
    done = subprocess.run(
        [*command, *worker],
        cwd=Path(__file__).parents[1],
        stdout=subprocess.DEVNULL,  # the ranks tell how far they are on stderr
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"mpirun ended with {done.returncode}")
    found = json.loads(out.read_text())
    return {label: found[str(SIZES[label])] for label in labels}
