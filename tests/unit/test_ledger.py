"""Who reads which sample: exactly once, in one order, for any workers, shares and interruptions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data.ledger import Cut, Ledger, Place, check_batch_size, cut_step, plan_step, plan_steps
from shoal.data.shares import assign
from shoal.spec.errors import UserError

ledgers = st.builds(
    Ledger,
    num_samples=st.integers(1, 300),
    batch_size=st.integers(1, 80),
    num_shards=st.integers(1, 24),
    seed=st.integers(0, 2**63),
    shuffle=st.booleans(),
)
worlds = st.lists(st.floats(0, 10), min_size=1, max_size=7).filter(lambda shares: sum(shares) > 0.01)


def samples_of_step(ledger: Ledger, position: int, shares: list[float], **how: object) -> np.ndarray:
    """What all workers together read in a step, in the order of ranks."""
    plans = [plan_step(ledger, position, mine, **how) for mine in assign(ledger.num_shards, shares)]
    assert {plan.count for plan in plans} == {sum(plan.num_samples for plan in plans)}
    return np.concatenate([piece.ids for plan in plans for piece in plan.pieces] or [np.empty(0, np.int64)])


@settings(max_examples=150)
@given(ledgers, st.lists(worlds, min_size=1, max_size=5), st.booleans(), st.none() | st.integers(1, 40))
def test_every_sample_once_and_in_the_same_order_for_any_workers(
    ledger: Ledger, world_of_step: list[list[float]], merge: bool, max_piece: int | None
) -> None:
    """Shares and worker counts change from step to step; all that survives an interruption is the position."""
    position, used = 0, []
    for step in range(2 * ledger.steps_per_epoch):
        shares = world_of_step[step % len(world_of_step)]
        ids = samples_of_step(ledger, position, shares, merge=merge, max_piece=max_piece)
        used.append(ids)
        position += len(ids)
    assert position == 2 * ledger.num_samples
    both = np.concatenate(used)
    for epoch in range(2):
        one = both[epoch * ledger.num_samples :][: ledger.num_samples]
        assert np.array_equal(np.sort(one), np.arange(ledger.num_samples))
        assert np.array_equal(one, ledger.ids(epoch, 0, ledger.num_samples))


@settings(max_examples=100)
@given(ledgers, worlds, worlds, st.integers(0, 600))
def test_a_shard_holds_the_same_samples_whoever_reads_it(
    ledger: Ledger, some: list[float], others: list[float], step: int
) -> None:
    def shards(shares: list[float]) -> dict[range, list[int]]:
        plans = [
            plan_step(ledger, ledger.position(step), mine, merge=False) for mine in assign(ledger.num_shards, shares)
        ]
        return {piece.shards: piece.ids.tolist() for plan in plans for piece in plan.pieces}

    assert shards(some) == shards(others)


@settings(max_examples=100)
@given(ledgers, st.integers(0, 2000))
def test_steps_and_positions_are_two_names_of_one_thing(ledger: Ledger, step: int) -> None:
    position = ledger.position(step)
    place = ledger.place(position)
    assert (place.step, place.position) == (step, position)
    assert place.epoch * ledger.num_samples + place.offset == position
    assert plan_step(ledger, position, range(0)).after == ledger.place(ledger.position(step + 1))


@given(st.integers(0, 500), st.integers(1, 60))
def test_shards_differ_by_one_sample_at_most(count: int, num_shards: int) -> None:
    shards = Ledger(num_samples=1000, batch_size=500, num_shards=num_shards).shards(count)
    sizes = [stop - start for start, stop in shards]
    assert sum(sizes) == count
    assert max(sizes) - min(sizes) <= 1
    assert [start for start, _ in shards[1:]] == [stop for _, stop in shards[:-1]]


@settings(max_examples=200)
@given(st.integers(1, 200), st.integers(1, 20), st.booleans(), st.none() | st.integers(1, 50), st.data())
def test_pieces_respect_their_limit_and_prefer_shard_boundaries(
    count: int, num_shards: int, merge: bool, max_piece: int | None, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, num_shards))
    mine = range(first, data.draw(st.integers(first, num_shards)))
    pieces = cut_step(count, Cut(num_shards=num_shards, mine=mine, merge=merge, max_piece=max_piece))
    assert [start for _, start, _ in pieces[1:]] == [stop for _, _, stop in pieces[:-1]]
    covered = sum(stop - start for _, start, stop in pieces)
    assert covered == mine.stop * count // num_shards - mine.start * count // num_shards
    for shards, start, stop in pieces:
        assert 0 < stop - start <= (max_piece or count)
        assert merge or len(shards) == 1
        whole = shards.start * count // num_shards == start and shards.stop * count // num_shards == stop
        assert whole or len(shards) == 1
    if merge and max_piece is None:
        assert len(pieces) <= 1


def test_the_last_step_of_an_epoch_is_smaller() -> None:
    ledger = Ledger(num_samples=10, batch_size=4, num_shards=2)
    plans = list(plan_steps(ledger, ledger.place(0), lambda step: range(2), stop_epoch=2))
    assert [(plan.step, plan.epoch, plan.position, plan.count) for plan in plans] == [
        (0, 0, 0, 4),
        (1, 0, 4, 4),
        (2, 0, 8, 2),
        (3, 1, 10, 4),
        (4, 1, 14, 4),
        (5, 1, 18, 2),
    ]


def test_plans_ask_for_shares_step_by_step_and_stop_where_told() -> None:
    ledger = Ledger(num_samples=100, batch_size=10, num_shards=10)
    plans = list(plan_steps(ledger, ledger.place(30), lambda step: range(step), stop_step=6, merge=False))
    assert [len(plan.pieces) for plan in plans] == [3, 4, 5]
    assert plans[0].place == Place(step=3, epoch=0, offset=30, position=30)


def test_a_worker_without_shards_has_an_empty_plan() -> None:
    plan = plan_step(Ledger(num_samples=10, batch_size=2, num_shards=4), 0, range(4, 4))
    assert (plan.pieces, plan.num_samples, plan.count) == ((), 0, 2)


def test_a_position_saved_under_another_batch_size_goes_on_from_there() -> None:
    before = Ledger(num_samples=100, batch_size=30, seed=1)
    after = Ledger(num_samples=100, batch_size=8, seed=1)
    rest = [plan.pieces[0].ids for plan in plan_steps(after, after.place(30), lambda step: range(1), stop_epoch=1)]
    assert np.array_equal(np.concatenate(rest), before.ids(0, 30, 100))


def test_a_billion_samples_cost_nothing() -> None:
    ledger = Ledger(num_samples=10**9, batch_size=512, num_shards=16)
    plan = plan_step(ledger, 7 * 10**9 + 512 * 1000, range(4, 8))
    assert (plan.epoch, plan.step, plan.num_samples) == (7, 7 * ledger.steps_per_epoch + 1000, 128)


@pytest.mark.parametrize(
    ("num_samples", "batch_size", "message"),
    [
        (0, 1, "The dataset is empty."),
        (10, 11, "The dataset has 10 samples, fewer than one batch of 11."),
        (10, 0, "batch_size=0 is not a positive integer."),
        (10, 2.5, "batch_size=2.5 is not a positive integer."),
        (10, True, "batch_size=True is not a positive integer."),
        (2**63, 1, "The dataset says it has 9223372036854775808 samples."),
    ],
)
def test_a_batch_that_cannot_be_made_is_refused(num_samples: int, batch_size: int, message: str) -> None:
    with pytest.raises(UserError) as caught:
        check_batch_size(num_samples, batch_size)
    assert caught.value.message == message


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(UserError, match="batch_size=0"):
        Ledger(num_samples=10, batch_size=0)
    with pytest.raises(UserError, match="empty"):
        Ledger(num_samples=0, batch_size=1)
    with pytest.raises(UserError, match="0 shards"):
        Ledger(num_samples=10, batch_size=1, num_shards=0)
    with pytest.raises(UserError, match="micro-batch of 0"):
        Cut(num_shards=1, mine=range(1), max_piece=0)
