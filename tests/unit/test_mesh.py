"""Who holds which part of the model in a World, and who has nothing to do in it."""

import pytest
from hypothesis import given
from hypothesis import strategies as some

from shoal.spec.errors import UserError
from shoal.spec.strategy import combine, pipeline, tensor
from shoal.train.mesh import Mesh, find_seats, make_mesh


def parts(count):
    return Mesh(num_copies=1, num_parts=count)


def test_copies_are_made_of_neighbours():
    seats = find_seats([0, 1, 2, 3], [], parts(2))
    assert (seats.mesh.num_copies, seats.members, seats.lost) == (2, (0, 1, 2, 3), ())


def test_after_a_loss_one_copy_goes_on_and_one_worker_is_left_over():
    assert find_seats([0, 1, 2], [0, 1, 2], parts(2)).members == (0, 1)
    assert find_seats([0, 2, 3], [0, 1, 2], parts(2)).members == (0, 2)


def test_who_holds_the_state_is_in_the_first_copy():
    """Worker 2 stood aside while 0 and 3 went on; 1 is new."""
    seats = find_seats([0, 3, 1, 2], [0, 1], parts(2))
    assert seats.members == (0, 1, 3, 2)
    assert seats.lost == ()


def test_a_part_whose_holders_are_all_gone_is_lost():
    assert find_seats([0, 2, 1, 3], [0, 1], parts(2)).lost == (1,)
    assert find_seats([0], [0], parts(2)).lost == (1,)


def test_too_few_for_a_copy_have_no_seats():
    seats = find_seats([0, 2], [], parts(2))
    assert (seats.mesh.num_copies, seats.members, seats.lost) == (0, (), ())


def test_without_a_split_everybody_has_a_seat():
    assert find_seats([0, 1, 2], [1], parts(1)).members == (1, 0, 2)


@given(some.integers(1, 4), some.data())
def test_seats_are_given_once_and_holders_first(num_parts, data):
    workers = data.draw(some.lists(some.integers(0, 11), unique=True, max_size=12))
    holders = sorted(data.draw(some.sets(some.sampled_from(range(len(workers)))))) if workers else []
    seats = find_seats(workers, holders, parts(num_parts))
    assert len(set(seats.members)) == len(seats.members) == seats.mesh.num_copies * num_parts
    for seat, position in enumerate(seats.members):
        assert workers[position] % num_parts == seats.mesh.part_of(seat)
    if holders and not seats.lost:
        assert set(seats.members[:num_parts]) <= set(holders)
    assert seats.mesh.num_copies == min(sum(w % num_parts == part for w in workers) for part in range(num_parts))


def test_an_elastic_run_may_have_workers_left_over_but_needs_one_copy():
    assert make_mesh(5, pipeline(2), is_elastic=True).num_copies == 2
    with pytest.raises(UserError, match="cannot hold copies of 2 parts"):
        make_mesh(1, pipeline(2), is_elastic=True)


def test_stages_of_slices_are_neighbours():
    mesh = make_mesh(12, combine((tensor(2), pipeline(3))))
    assert (mesh.num_copies, mesh.num_parts, mesh.num_slices) == (2, 6, 2)
    assert [mesh.with_stage(rank) for rank in (0, 3, 10)] == [(0, 1), (2, 3), (10, 11)]
    assert [mesh.with_slice(rank) for rank in (0, 3, 10)] == [(0, 2, 4), (1, 3, 5), (6, 8, 10)]
