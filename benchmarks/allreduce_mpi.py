"""One round of OpenMPI's all_reduce, for `allreduce.py`: run by mpirun, prints seconds a call for each size as JSON.

Needs mpi4py and numpy only, so that it can live in an environment of its own.
"""

import json
import sys
import time

import numpy as np
from mpi4py import MPI


def measure(comm: MPI.Comm, num_bytes: int, calls: int, warm_seconds: float) -> float:
    buffer = np.zeros(num_bytes // 4, np.float32)
    end = time.perf_counter() + warm_seconds
    comm.Allreduce(MPI.IN_PLACE, buffer)
    while comm.allreduce(time.perf_counter() < end, MPI.LAND):
        comm.Allreduce(MPI.IN_PLACE, buffer)
    comm.Barrier()
    began = time.perf_counter()
    for _ in range(calls):
        comm.Allreduce(MPI.IN_PLACE, buffer)
    return comm.allreduce((time.perf_counter() - began) / calls, MPI.MAX)


def run() -> None:
    comm, plan = MPI.COMM_WORLD, json.loads(sys.argv[1])
    seconds = {size: measure(comm, int(size), calls, plan["warm_seconds"]) for size, calls in plan["calls"].items()}
    if comm.Get_rank() == 0:
        print(json.dumps(seconds))


if __name__ == "__main__":
    run()
