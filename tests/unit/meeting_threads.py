"""Ranks of a shared-memory group as threads of one process: the same code, without the cost of starting processes."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from shoal.comm import board as boards
from shoal.comm.board import Board
from shoal.comm.memory import map_memory, reserve
from shoal.comm.passing import swap_by_proc
from shoal.comm.process import describe_self
from shoal.comm.shm import ShmGroup


def run_ranks(
    size: int,
    work: Callable[[ShmGroup], Any],
    timeout_seconds: float = 20.0,
    look: Callable[[Sequence[int], float], None] = lambda ranks, seconds: None,
) -> list[Any]:
    """What `work` returned on each rank of a group."""
    control = reserve(boards.num_bytes(size))

    def serve(rank: int) -> Any:
        board = Board(map_memory(control), rank, size, timeout_seconds, lambda _: True, look)

        def gather(number: int) -> list[int]:
            board.post(np.array([number]))
            return [int(other) for other in board.peers()[:, 0]]

        group = ShmGroup(board, swap_by_proc([describe_self()] * size, rank, gather))
        try:
            return work(group)
        finally:
            group.close()

    try:
        with ThreadPoolExecutor(size) as pool:
            return [future.result() for future in [pool.submit(serve, rank) for rank in range(size)]]
    finally:
        os.close(control)
