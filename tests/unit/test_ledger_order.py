"""The order of an epoch: a true permutation, well mixed, the same everywhere, and cheap."""

import math
import tracemalloc
from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data.shuffle import MAX_SAMPLES, mix, order


def orders(num_samples: int, num_seeds: int) -> np.ndarray:
    return np.array([order(seed, 0, num_samples, 0, num_samples) for seed in range(num_seeds)])


def surprise(observed: np.ndarray, expected: np.ndarray | float, freedom: int) -> float:
    """Chi-square as a number of standard deviations from what chance gives."""
    return float((((observed - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


def test_values_never_change() -> None:
    """A run resumed under another numpy, Python or machine must go on in the same order."""
    assert (mix(0), mix(1, -2, 3)) == (0x768EA33020168DAD, 0x1AA7703A4DF47D08)
    assert order(0, 0, 10, 0, 10).tolist() == [8, 9, 5, 2, 0, 7, 4, 6, 1, 3]
    assert order(1, 2, 1000, 500, 508).tolist() == [5, 339, 600, 389, 172, 756, 121, 188]
    assert order(-7, 3, 10**9, 0, 4).tolist() == [809977797, 918726600, 339452940, 785879003]
    last = order(2**70, 0, MAX_SAMPLES, MAX_SAMPLES - 2, MAX_SAMPLES).tolist()
    assert last == [728328581990597460, 386337566735130470]


@pytest.mark.parametrize("num_samples", [*range(1, 70), 255, 256, 257, 1000, 4095, 4096, 4097, 100_003])
def test_every_sample_exactly_once(num_samples: int) -> None:
    ids = order(5, 1, num_samples, 0, num_samples)
    assert np.array_equal(np.sort(ids), np.arange(num_samples))


@settings(max_examples=60)
@given(st.integers(1, 3000), st.integers(), st.integers(0, 10**6), st.data())
def test_a_stretch_is_the_same_as_part_of_the_whole(
    num_samples: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, num_samples))
    stop = data.draw(st.integers(start, num_samples))
    whole = order(seed, epoch, num_samples, 0, num_samples)
    assert np.array_equal(order(seed, epoch, num_samples, start, stop), whole[start:stop])


def test_without_shuffling_the_order_is_the_datasets_own() -> None:
    assert order(3, 1, 100, 10, 15, shuffle=False).tolist() == [10, 11, 12, 13, 14]


@pytest.mark.parametrize("num_samples", [2, 3, 4, 5])
def test_all_orders_of_a_tiny_dataset_are_equally_likely(num_samples: int) -> None:
    num_seeds = 4000
    seen = Counter(map(tuple, orders(num_samples, num_seeds).tolist()))
    counts = np.array([seen[each] for each in permutations(range(num_samples))])
    assert surprise(counts, num_seeds / len(counts), len(counts) - 1) < 4


@pytest.mark.parametrize(("num_samples", "num_seeds"), [(10, 1500), (64, 800), (257, 600), (1000, 500)])
def test_positions_neighbours_and_runs_look_random(num_samples: int, num_seeds: int) -> None:
    ids = orders(num_samples, num_seeds)
    num_bins = min(num_samples, 16)
    bins = np.arange(num_samples) * num_bins // num_samples
    table = np.zeros((num_bins, num_bins))
    np.add.at(table, (np.broadcast_to(bins, ids.shape), bins[ids]), 1)
    sizes = np.bincount(bins)
    assert surprise(table, np.outer(sizes, sizes) / num_samples * num_seeds, (num_bins - 1) ** 2) < 4
    for lag in (1, 2):
        steps = (ids[:, lag:] - ids[:, :-lag]) % num_samples
        counts = np.bincount(steps.ravel(), minlength=num_samples)[1:]
        assert surprise(counts, steps.size / (num_samples - 1), num_samples - 2) < 4
    descents = (np.diff(ids, axis=1) < 0).sum(axis=1)
    deviation = math.sqrt((num_samples + 1) / 12)
    assert abs(descents.mean() - (num_samples - 1) / 2) < 4 * deviation / math.sqrt(num_seeds)
    assert 0.8 < descents.std() / deviation < 1.2


def test_seeds_and_epochs_give_unrelated_orders() -> None:
    size = 20_000
    many = [
        order(seed, epoch, size, 0, size) for seed, epoch in [(0, 0), (1, 0), (2, 0), (0, 1), (0, 2), (1, 1), (-1, 0)]
    ]
    close = np.abs(np.corrcoef(np.array(many)) - np.eye(len(many)))
    assert close.max() < 5 / math.sqrt(size)
    matches = [int((a == b).sum()) for i, a in enumerate(many) for b in many[:i]]
    assert max(matches) < 10


def test_a_batch_of_a_huge_epoch_is_cheap() -> None:
    """It costs as much as a batch of a small one."""

    def peak_bytes(num_samples: int) -> int:
        tracemalloc.start()
        order(1, 0, num_samples, 0, 512)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return peak

    peak_bytes(1000)
    assert peak_bytes(10**9) < 2 * peak_bytes(1000) < 1_000_000
