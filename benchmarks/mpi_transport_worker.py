"""One rank of `mpi_transport.py`, started by mpirun: measures every contender in turns, and rank 0 writes a file.

mpi_transport_worker.py PLAN    {"rounds": 5, "contenders": ["mpi", ...], "calls": {"4096": 100, ...}, "out": PATH}
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import say
from shoal.comm.connect import connect
from shoal.comm.group import Op
from shoal.comm.rendezvous import open_store
from shoal.engine.env import read_worker

Call = Callable[[], object]


def main(plan: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    facts = read_worker()
    rank, size = facts.rank, facts.world_size
    store = open_store(facts.master_addr, facts.master_port, rank, size)
    names = plan["contenders"]
    transports = [name for name in names if name != "OpenMPI"]
    groups: dict[str, Any] = {
        name: connect(rank, size, store, generation=number, transport=name) for number, name in enumerate(transports)
    }
    samples: dict[str, dict[str, list[float]]] = {}
    for num_bytes, num_calls in plan["calls"].items():
        calls = {name: prepare(name, groups, int(num_bytes)) for name in names}
        for number in range(plan["rounds"]):
            if rank == 0:
                say(f"{size} ranks, {num_bytes} bytes, round {number}")
            for name, call in calls.items():
                seconds = measure(groups["mpi"], call, num_calls)
                samples.setdefault(num_bytes, {}).setdefault(name, []).append(seconds)
    if rank == 0:
        Path(plan["out"]).write_text(json.dumps(samples))
    for group in groups.values():
        group.barrier()
        group.close()


def prepare(name: str, groups: dict[str, Any], num_bytes: int) -> Call:
    """A call that sums this many bytes of float32; it must have summed before it is timed."""
    group, tensor = groups.get(name), torch.empty(num_bytes // 4)
    if name == "shm" and group is not None:
        tensor = group.share(num_bytes).mine.view(torch.float32)
        call: Call = group.all_reduce_plan(tensor)
    elif name == "OpenMPI":
        from mpi4py import MPI

        array = tensor.numpy()
        call = lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, array)  # noqa: E731
    else:
        assert group is not None
        call = lambda: group.all_reduce(tensor).wait()  # noqa: E731
    tensor.fill_(1.0)
    call()
    if tensor.unique().tolist() != [float(groups["mpi"].size)]:
        raise AssertionError(f"{name} made {tensor.unique().tolist()} of ones")
    tensor.zero_()
    return call


def measure(group: Any, call: Call, num_calls: int) -> float:
    """Seconds a call, of the slowest rank."""
    for _ in range(max(1, num_calls // 10)):
        call()
    group.barrier()
    began = time.perf_counter()
    for _ in range(num_calls):
        call()
    seconds = torch.tensor([(time.perf_counter() - began) / num_calls], dtype=torch.float64)
    group.all_reduce(seconds, Op.MAX).wait()
    return float(seconds)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
