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
    groups = make_ranks(size, timeout_seconds=timeout_seconds, look=look)

    def serve(group: ShmGroup) -> Any:
        try:
            return work(group)
        finally:
            group.close()

    return at_once(serve, groups)


def make_ranks(
    size: int,
    before: Sequence[ShmGroup | None] = (),
    timeout_seconds: float = 20.0,
    look: Callable[[Sequence[int], float], None] = lambda ranks, seconds: None,
) -> list[ShmGroup]:
    """A group, as each of its ranks has it. `before` are the groups that they have been in."""
    control = reserve(boards.num_bytes(size))

    def make(rank: int) -> ShmGroup:
        board = Board(map_memory(control), rank, size, timeout_seconds, lambda _: True, look)

        def gather(number: int) -> list[int]:
            board.post(np.array([number]))
            return [int(other) for other in board.peers()[:, 0]]

        swap = swap_by_proc([describe_self()] * size, rank, gather)
        return ShmGroup(board, swap, before=before[rank] if rank < len(before) else None)

    try:
        return at_once(make, range(size))
    finally:
        os.close(control)


def at_once(work: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """What `work` returned for each item, all at the same time."""
    with ThreadPoolExecutor(len(items)) as pool:
        return [future.result() for future in [pool.submit(work, item) for item in items]]
