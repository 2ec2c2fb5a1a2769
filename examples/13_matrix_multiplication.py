"""A matrix product in which no worker ever holds a whole matrix: SUMMA on a grid of workers.

    python examples/13_matrix_multiplication.py                  one process, a grid of 1 x 1
    shoal run -n 2 examples/13_matrix_multiplication.py          1 x 2
    shoal run -n 4 examples/13_matrix_multiplication.py          2 x 2

Each worker has one block of A, of B and of C = A B. In each step the owners of one column of A's blocks send theirs
along their rows, the owners of one row of B's along their columns, and everybody adds one product to its C. The next
panels travel while this one is multiplied. A worker receives (rows + columns) blocks, whatever the size of the grid.
"""

from concurrent.futures import ThreadPoolExecutor
from math import isqrt

import torch

import shoal
from shoal.comm.group import Op

SIZE = 720


def make_grid(world):
    """The most square grid: rows x columns = workers. My row and column, and a group for each."""
    num_rows = max(rows for rows in range(1, isqrt(world.size) + 1) if world.size % rows == 0)
    num_columns = world.size // num_rows
    row, column = divmod(world.rank, num_columns)
    along_row = shoal.group([row * num_columns + other for other in range(num_columns)])
    along_column = shoal.group([other * num_columns + column for other in range(num_rows)])
    return (num_rows, num_columns), (row, column), along_row, along_column


def panel(name, rows, columns):
    """A part of a matrix, made where it is needed: element (i, j) is a function of i and j, and of the name."""
    i, j = torch.meshgrid(rows.double(), columns.double(), indexing="ij")
    return torch.sin(0.37 * i + 1.3 * j) if name == "A" else torch.cos(0.11 * i - 0.7 * j)


def cut(num_parts, part):
    """The indices of one part."""
    step = SIZE // num_parts
    return torch.arange(part * step, (part + 1) * step)


def multiply(world):
    (num_rows, num_columns), (row, column), along_row, along_column = make_grid(world)
    mine_of_A = panel("A", cut(num_rows, row), cut(num_columns, column))
    mine_of_B = panel("B", cut(num_rows, row), cut(num_columns, column))
    # Panels must fit into both cuts of the inner dimension.
    num_panels = num_rows * num_columns
    width = SIZE // num_panels
    C = torch.zeros(SIZE // num_rows, SIZE // num_columns, dtype=torch.float64)

    def fetch(number):
        """Everybody's part of panel `number`: columns of A along the rows, rows of B along the columns."""
        of_A, at_A = divmod(number * width, SIZE // num_columns)
        of_B, at_B = divmod(number * width, SIZE // num_rows)
        A = mine_of_A[:, at_A : at_A + width].contiguous() if column == of_A else torch.empty(len(C), width).double()
        B = mine_of_B[at_B : at_B + width].contiguous() if row == of_B else torch.empty(width, C.shape[1]).double()
        along_row.broadcast(A, root=of_A).wait()
        along_column.broadcast(B, root=of_B).wait()
        return A, B

    with ThreadPoolExecutor(1) as mover:  # one thread, so that everybody's calls have the same order
        coming = mover.submit(fetch, 0)
        for number in range(num_panels):
            A, B = coming.result()
            if number + 1 < num_panels:
                coming = mover.submit(fetch, number + 1)
            C.addmm_(A, B)
    for group in (along_row, along_column):
        group.close()
    return C, cut(num_rows, row), cut(num_columns, column)


def main():
    world = shoal.group()
    C, rows, columns = multiply(world)
    # The check: my block, computed alone from whole rows of A and whole columns of B.
    everything = torch.arange(SIZE)
    alone = panel("A", rows, everything) @ panel("B", everything, columns)
    worst = (C - alone).abs().max().reshape(1)
    world.all_reduce(worst, Op.MAX).wait()
    if world.rank == 0:
        blocks = f"{world.size} block{'s' * (world.size != 1)} of {C.shape[0]} x {C.shape[1]}"
        print(f"{SIZE} x {SIZE} in {blocks}: largest difference to one process {worst.item():.1e}")
    assert worst.item() < 1e-9
    world.close()


main()
