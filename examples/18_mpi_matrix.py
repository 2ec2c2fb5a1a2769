"""A matrix product with mpi4py: rows of A scattered, columns of B passed around a ring, nothing ever pickled.

    mpirun -n 4 python examples/18_mpi_matrix.py
    mpirun -n 4 shoal worker examples/18_mpi_matrix.py        the same, and a failing rank ends the others
    python examples/18_mpi_matrix.py                          one process

Each rank has some rows of A and some columns of B. In each step it multiplies its rows with the columns that it has,
hands those on to the next rank, and gets others from the one before: they travel while the next product is computed.
No rank but 0, which made them and checks the result, ever holds a whole matrix. Sizes need not divide evenly.
"""

import numpy as np
from mpi4py import MPI

ROWS, INNER, COLUMNS = 1000, 700, 900
comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()


def cut(total):
    """How many rows each rank has, and where they begin."""
    counts = np.array([total // size + (number < total % size) for number in range(size)])
    return counts, np.concatenate([[0], np.cumsum(counts)[:-1]])


def scatter(matrix, total):
    """My rows of a matrix that rank 0 has. Buffers are passed as they are, with counts in elements."""
    counts, starts = cut(total)
    mine = np.empty((counts[rank], INNER))
    whole = [matrix, counts * INNER, starts * INNER, MPI.DOUBLE] if rank == 0 else None
    comm.Scatterv(whole, mine, root=0)
    return mine


def multiply(A, B):
    """My rows of C. `A` are my rows, `B` my columns, as rows of the transposed matrix."""
    counts, starts = cut(COLUMNS)
    C = np.empty((len(A), COLUMNS))
    # Room for the largest part: while one is multiplied, the next one comes in.
    here, coming = np.zeros((counts.max(), INNER)), np.empty((counts.max(), INNER))
    here[: len(B)] = B
    for step in range(size):
        travelling = []
        if step + 1 < size:
            travelling = [comm.Isend(here, (rank + 1) % size), comm.Irecv(coming, (rank - 1) % size)]
        owner = (rank - step) % size
        C[:, starts[owner] : starts[owner] + counts[owner]] = A @ here[: counts[owner]].T
        MPI.Request.Waitall(travelling)
        here, coming = coming, here
    return C


def gather(mine):
    """All rows of C, on rank 0."""
    counts, starts = cut(ROWS)
    C = np.empty((ROWS, COLUMNS)) if rank == 0 else None
    comm.Gatherv(mine, [C, counts * COLUMNS, starts * COLUMNS, MPI.DOUBLE] if rank == 0 else None, root=0)
    return C


random = np.random.default_rng(0)
A = random.standard_normal((ROWS, INNER)) if rank == 0 else None
B = random.standard_normal((INNER, COLUMNS)) if rank == 0 else None
began = MPI.Wtime()
C = gather(multiply(scatter(A, ROWS), scatter(np.ascontiguousarray(B.T) if rank == 0 else None, COLUMNS)))
seconds = MPI.Wtime() - began
if rank == 0:
    worst = abs(C - A @ B).max()
    print(f"{ROWS} x {INNER} times {INNER} x {COLUMNS} by {size} ranks in {seconds:.2f} s: ", end="")
    print(f"largest difference to numpy {worst:.1e}")
    assert worst < 1e-9
