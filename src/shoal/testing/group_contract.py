"""What every Group must do. A new one is finished when these pass.

    class TestMine(GroupContract):
        size, transport = 2, "mine"

Each check runs in real processes, one a rank, that stay for the whole class; those which kill or freeze a rank get
processes of their own.
"""

import functools
import gc
import hashlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from shoal.comm.group import DTYPES, Op
from shoal.spec.errors import MemberLost, UserError
from shoal.testing.ranks import Member, Ranks, ranks_of

# Nothing, less than a cache line, small, a page more than one block, many blocks and a bit.
SIZES = (0, 1, 7, 1000, 4097, 66_560, 300_001)
_NUMPY_OPS = {Op.SUM: np.add, Op.MAX: np.maximum, Op.MIN: np.minimum}


class GroupContract:
    """Subclass and set `size` and `transport`; `devices` where some ranks' tensors pass through main memory."""

    size: ClassVar[int]
    transport: ClassVar[str]
    devices: ClassVar[Sequence[str]] = ()

    @pytest.fixture(scope="class")
    @classmethod
    def ranks(cls) -> Iterator[Ranks]:
        with ranks_of(cls.size, cls.transport, cls.devices) as ranks:
            yield ranks

    def test_a_group_knows_its_ranks(self, ranks: Ranks) -> None:
        assert ranks.run(who) == [(rank, self.size, self.transport) for rank in range(self.size)]

    @pytest.mark.parametrize("seed", range(2))
    def test_reductions_agree_with_numpy_and_with_each_other(self, ranks: Ranks, seed: int) -> None:
        assert len(set(ranks.run(check_all_reduce, seed=seed))) == 1

    def test_reduce_scatter_gives_each_rank_its_part(self, ranks: Ranks) -> None:
        ranks.run(check_reduce_scatter, seed=5)

    def test_all_gather_and_broadcast_move_the_very_bits(self, ranks: Ranks) -> None:
        ranks.run(check_moves, seed=7)

    def test_messages_arrive_whole_and_in_order(self, ranks: Ranks) -> None:
        ranks.run(check_messages, seed=11)

    def test_both_may_ask_before_they_send(self, ranks: Ranks) -> None:
        ranks.run(check_ask_first)

    def test_shapes_survive_and_odd_tensors_are_refused(self, ranks: Ranks) -> None:
        ranks.run(check_tensors)

    def test_infinity_is_no_warning(self, ranks: Ranks) -> None:
        ranks.run(check_infinity)

    def test_a_barrier_waits_for_the_last(self, ranks: Ranks) -> None:
        came, left = zip(*ranks.run(check_barrier, seconds=0.2), strict=True)
        assert min(left) >= max(came)

    def test_generations_do_not_mix(self, ranks: Ranks) -> None:
        ranks.run(check_generations)

    def test_closing_twice_is_harmless_and_leaves_nothing_open(self, ranks: Ranks) -> None:
        for before, after in ranks.run(check_leaks):
            assert after == before

    @pytest.mark.parametrize("difference", ["size", "dtype", "op", "kind", "root", "known size", "message"])
    def test_ranks_that_disagree_are_all_told_both_sides(self, ranks: Ranks, difference: str) -> None:
        if self.size == 1:
            pytest.skip("one rank always agrees with itself")
        outcomes = ranks.attempt(disagree, difference=difference, generation=100 + hash_of(difference))
        told = outcomes[:2] if difference == "message" else outcomes
        for rank, error in enumerate(told):
            assert isinstance(error, UserError), (rank, error)
            assert f"rank {rank} called" in error.message
            assert error.message.count("called") == 2
        assert "1000 float32" in outcomes[0].message

    def test_who_closes_is_missed_only_by_those_who_wait(self, ranks: Ranks) -> None:
        if self.size == 1:
            pytest.skip("nobody is left to miss it")
        outcomes = ranks.attempt(leave_early, generation=50)
        assert outcomes[-1] is True
        for error in outcomes[:-1]:
            assert isinstance(error, MemberLost), error
            assert self.size - 1 in error.ranks

    @pytest.mark.parametrize("victim", ["first", "last"])
    def test_a_killed_rank_is_noticed_by_all(self, victim: str) -> None:
        if self.size == 1:
            pytest.skip("nobody is left to notice")
        dead = 0 if victim == "first" else self.size - 1
        with ranks_of(self.size, self.transport, self.devices) as ranks:
            ranks.start(reduce_forever, numel=200_000)
            time.sleep(0.3)
            ranks.kill(dead)
            killed = time.monotonic()
            outcomes = ranks.outcomes()
            assert outcomes.pop(dead) is None
            for error in outcomes:
                assert isinstance(error, MemberLost), error
                assert error.ranks == (dead,)
                assert vars(error)["when"] - killed < 10.0
            ranks.start(close)
            assert all(seconds < 10.0 for seconds in ranks.outcomes([r for r in range(self.size) if r != dead]))

    def test_a_frozen_rank_runs_into_the_timeout(self) -> None:
        if self.size == 1:
            pytest.skip("nobody is left to wait")
        with ranks_of(self.size, self.transport, self.devices) as ranks:
            ranks.run(join_impatiently, generation=1)
            ranks.kill(1, signal.SIGSTOP)
            ranks.start(reduce_once)
            outcomes = ranks.outcomes([rank for rank in range(self.size) if rank != 1])
            for error in outcomes:
                assert isinstance(error, MemberLost), error
                assert error.ranks == (1,)
                assert "1.5 s" in error.message


def hash_of(text: str) -> int:
    return sum(text.encode())


def who(member: Member) -> tuple[int, int, str]:
    return member.group.rank, member.group.size, member.transport


@functools.cache
def _random_values(seed: int, rank: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng([seed, rank]).uniform(-50, 50, 500_000))


def random_tensor(seed: int, rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """What `rank` holds in a check: any rank can compute it."""
    values = _random_values(seed, rank)[:numel]
    return values.clone().to(dtype) if dtype.is_floating_point else values.abs().to(dtype)


def expected(member: Member, seed: int, numel: int, dtype: torch.dtype, op: Op) -> Any:
    """The reduction over all ranks, in float64 or int64."""
    exact = torch.float64 if dtype.is_floating_point else torch.int64
    terms = [random_tensor(seed, rank, numel, dtype).to(exact).numpy() for rank in range(member.size)]
    total = terms[0]
    for term in terms[1:]:
        total = _NUMPY_OPS[op](total, term)
    return torch.from_numpy(np.array(total)).to(dtype).to(exact).numpy()


def assert_close(tensor: torch.Tensor, want: Any) -> None:
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 3e-2}.get(tensor.dtype, 0)
    got = tensor.to(torch.float64 if tensor.dtype.is_floating_point else torch.int64).numpy()
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=100 * tolerance)


def check_all_reduce(member: Member, seed: int) -> str:
    """Every dtype and op, at two random sizes each; the digest must be the same on all ranks."""
    random, digest = np.random.default_rng(seed), hashlib.sha256()
    for dtype in DTYPES:
        for op in Op:
            for numel in random.choice(SIZES, 2).tolist():
                tensor = random_tensor(seed, member.rank, numel, dtype)
                member.group.all_reduce(tensor, op).wait()
                assert_close(tensor, expected(member, seed, numel, dtype, op))
                digest.update(tensor.to(torch.float64).numpy().tobytes())
    return digest.hexdigest()


def check_reduce_scatter(member: Member, seed: int) -> None:
    for dtype in DTYPES:
        for part in (0, 5, 1024, 90_001):
            whole = random_tensor(seed, member.rank, part * member.size, dtype)
            out = torch.empty(part, dtype=dtype)
            member.group.reduce_scatter(out, whole, Op.SUM).wait()
            want = expected(member, seed, part * member.size, dtype, Op.SUM)
            assert_close(out, want[member.rank * part : (member.rank + 1) * part])


def check_moves(member: Member, seed: int) -> None:
    for dtype in DTYPES:
        for numel in SIZES:
            mine = random_tensor(seed, member.rank, numel, dtype)
            everyone = [random_tensor(seed, rank, numel, dtype) for rank in range(member.size)]
            out = torch.empty(numel * member.size, dtype=dtype)
            member.group.all_gather(out, mine).wait()
            assert torch.equal(out, torch.cat(everyone))
            root = numel % member.size
            member.group.broadcast(mine, root).wait()
            assert torch.equal(mine, everyone[root])


def check_messages(member: Member, seed: int) -> None:
    """Around the ring: small ones, one of several boxes, none at all; sent before any is taken."""
    if member.size == 1:
        return
    after, before = (member.rank + 1) % member.size, (member.rank - 1) % member.size
    sizes = (3, 400_000, 0, 5, 1, 100_000)
    sent = [member.group.send(random_tensor(seed, member.rank, numel, torch.float32), after) for numel in sizes]
    for numel in sizes:
        tensor = torch.empty(numel)
        member.group.recv(tensor, before).wait()
        assert torch.equal(tensor, random_tensor(seed, before, numel, torch.float32))
    for work in sent:
        work.wait()


def check_ask_first(member: Member) -> None:
    if member.size == 1 or member.rank > 1:
        return
    other = 1 - member.rank
    first, second = torch.zeros(4), torch.zeros(9)
    asked = [member.group.recv(first, other), member.group.recv(second, other)]
    sent = [member.group.send(torch.full((4,), 1.0), other), member.group.send(torch.full((9,), 2.0), other)]
    for work in [*reversed(asked), *sent]:
        work.wait()
    assert first.tolist() == [1.0] * 4
    assert second.tolist() == [2.0] * 9


def check_tensors(member: Member) -> None:
    weights = torch.ones(3, 5, requires_grad=True)
    member.group.all_reduce(weights).wait()
    assert weights.shape == (3, 5)
    assert weights.detach().unique().tolist() == [float(member.size)]
    for bad in (torch.ones(4, 4).t()[1:], torch.ones(3, dtype=torch.complex64), torch.ones(3, device="meta")):
        with pytest.raises(UserError):
            member.group.all_reduce(bad)
    with pytest.raises(UserError):
        member.group.all_gather(torch.ones(member.size + 1), torch.ones(1))
    with pytest.raises(UserError):
        member.group.broadcast(torch.ones(1), member.size)


def check_infinity(member: Member) -> None:
    for numel in (10, 100_000):
        tensor = torch.full((numel,), 3e38)
        member.group.all_reduce(tensor).wait()
        assert bool(torch.isinf(tensor).all()) == (member.size > 1)


def check_barrier(member: Member, seconds: float) -> tuple[float, float]:
    """When this rank came, and when it left."""
    if member.rank == 0:
        time.sleep(seconds)
    came = time.monotonic()
    member.group.barrier()
    return came, time.monotonic()


def check_generations(member: Member) -> None:
    """Two generations at once, used in turn; neither sees the other's numbers."""
    newer = member.join(7)
    for turn in range(20):
        old, new = torch.full((50,), float(turn)), torch.full((50,), 100.0 + turn)
        works = [member.group.all_reduce(old), newer.all_reduce(new)]
        for work in works:
            work.wait()
        assert old[0] == turn * member.size
        assert new[0] == (100 + turn) * member.size
    newer.barrier()
    newer.close()


def check_leaks(member: Member) -> tuple[tuple[int, int], tuple[int, int]]:
    """Descriptors and shared mappings before and after two groups came and went."""
    before = _open_things(member, 20)
    after = _open_things(member, 22)
    member.group.barrier()
    return before, after


def _open_things(member: Member, generation: int) -> tuple[int, int]:
    for number in (generation, generation + 1):
        group = member.join(number)
        group.all_reduce(torch.ones(100_000)).wait()
        group.barrier()
        group.close()
        group.close()
        member.others.remove(group)
    del group
    gc.collect()
    with open("/proc/self/maps") as file:
        num_maps = sum("shoal" in line for line in file)
    return len(os.listdir("/proc/self/fd")), num_maps


def disagree(member: Member, difference: str, generation: int) -> None:
    """Rank 0 reduces 1000 floats; the last (for messages: the second) does something else."""
    group = member.join(generation)
    is_odd = member.rank == (1 if difference == "message" else member.size - 1)
    if difference == "known size":  # both calls have been made before, so nothing about either is new
        for numel in (1000, 2000):
            group.all_reduce(torch.ones(numel)).wait()
    numel = 2000 if is_odd and "size" in difference else 1000
    tensor = torch.ones(numel, dtype=torch.float64 if is_odd and difference == "dtype" else torch.float32)
    if difference == "message":
        if member.rank == 0:
            group.send(tensor, 1).wait()
        elif member.rank == 1:
            group.recv(torch.ones(500), 0).wait()
    elif difference == "kind" and is_odd:
        group.barrier()
    elif difference == "root":
        group.broadcast(tensor, 1 if is_odd else 0).wait()
    else:
        group.all_reduce(tensor, Op.MAX if is_odd and difference == "op" else Op.SUM).wait()


def leave_early(member: Member, generation: int) -> bool:
    """The last rank closes after one call; the others try a second."""
    group = member.join(generation)
    group.all_reduce(torch.ones(10)).wait()
    if member.rank == member.size - 1:
        group.close()
        return True
    group.all_reduce(torch.ones(10)).wait()
    return False


def reduce_forever(member: Member, numel: int) -> None:
    tensor = torch.zeros(numel)
    while True:
        member.group.all_reduce(tensor).wait()


def close(member: Member) -> float:
    """Seconds it takes to leave."""
    began = time.monotonic()
    member.group.close()
    return time.monotonic() - began


def join_impatiently(member: Member, generation: int) -> None:
    member.group = member.join(generation, timeout_seconds=1.5)
    member.group.all_reduce(torch.ones(10)).wait()


def reduce_once(member: Member) -> None:
    member.group.all_reduce(torch.ones(10)).wait()
