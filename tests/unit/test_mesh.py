"""Who holds which part of which copy, also after some were lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as some

from shoal.train.mesh import Mesh, Seats, find_seats


def test_all_keep_their_parts():
    assert find_seats([0, 1, 0, 1], 2) == Seats(workers=(0, 1, 2, 3), sources=(0, 1))


def test_the_rest_of_a_broken_copy_waits():
    """The second part of copy 1 was lost."""
    assert find_seats([0, 1, 0], 2) == Seats(workers=(0, 1), sources=(0, 1))


def test_the_rests_of_two_copies_make_one():
    assert find_seats([0, 1], 2).workers == (0, 1)
    assert find_seats([1, 0], 2).workers == (1, 0)


def test_newcomers_take_what_is_lacking():
    assert find_seats([0, 1, 0, None], 2) == Seats(workers=(0, 1, 2, 3), sources=(0, 1))
    assert find_seats([1, 0, 1, None], 2).workers == (1, 0, 3, 2)


def test_one_too_many_of_a_part_takes_another():
    assert find_seats([0, 0, 0, 1], 2).workers == (0, 3, 1, 2)


def test_a_part_that_nobody_holds():
    seats = find_seats([0, None, 0, None], 2)
    assert not seats.is_whole
    assert seats.sources == (0, None)


def test_too_few_for_a_copy():
    assert find_seats([1], 2) == Seats(workers=(), sources=(None, None))


def test_a_model_that_is_not_cut():
    assert find_seats([0, 0, None], 1) == Seats(workers=(0, 1, 2), sources=(0,))


@given(some.integers(1, 4), some.data())
def test_seats_are_given_once_and_holders_first(num_parts, data):
    held = data.draw(some.lists(some.none() | some.integers(0, num_parts - 1), max_size=12))
    seats = find_seats(held, num_parts)
    num_copies = len(held) // num_parts
    mesh = Mesh(num_copies=num_copies, num_parts=num_parts)
    assert len(set(seats.workers)) == len(seats.workers) == num_copies * num_parts
    for part in range(num_parts):
        source = seats.sources[part]
        holders = held.count(part)
        assert (source is not None) == (holders > 0 and num_copies > 0)
        if source is not None:
            assert held[seats.workers[source]] == part
        kept = sum(held[seats.workers[mesh.rank(copy, part)]] == part for copy in range(num_copies))
        assert kept == min(holders, num_copies), "nobody gives up a part that is needed"


@pytest.mark.parametrize("num_parts", [1, 2, 3])
def test_the_first_copy_is_made_of_holders(num_parts):
    held = [None, *range(num_parts), None, None]
    seats = find_seats(held, num_parts)
    assert [held[worker] for worker in seats.workers[:num_parts]] == list(range(num_parts))
