"""Which samples are named when a step is no number."""

import pytest
import torch

from shoal.data.ledger import Ledger, plan_step
from shoal.data.sources import as_source
from shoal.train.blame import find_spans, name_samples
from shoal.train.sync.table import LossNotFinite, NotFinite

LEDGER = Ledger(num_samples=64, batch_size=16, num_shards=4, shuffle=False)
ASSIGNMENT = [range(2), range(2, 4)]


def lost(*spans: tuple[int, int]) -> LossNotFinite:
    error = LossNotFinite("The loss is nan.", why="it was not taken", hint="look")
    error.value, error.spans = float("nan"), spans
    return error


def bad_gradient(*shards: range) -> NotFinite:
    error = NotFinite("The gradient is nan.", why="it was not taken", hint="look for a square root")
    error.shards = shards
    return error


def name(error: NotFinite, *poisoned: int) -> NotFinite:
    """Of the second step, with samples 16 to 31; its shards have four each."""
    data = torch.zeros(64, 3)
    data[list(poisoned)] = torch.nan
    return name_samples(error, LEDGER, as_source(data), plan_step(LEDGER, 16, range(2)), ASSIGNMENT)


def test_a_bad_loss_has_exactly_the_samples_that_hold_nan():
    named = name(lost((0, 4), (2, 4)), 17, 25, 40)
    assert named.samples == [17, 25]
    assert named.message == "The loss is nan for samples 16, 17, 18, 19 (rank 0, shard 0)."
    assert named.why.startswith("sample 17, 25 holds nan or inf itself")
    assert "dataset[17]" in named.hint


def test_a_bad_loss_of_good_samples_has_all_of_its_shards():
    named = name(lost((1, 4), (3, 4)))
    assert named.samples == [*range(20, 24), *range(28, 32)]
    assert "samples 20, 21, 22, 23 (rank 0, shard 1)" in named.message
    assert "logarithm" in named.hint


def test_a_bad_gradient_has_the_samples_of_its_shards():
    named = name(bad_gradient(range(1, 3)))
    assert named.samples == list(range(20, 28))
    assert named.message == "The gradient is nan."
    assert named.why == "it was not taken; it had the samples 20, 21, 22, 23 and 4 more"
    assert named.hint == "look for a square root"


def test_a_bad_gradient_of_nobody_knows_whom_has_those_of_the_step():
    assert name(bad_gradient()).samples == list(range(16, 32))
    named = name(bad_gradient(), 30)
    assert named.samples == [30]
    assert "dataset[30]" in named.hint


@pytest.mark.parametrize("count", [1, 3, 7, 16])
def test_short_steps(count):
    assert find_spans(bad_gradient(), count, 4) == [(0, count)]
    spans = find_spans(bad_gradient(range(2, 4), range(1)), count, 4)
    assert spans == sorted([(0, count // 4), (2 * count // 4, count)])
