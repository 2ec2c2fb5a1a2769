"""One rank of `test_group_mpi.py`, started by mpirun: `mpi_rank.py SOCKET PORT`. It does what the test asks."""

import os
import sys
from multiprocessing.connection import Client

from mpi4py import MPI

from shoal.testing import ranks


def main(socket: str, port: int) -> None:
    world = MPI.COMM_WORLD
    with Client(socket, "AF_UNIX") as pipe:
        pipe.send((world.Get_rank(), os.getpid()))
        ranks._serve(world.Get_rank(), world.Get_size(), "mpi", "cpu", port, pipe)
    # Who was asked to disagree or to leave has left things open that the end of MPI would wait for.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
