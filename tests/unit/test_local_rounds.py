"""Rounds, fragments, delays and dithered shares: pure functions that all workers must come to the same answers by."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import shoal
from shoal.comm.connect import connect
from shoal.data.ledger import Ledger
from shoal.data.shares import Schedule, dithered
from shoal.spec.errors import UserError
from shoal.train.flat import FlatModel, plan_layout
from shoal.train.settings import Settings
from shoal.train.setup import check_rounds, tell_round
from shoal.train.sync.local_outer import Outer, warmed_up
from shoal.train.sync.local_rounds import FIRST_STEPS, Pace, cut_fragments, first_round, next_round

paces = st.builds(Pace, step_seconds=st.floats(1e-4, 10), travel_seconds=st.floats(1e-5, 100))


@st.composite
def syncs(draw):
    fragments = draw(st.integers(1, 6))
    every = draw(st.none() | st.integers(fragments, 200))
    longest = 20 if every is None else every // fragments - 1
    overlap = draw(st.none() | st.integers(0, longest))
    return shoal.local(
        every, seconds=None if every else draw(st.floats(0.01, 60)), fragments=fragments, overlap=overlap
    )


@given(syncs(), st.integers(0, 10_000), st.lists(paces, max_size=6))
def test_every_fragment_leaves_once_a_round_and_arrives_before_the_next_leaves(sync, step, story):
    now = first_round(sync, step)
    for pace in [*story, Pace()]:
        left = [now.start] * sync.fragments
        leaving = {}
        for at in range(now.start + 1, now.end + 1):
            leaving[at] = now.leaving(at, left)
            if leaving[at] is not None:
                left[leaving[at]] = at
        times = [at for at, fragment in leaving.items() if fragment is not None]
        assert [leaving[at] for at in times] == list(range(sync.fragments))
        assert times[-1] == now.end
        gaps = [b - a for a, b in zip([now.start, *times], times, strict=False)]
        assert now.delay < min(gaps)
        following = next_round(sync, now, pace)
        # The last one arrives in the next round, whose length is only known by then.
        assert following.start == now.end
        assert now.end + now.delay < following.start + following.length // sync.fragments + (sync.every is not None)
        now = following


def test_rounds_of_steps_begin_at_their_multiples():
    assert [first_round(shoal.local(8), step).end for step in (0, 7, 8, 15)] == [8, 8, 16, 16]


def test_a_round_of_seconds_has_as_many_steps_as_take_that_long():
    sync = shoal.local(seconds=2)
    now = first_round(sync, 100)
    assert (now.start, now.length) == (100, FIRST_STEPS)
    assert next_round(sync, now, Pace(step_seconds=0.05, travel_seconds=0.001)).length == 40


def test_what_takes_no_time_is_waited_for_and_what_takes_long_gets_the_steps_it_needs():
    now = first_round(shoal.local(32), 0)
    delay = {
        travel: next_round(shoal.local(32), now, Pace(step_seconds=0.05, travel_seconds=travel)).delay
        for travel in (0.001, 0.4, 60)
    }
    assert delay == {0.001: 0, 0.4: 10, 60: 31}


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=30), st.data())
def test_fragments_are_runs_of_whole_parameters(sizes, data):
    layout = plan_layout([[(f"p{i}", size) for i, size in enumerate(sizes)]])
    count = data.draw(st.integers(1, len(sizes)))
    spans = cut_fragments(layout, count)
    assert len(spans) == count
    assert spans[0][0] == 0
    assert spans[-1][1] == layout.total
    assert all(start < stop for start, stop in spans)
    assert all(a[1] == b[0] for a, b in pairwise(spans))
    assert {start for start, _ in spans} <= set(layout.offsets)


def test_more_fragments_than_parameters_are_refused():
    with pytest.raises(UserError, match="3 fragments"):
        cut_fragments(plan_layout([[("a", 4), ("b", 4)]]), 3)


@settings(max_examples=40)
@given(st.integers(1, 9), st.lists(st.integers(0, 50), min_size=1, max_size=8).filter(any), st.integers(1, 60))
def test_dithered_shares_give_every_shard_once_and_stay_within_one_of_the_share(num_shards, shares, steps):
    divide, given_so_far = dithered(num_shards, shares), [0] * len(shares)
    period = max(16, 1024 // num_shards)
    exact = [
        sum(len(divide(step)[rank]) for step in range(period)) / (period * num_shards) for rank in range(len(shares))
    ]
    for step in range(steps):
        ranges = divide(step)
        assert [shard for mine in ranges for shard in mine] == list(range(num_shards))
        for rank, mine in enumerate(ranges):
            given_so_far[rank] += len(mine)
            wanted = (step + 1) * num_shards * exact[rank]
            assert step >= period or abs(given_so_far[rank] - wanted) < 1
            assert shares[rank] or not mine


def test_equal_workers_have_one_batch_each_in_every_step():
    schedule = Schedule(3, [1, 1, 1], dithered)
    assert all(schedule.at(step) == (range(1), range(1, 2), range(2, 3)) for step in range(500))


def test_a_worker_of_half_the_speed_has_a_batch_in_two_of_three_steps():
    divide = dithered(2, [2, 1])
    counts = [[len(mine) for mine in divide(step)] for step in range(6)]
    assert [sum(column) for column in zip(*counts, strict=True)] == [8, 4]
    assert set(map(tuple, counts)) <= {(1, 1), (2, 0)}


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("local:8,overlap=8", "overlap=7"),
        ("local:8,overlap=-1", "overlap=-1"),
        ("diloco:8,fragments=4,overlap=2", "overlap=1"),
    ],
)
def test_an_overlap_that_cannot_be_is_refused(text, word):
    from shoal.spec.strategy import parse_sync

    with pytest.raises(UserError) as caught:
        parse_sync(text)
    assert word in caught.value.render()


def test_momentum_remembers_a_tenth_of_the_run_and_no_more():
    assert [round(warmed_up(0.9, age), 2) for age in (0, 1, 10, 90, 1000)] == [0.0, 0.09, 0.5, 0.9, 0.9]
    assert warmed_up(0.3, 50) == 0.3


def test_the_outer_step_is_that_of_torch_once_the_run_is_old():
    """And a young one takes little more than the mean way: DiLoCo's first rounds do not overshoot."""
    sync = shoal.diloco(8)
    model = nn.Linear(3, 2)
    flat = FlatModel(
        model, torch.optim.SGD(model.parameters()), lambda name, size, dtype: torch.zeros(size, dtype=dtype)
    )
    flat.place(is_source=True)
    group, span = connect(0, 1), (0, flat.layout.total)
    outer, expected = Outer(sync, flat, group), nn.Parameter(flat.values.clone())
    torchs = torch.optim.SGD([expected], 0.7, momentum=0.9, nesterov=True)
    for number in range(4):
        mean = torch.randn(flat.layout.total, generator=torch.Generator().manual_seed(number))
        expected.grad = mean.clone()
        torchs.step()
        outer.move(mean.clone(), mean.clone(), span, age=1000)
    assert torch.allclose(outer.anchor, expected, atol=1e-6)
    young, way = Outer(sync, flat, group), torch.ones(flat.layout.total)
    young.move(way.clone(), way, span, age=1)
    assert torch.allclose(flat.values - young.anchor, torch.full_like(way, 0.7 * (1 + 1 / 11)))
    group.close()


LEDGER = Ledger(num_samples=40, batch_size=10)


def agreeing(every):
    return Settings(batch_size=10, sync=shoal.local(every))


@pytest.mark.parametrize("length", [{"steps": 8}, {"epochs": 2}])
def test_a_round_longer_than_fit_is_refused_and_one_longer_than_an_epoch_is_not(length):
    asked = {"epochs": None, "steps": None, **length}
    check_rounds(agreeing(8), LEDGER, **asked)
    with pytest.raises(UserError, match=r"every 9 steps, and fit\(\) is to take 8") as caught:
        check_rounds(agreeing(9), LEDGER, **asked)
    assert "every=8 or less" in caught.value.hint


def test_a_loop_is_told_when_it_will_agree(capsys):
    for every, rank in ((4, 0), (9, 1), (9, 0)):
        tell_round(agreeing(every), LEDGER, rank)
    told = capsys.readouterr().err
    assert told.count("shoal: ") == 1
    assert "an epoch has 4 step(s), and the workers agree every 9: first in epoch 3." in told
