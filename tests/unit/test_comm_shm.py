"""Shared-memory collectives, ranks as threads: what depends on where tensors live and how many ranks there are."""

import gc
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from meeting_threads import at_once, make_ranks, run_ranks

from shoal.comm.group import Op
from shoal.comm.shm import ShmGroup
from shoal.spec.errors import MemberLost, UserError

NUMEL = 600_003  # more than one slot of the stage, and no multiple of anything


def values(rank: int, numel: int = NUMEL) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(rank).standard_normal(numel).astype(np.float32))


def in_rank_order(size: int, numel: int = NUMEL) -> torch.Tensor:
    total = values(0, numel)
    for rank in range(1, size):
        total = total + values(rank, numel)
    return total


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_tensors_in_shared_memory_are_summed_in_rank_order(size: int) -> None:
    def work(group: ShmGroup) -> torch.Tensor:
        shared = group.share(4 * NUMEL + 64)
        tensor = shared.mine[64:].view(torch.float32)
        tensor.copy_(values(group.rank))
        plan = group.all_reduce_plan(tensor)
        plan()
        first = tensor.clone()
        tensor.copy_(values(group.rank))
        plan()
        assert torch.equal(first, tensor)
        return first

    for result in run_ranks(size, work):
        assert torch.equal(result, in_rank_order(size))


@pytest.mark.parametrize("size", [2, 3, 5])
def test_private_tensors_give_the_same_bits_as_shared_ones(size: int) -> None:
    def work(group: ShmGroup) -> torch.Tensor:
        tensor = values(group.rank)
        group.all_reduce(tensor).wait()
        return tensor

    for result in run_ranks(size, work):
        assert torch.equal(result, in_rank_order(size))


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_whose_tensors_live_in_different_places_still_agree(size: int) -> None:
    def work(group: ShmGroup) -> torch.Tensor:
        shared = group.share(8 * NUMEL + 64)
        offset = 64 * (group.rank % 2)
        tensor = values(0) if group.rank == 0 else shared.mine[offset : offset + 4 * NUMEL].view(torch.float32)
        tensor.copy_(values(group.rank))
        group.all_reduce(tensor).wait()
        return tensor.clone()

    for result in run_ranks(size, work):
        assert torch.equal(result, in_rank_order(size))


def test_bfloat16_in_shared_memory() -> None:
    def work(group: ShmGroup) -> list[float]:
        tensor = group.share(2 * 50_000).mine.view(torch.bfloat16)
        tensor.fill_(group.rank + 0.5)
        group.all_reduce(tensor, Op.MAX).wait()
        return tensor.unique().tolist()

    assert run_ranks(3, work) == [[2.5]] * 3


def test_reduce_scatter_reads_shared_memory_in_place() -> None:
    size, part = 3, 70_000

    def work(group: ShmGroup) -> torch.Tensor:
        whole = group.share(4 * part * size).mine.view(torch.float32)
        whole.copy_(values(group.rank, part * size))
        out = torch.empty(part)
        group.reduce_scatter(out, whole).wait()
        assert torch.equal(whole, values(group.rank, part * size))
        return out

    assert torch.equal(torch.cat(run_ranks(size, work)), in_rank_order(size, part * size))


def test_everyone_sees_everyones_memory_and_one_common_piece() -> None:
    def work(group: ShmGroup) -> tuple[list[int], list[int]]:
        shared, common = group.share(100), group.common(10_000)
        assert shared.mine.data_ptr() % 4096 == 0
        assert len(common) == 10_000
        assert shared.mine.sum() == 0
        shared.mine.fill_(group.rank + 1)
        common[group.rank] = 7
        group.barrier()
        return [int(piece[99]) for piece in shared.all], common[:3].tolist()

    assert run_ranks(3, work) == [([1, 2, 3], [7, 7, 7])] * 3


def test_sizes_of_shared_memory_must_agree() -> None:
    def work(group: ShmGroup) -> str:
        with pytest.raises(UserError) as caught:
            group.share(100 + group.rank)
        group.barrier()
        return caught.value.message

    assert "share of 100" in run_ranks(2, work)[1]


def test_numbers_travel_with_every_bit() -> None:
    def work(group: ShmGroup) -> None:
        for turn in range(50):
            group.post(np.array([group.rank + turn, -0.0, np.inf]))
            assert group.peers().tolist() == [[rank + turn, -0.0, np.inf] for rank in range(3)]
            group.post(np.array([2**62 + group.rank, -turn]))
            assert group.peers().tolist() == [[2**62 + rank, -turn] for rank in range(3)]

    run_ranks(3, work)


def test_a_wait_names_the_last_to_arrive() -> None:
    def work(group: ShmGroup) -> int:
        if group.rank == 2:
            group.wait(3, 9, [0, 1])
        group.signal(3, 9)
        last = group.wait(3, 9)
        stamps = group.arrivals(3, 9)
        assert stamps[2] == max(stamps)
        return last

    assert run_ranks(3, work) == [2, 2, 2]


def test_channels_do_not_disturb_each_other() -> None:
    def work(group: ShmGroup) -> None:
        for value in range(1, 30):
            for channel in (0, 15, 7):
                group.signal(channel, value)
            for channel in (7, 15, 0):
                group.wait(channel, value, [1 - group.rank])
            group.barrier()

    run_ranks(2, work)


def test_all_silent_ranks_are_named() -> None:
    def work(group: ShmGroup) -> tuple[int, ...]:
        if group.rank == 0:
            with pytest.raises(MemberLost) as caught:
                group.wait(0, 1)
            assert "stopped, stuck" in caught.value.why
            group.signal(1, 1)
            return caught.value.ranks
        group.wait(1, 1, [0])
        return ()

    # The others wait as long as rank 0, so their patience is measured from when they began.
    assert run_ranks(3, lambda group: work(with_patience(group, 0.3 if group.rank == 0 else 20)))[0] == (1, 2)


def with_patience(group: ShmGroup, seconds: float) -> ShmGroup:
    group._board.timeout_seconds = seconds
    return group


def fill(group: ShmGroup) -> None:
    """Everybody leaves something of its own in each kind of memory."""
    shared = group.share(100, "shared")
    group.barrier()
    shared.mine.fill_(10 + group.rank)
    common = group.common(100, "common")
    if group.rank == 1:
        common.fill_(7)
    group.common(100).fill_(1)
    group.barrier()


def test_memory_that_has_a_name_goes_over_into_the_next_group() -> None:
    first = make_ranks(3)
    at_once(fill, first)
    # The first rank is gone, the others follow each other, and somebody new is the last.
    second = make_ranks(3, [first[1], first[2], None])

    def look(group: ShmGroup) -> tuple[list[int], int, int]:
        shared, common, other = group.share(100, "shared"), group.common(100, "common"), group.common(100)
        group.barrier()
        return [int(each[99]) for each in shared.all], int(common[99]), int(other[99])

    assert at_once(look, second) == [([11, 12, 0], 7, 0)] * 3
    for group in (*first, *second):
        group.close()


def test_it_is_the_same_memory_and_is_gone_with_the_last_group() -> None:
    first = make_ranks(2)
    before = at_once(lambda group: group.common(100, "common"), first)
    second = make_ranks(2, first)
    after = at_once(lambda group: group.common(100, "common"), second)
    assert [each.data_ptr() for each in after] == [each.data_ptr() for each in before], "nothing was mapped again"
    numbers = [group._meeting.kept["common"].given.number for group in second]
    for group in (*first, *second):
        group.close()
    for number in numbers:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(number)


def test_memory_of_another_size_is_new() -> None:
    first = make_ranks(2)
    at_once(fill, first)
    second = make_ranks(2, first)
    shared = at_once(lambda group: group.share(200, "shared"), second)
    assert {int(each.sum()) for of_rank in shared for each in of_rank.all} == {0}
    for group in (*first, *second):
        group.close()


def test_no_memory_waits_for_the_garbage_collector() -> None:
    def num_maps() -> int:
        return Path("/proc/self/maps").read_text().count("/memfd:shoal")

    gc.collect()
    gc.disable()
    try:
        others, groups = num_maps(), make_ranks(2)
        at_once(fill, groups)
        first = num_maps()
        for _ in range(3):
            before, groups = groups, make_ranks(2, [groups[1], None])
            at_once(fill, groups)
            for group in before:
                group.close()
            del before, group
        assert num_maps() == first
        for group in groups:
            group.close()
        del groups, group
        assert num_maps() == others
    finally:
        gc.enable()
