"""Who holds what, and which step is complete: decided by pure functions, each worker for itself."""

import itertools

import pytest
import torch

from shoal.checkpoint.packing import Part, is_intact, pack, unpack
from shoal.checkpoint.redundant import RedundantStore, heirs_of, held_by, holders_of, newest_complete
from shoal.checkpoint.state import digest
from shoal.spec.errors import UserError

TENSORS = {"optimizer/a": torch.randn(5, 3), "optimizer/b": torch.arange(7, dtype=torch.int8), "c": torch.tensor(2.5)}


def test_holders_are_the_next_ones_round_and_round():
    assert holders_of(0, 4, 1) == (1,)
    assert holders_of(3, 4, 2) == (0, 1)
    assert holders_of(0, 1, 1) == ()
    assert holders_of(0, 3, 9) == (1, 2)


@pytest.mark.parametrize(("size", "redundancy"), list(itertools.product(range(2, 7), range(1, 4))))
def test_any_loss_up_to_the_redundancy_leaves_a_copy(size, redundancy):
    for rank in range(size):
        assert rank not in holders_of(rank, size, redundancy)
        assert all(rank in held_by(holder, size, redundancy) for holder in holders_of(rank, size, redundancy))
    for lost in itertools.combinations(range(size), min(redundancy, size - 1)):
        holdings = {
            rank: [(owner, 1) for owner in (rank, *held_by(rank, size, redundancy))]
            for rank in range(size)
            if rank not in lost
        }
        assert newest_complete(holdings, size) == 1
        assert set(heirs_of(lost, 1, holdings)) == set(lost)


def test_the_newest_complete_step():
    both = [(0, 1), (1, 1), (0, 2), (1, 2)]
    assert newest_complete({0: both}, 2) == 2
    assert newest_complete({0: [(0, 1), (1, 1), (0, 2)]}, 2) == 1
    assert newest_complete({0: [(0, 2)]}, 2) is None
    # A survivor without its own part cannot go on from there, even if another has it.
    assert newest_complete({0: [(0, 1), (1, 1)], 1: [(0, 1)]}, 2) is None


def test_a_part_proves_itself():
    part = pack(3, 7, TENSORS)
    assert digest(unpack(part)) == digest(TENSORS)
    assert not is_intact(Part(owner=2, step=7, data=part.data))
    assert not is_intact(Part(owner=3, step=8, data=part.data))
    for position in range(0, len(part.data), 7):
        part.data[position] ^= 1
        assert not is_intact(part), position
        part.data[position] ^= 1
    part.data[-1] ^= 1
    with pytest.raises(UserError, match="rank 3 had at step 7 is damaged"):
        unpack(part)


class Alone:
    """A group of one that could be asked for more."""

    rank, size = 0, 1


def test_redundancy_needs_others():
    with pytest.raises(UserError, match="redundancy=0"):
        RedundantStore(Alone(), 0)
    with pytest.raises(UserError, match="redundancy=2"):
        RedundantStore(Alone(), 2)
