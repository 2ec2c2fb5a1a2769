"""A worker is killed, and what only it held is recovered bit for bit from the memory of another. Real processes."""

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch

from shoal.checkpoint.redundant import RedundantStore
from shoal.checkpoint.state import digest
from shoal.comm.connect import connect
from shoal.spec.errors import MemberLost
from shoal.testing.ranks import Member, ranks_of

STORES: dict[int, Any] = {}  # in each process: its store


def part_of(rank: int, step: int, numel: int = 3000) -> dict[str, torch.Tensor]:
    """What only this rank holds; ranks have parts of different sizes."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    weights = torch.randn(numel + 17 * rank, generator=generator)
    return {"optimizer/weights": weights, "optimizer/half": weights.to(torch.bfloat16), "count": torch.tensor(step)}


def keep(member: Member, steps: list[int], redundancy: int = 1, numel: int = 3000) -> int:
    store = STORES.setdefault(0, RedundantStore(member.group, redundancy))
    for step in steps:
        store.keep(step, part_of(member.rank, step, numel))
    return int(store.num_bytes)


def keep_and_die(member: Member, step: int, victim: int, delay: float) -> str:
    """The victim is killed so many seconds after it began to keep this step."""
    if member.rank == victim:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        if delay == 0.0:
            time.sleep(5)
    try:
        STORES[0].keep(step, part_of(member.rank, step, 400_000))
    except MemberLost:
        return "lost"
    time.sleep(0.3 if member.rank == victim else 0.0)
    return "kept"


def recover(member: Member, survivors: list[int]) -> dict[str, Any]:
    if member.rank not in survivors:
        return {}
    rank = survivors.index(member.rank)
    group = connect(rank, len(survivors), member.store, generation=7, transport=member.transport, timeout_seconds=20)
    member.others.append(group)
    try:
        found = STORES[0].recover(group, survivors)
    except MemberLost as error:
        return {"lost": error.ranks}
    inherited = {owner: digest(tensors) for owner, tensors in found.inherited.items()}
    return {"step": found.step, "own": digest(found.own), "inherited": inherited}


def check(outcomes: list[dict[str, Any]], survivors: list[int], lost: list[int], numel: int) -> int:
    """All survivors agree on a step; their own parts and those of the lost are as they were. Returns the step."""
    (step,) = {outcome["step"] for outcome in outcomes}
    for rank, outcome in zip(survivors, outcomes, strict=True):
        assert outcome["own"] == digest(part_of(rank, step, numel))
    inherited = [item for outcome in outcomes for item in outcome["inherited"].items()]
    assert sorted(inherited) == sorted((rank, digest(part_of(rank, step, numel))) for rank in lost)
    return int(step)


@pytest.mark.parametrize(("size", "transport"), [(2, "shm"), (3, "tcp"), (4, "shm"), (5, "shm")])
def test_a_killed_worker_is_recovered_bit_for_bit(size: int, transport: str):
    victim = size // 2
    survivors = [rank for rank in range(size) if rank != victim]
    with ranks_of(size, transport) as ranks:
        held = ranks.run(keep, steps=[1, 2, 3])
        assert all(num_bytes < 2 * 2 * 20_000 for num_bytes in held)
        ranks.kill(victim)
        ranks.processes[victim].join()
        ranks.start(recover, survivors=survivors)
        assert check(ranks.outcomes(survivors), survivors, [victim], 3000) == 3


@pytest.mark.parametrize("delay", [0.0, 0.0005, 0.002, 0.004])
def test_death_in_the_middle_of_keeping_leaves_the_step_before(delay: float):
    with ranks_of(3, "shm") as ranks:
        ranks.run(keep, steps=[1, 2], numel=400_000)
        ranks.start(keep_and_die, step=3, victim=1, delay=delay)
        told = ranks.outcomes([0, 2])
        ranks.processes[1].join()
        assert set(told) <= {"lost", "kept"}
        ranks.start(recover, survivors=[0, 2])
        assert check(ranks.outcomes([0, 2]), [0, 2], [1], 400_000) in ((2,) if delay == 0.0 else (2, 3))


def test_two_neighbours_lost_need_redundancy_two():
    for redundancy in (1, 2):
        with ranks_of(4, "shm") as ranks:
            ranks.run(keep, steps=[5, 6], redundancy=redundancy)
            for victim in (1, 2):
                ranks.kill(victim)
                ranks.processes[victim].join()
            ranks.start(recover, survivors=[0, 3])
            outcomes = ranks.outcomes([0, 3])
            if redundancy == 1:
                assert outcomes == [{"lost": (1, 2)}] * 2
            else:
                assert check(outcomes, [0, 3], [1, 2], 3000) == 6
