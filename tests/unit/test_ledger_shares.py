"""Shares: proportional, exact, and quick to follow speeds without chasing noise."""

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.data.shares import Schedule, Speed, assign, rebalance
from shoal.spec.errors import BugError

some_shares = st.lists(st.just(0.0) | st.floats(1e-3, 1e3), min_size=1, max_size=12).filter(
    lambda shares: sum(shares) > 0
)


@given(st.integers(1, 300), some_shares)
def test_every_shard_is_given_once_and_in_proportion(num_shards: int, shares: list[float]) -> None:
    ranges = assign(num_shards, shares)
    assert [shard for mine in ranges for shard in mine] == list(range(num_shards))
    active = sum(share > 0 for share in shares)
    for mine, share in zip(ranges, shares, strict=True):
        if share == 0:
            assert len(mine) == 0
        elif num_shards >= active:
            assert len(mine) >= 1
            assert len(mine) <= num_shards * share / sum(shares) + 1
        else:
            assert len(mine) <= 1


def test_assignments_people_would_make() -> None:
    assert [len(mine) for mine in assign(12, [1, 1, 1])] == [4, 4, 4]
    assert [len(mine) for mine in assign(12, [2, 1, 1])] == [6, 3, 3]
    assert [len(mine) for mine in assign(10, [1, 1, 1])] == [4, 3, 3]
    assert [len(mine) for mine in assign(10, [1000, 1, 1])] == [8, 1, 1]
    assert [len(mine) for mine in assign(2, [1, 3, 2])] == [0, 1, 1]
    assert assign(4, [0, 1]) == (range(0), range(4))


@pytest.mark.parametrize("shares", [[0.0, 0.0], [1.0, -1.0]])
def test_impossible_shares_are_refused(shares: list[float]) -> None:
    with pytest.raises(BugError, match="cannot be handed out"):
        assign(4, shares)


def settle(
    shares: tuple[float, ...], seconds: list[float], rounds: int, num_shards: int = 256
) -> list[tuple[float, ...]]:
    story = [shares]
    for _ in range(rounds):
        story.append(rebalance(story[-1], seconds, num_shards=num_shards))
    return story


def test_a_worker_half_as_fast_ends_with_half_the_share_in_a_few_rounds() -> None:
    story = settle((0.5, 0.5), [1.0, 2.0], rounds=3)
    fast, slow = story[-1]
    assert slow / fast == pytest.approx(0.5, rel=0.06)
    assert rebalance(story[-1], [1.0, 2.0], num_shards=256) == story[-1]


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=8))
def test_any_speeds_settle_near_the_best_possible_step(seconds: list[float]) -> None:
    def step_seconds(shares: Sequence[float]) -> float:
        return max(len(mine) * each for mine, each in zip(assign(1024, shares), seconds, strict=True))

    shares = settle(tuple(1 / len(seconds) for _ in seconds), seconds, rounds=8, num_shards=1024)[-1]
    assert sum(shares) == pytest.approx(1)
    assert step_seconds(shares) < 1.06 * step_seconds([1 / each for each in seconds])


def test_equal_speeds_and_small_gains_change_nothing() -> None:
    even = (0.25,) * 4
    assert rebalance(even, [1.0, 1.0, 1.0, 1.0], num_shards=64) == even
    assert rebalance(even, [1.0, 1.03, 0.98, 1.0], num_shards=64) == even


def test_a_gain_that_whole_shards_cannot_give_changes_nothing() -> None:
    assert rebalance((0.5, 0.5), [1.0, 1.4], num_shards=2) == (0.5, 0.5)


@pytest.mark.parametrize("noise", [0.02, 0.05])
def test_noise_does_not_make_shares_swing(noise: float) -> None:
    """Medians of 16 noisy steps: shares reach the right place and then all but stand still."""
    source = random.Random(7)
    true = [1.0, 1.0, 2.0, 4.0]
    shares: tuple[float, ...] = (0.25,) * 4
    story = []
    for _ in range(60):
        speeds = [Speed() for _ in true]
        for speed, seconds in zip(speeds, true, strict=True):
            for _ in range(16):
                hiccup = 5.0 if source.random() < 0.05 else 1.0
                speed.add(8 * seconds * hiccup * source.gauss(1, noise), 8)
        shares = rebalance(shares, [speed.seconds_per_sample() for speed in speeds], num_shards=128)
        story.append(shares)
    late = story[10:]
    assert sum(one != two for one, two in pairwise(late)) <= 2
    best = 1 / sum(1 / each for each in true)
    assert max(share * each for share, each in zip(shares, true, strict=True)) < 1.1 * best


def test_a_change_of_speed_is_followed() -> None:
    shares = settle((0.5, 0.5), [1.0, 1.0], rounds=3)[-1]
    slowed = settle(shares, [1.0, 3.0], rounds=5)[-1]
    assert slowed[1] == pytest.approx(0.25, abs=0.02)
    back = settle(slowed, [1.0, 1.0], rounds=5)[-1]
    assert back[1] == pytest.approx(0.5, abs=0.03)


def test_the_unmeasured_and_the_excluded_keep_their_shares() -> None:
    shares = rebalance((0.3, 0.3, 0.4, 0.0), [1.0, 3.0, None, None], num_shards=100)
    assert shares[2:] == (0.4, 0.0)
    assert shares[0] > 0.3 > shares[1]
    assert rebalance((0.5, 0.5), [None, 1.0], num_shards=100) == (0.5, 0.5)


def test_speed_is_a_median_and_forgets() -> None:
    speed = Speed()
    assert speed.seconds_per_sample() is None
    for seconds in (1.0, 100.0, 2.0):
        speed.add(seconds, 10)
    speed.add(5.0, 0)
    assert speed.seconds_per_sample() == 0.2
    speed.clear()
    assert speed.seconds_per_sample() is None


def test_three_steps_at_another_speed_are_no_hiccup() -> None:
    speed = Speed()
    for seconds in (*[1.0] * 10, 3.0, 2.8):
        speed.add(seconds, 10)
    assert speed.seconds_per_sample() == 0.1
    speed.add(2.9, 10)
    assert speed.seconds_per_sample() == pytest.approx(0.29)
    for seconds in (3.0, 3.0, 1.0, 1.0, 1.0):
        speed.add(seconds, 10)
    assert speed.seconds_per_sample() == pytest.approx(0.1)


def test_shares_rest_on_a_machine_whose_steps_take_any_time() -> None:
    """Steps of one worker that differ by half, and every tenth by four times: its speed is still the same."""
    source = random.Random(7)
    speeds, shares, num_changes = (Speed(), Speed()), (0.5, 0.5), 0
    for _ in range(1000):
        for speed in speeds:
            hiccup = 4.0 if source.random() < 0.1 else 1.0
            speed.add(hiccup * source.lognormvariate(0, 0.5), 1)
        better = rebalance(shares, [speed.seconds_per_sample() for speed in speeds], num_shards=256)
        num_changes, shares = num_changes + (better != shares), better
    assert num_changes < 100


def test_a_schedule_changes_only_in_the_future() -> None:
    schedule = Schedule(8, (0.5, 0.5))
    assert schedule.at(3) == (range(4), range(4, 8))
    schedule.change(6, (0.75, 0.25))
    assert schedule.at(5) == (range(4), range(4, 8))
    assert schedule.at(6) == (range(6), range(6, 8))
    assert schedule.shares_at(6) == (0.75, 0.25)
    with pytest.raises(BugError, match="cannot change at step 6"):
        schedule.change(6, (0.5, 0.5))
