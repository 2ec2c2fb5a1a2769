"""Who hands on which part of divided state, from what the members of the next World say they hold."""

from hypothesis import given
from hypothesis import strategies as some

from shoal.train.inherit import Claim, find_will


def claims_of(size: int, survivors: list[int], generation: int = 4) -> list[list[Claim]]:
    """What survivors of a World of that size claim: their own part, and the mirror of the one before."""
    parts = {rank: (rank, (rank - 1) % size) if size > 1 else (rank,) for rank in range(size)}
    return [[Claim(generation=generation, num_parts=size, parts=parts[rank])] for rank in survivors]


def test_owners_hand_out_their_own_parts():
    will = find_will(claims_of(3, [0, 1, 2]))
    assert (will.givers, will.mirrored, will.lost) == ((0, 1, 2), (), ())


def test_the_neighbour_hands_out_the_part_of_one_who_was_lost():
    will = find_will(claims_of(3, [0, 2]))
    assert (will.givers, will.mirrored, will.lost) == ((0, 1, 1), (1,), ())


def test_newcomers_bring_nothing():
    will = find_will([*claims_of(2, [1]), [], []])
    assert (will.givers, will.mirrored) == ((0, 0), (0,))


def test_a_part_and_its_mirror_are_lost_together():
    will = find_will([*claims_of(4, [0, 3]), []])
    assert will.lost == (1,)
    assert will.is_divided


def test_state_that_is_not_divided():
    will = find_will([[Claim(generation=2, num_parts=0)], []])
    assert not will.is_divided
    assert not will.lost


def test_some_had_entered_the_next_world_and_some_had_not():
    """Rank 0 has left World 4 behind; the others have what they need of World 5, too. The newcomer died in it."""
    four, five = claims_of(3, [0, 1, 2], 4), claims_of(3, [0, 1], 5)
    will = find_will([five[0], four[1] + five[1]])
    assert (will.generation, will.givers, will.mirrored) == (5, (0, 1, 0), (2,))


def test_what_the_next_world_lacks_the_last_one_has():
    """Rank 1 was not done with World 5 when the newcomer and another one died."""
    four, five = claims_of(2, [0, 1], 4), claims_of(3, [0], 5)
    will = find_will([four[0] + five[0], four[1]])
    assert (will.generation, will.givers) == (4, (0, 1))


@given(some.integers(1, 8), some.data())
def test_only_neighbours_lost_together_are_lost(size, data):
    survivors = sorted(data.draw(some.sets(some.integers(0, size - 1), min_size=1)))
    will = find_will(claims_of(size, survivors))
    gone = [rank for rank in range(size) if rank not in survivors]
    assert will.lost == tuple(rank for rank in gone if (rank + 1) % size in gone)
    held = [(part, survivors[giver]) for part, giver in enumerate(will.givers) if giver is not None]
    assert all(rank in (part, (part + 1) % size) for part, rank in held)
