"""What workers tell each other of a step, and what is made of it."""

import numpy as np
import pytest
import torch
from torch import nn

import shoal
from shoal.spec.errors import UserError
from shoal.train.divergence import Diverged
from shoal.train.flat import plan_layout
from shoal.train.sync.sync import Row, Standing
from shoal.train.sync.table import LossNotFinite, NotFinite, StepTable, check_losses, checked_norm, not_finite


def table(num_shards=4):
    return StepTable(num_shards, 1, lambda size: torch.zeros(size, dtype=torch.float64))


def row(shard, weight=2.0, loss=3.0, num_samples=2, buffers=None):
    values = None if buffers is None else torch.tensor(buffers, dtype=torch.float64)
    return Row(shard=shard, weight=weight, loss=loss, num_samples=num_samples, buffers=values)


def test_pieces_of_one_shard_add_up():
    """A shard larger than a micro-batch is computed in pieces, which share its line of the table."""
    steps = table()
    rows = [row(0, 2.0, 3.0, 2, [1.0]), row(0, 1.0, 5.0, 1, [4.0]), row(1, 3.0, 1.0, 3, [0.0])]
    steps.write(rows, range(4), 0, Standing(step=0))
    totals = steps.read(4)
    assert (totals.weight, totals.loss) == (6.0, 9.0 / 6.0)
    assert totals.buffers is not None
    assert totals.buffers.item() == pytest.approx((2 * 1.0 + 1 * 4.0 + 3 * 0.0) / 6)
    steps.write([row(0, buffers=[7.0])], range(4), 0, Standing(step=0))
    assert steps.read(4).weight == 2.0, "lines of the step before are gone"


@pytest.mark.parametrize("settings", [{"microbatch_size": 2}, {"microbatch_size": 3, "shards": 2}])
def test_micro_batches_smaller_than_a_shard(settings):
    def train(**settings):
        torch.manual_seed(0)
        model, data = nn.Linear(4, 1), torch.randn(200, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with shoal.Trainer(
            model, lambda m, x: m(x).square().mean(), optimizer, data, batch_size=200, **settings
        ) as t:
            t.fit(steps=2)
        return model.weight.detach()

    torch.testing.assert_close(train(**settings), train())


def test_exact_mode_computes_a_shard_in_one_piece():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(UserError, match="Shards of 10 samples do not fit into microbatch_size=3"):
        shoal.Trainer(
            model, lambda m, x: m(x).mean(), optimizer, torch.randn(20, 4),
            batch_size=20, exact=True, shards=2, microbatch_size=3,
        )  # fmt: skip


def test_a_loss_that_is_no_number_names_its_shard():
    steps = table()
    rows = [row(0), row(1, loss=float("inf"), num_samples=5), row(2, loss=float("nan"))]
    steps.write(rows, range(4), 0, Standing(step=0))
    with pytest.raises(LossNotFinite) as caught:
        steps.read(4)
    assert (caught.value.spans, caught.value.value) == ([(1, 5), (2, 2)], float("inf"))


def test_losses_of_both_infinities():
    steps = table()
    steps.write([row(0, loss=float("inf")), row(1, loss=float("-inf"))], range(4), 0, Standing(step=0))
    with pytest.raises(LossNotFinite, match="The loss is inf in shard 0"):
        steps.read(4)


def test_pieces_of_a_shard_are_bad_together():
    """Of a copy's own rows: which piece of a shard it was is not known."""
    rows = [row(3, num_samples=2), row(3, loss=float("nan"), num_samples=4), row(5, loss=float("inf"))]
    with pytest.raises(LossNotFinite) as caught:
        check_losses(rows)
    assert caught.value.spans == [(3, 6), (5, 2)]


def with_checksums(*checksums, loss=3.0):
    steps = StepTable(2, len(checksums), lambda size: torch.zeros(size, dtype=torch.float64))
    for rank, checksum in enumerate(checksums):
        steps.write([row(rank, loss=loss)], range(rank, rank + 1), rank, Standing(step=3, checksum=checksum))
    return steps


def test_copies_that_are_not_equal():
    with_checksums(7, 7).check_copies()
    with pytest.raises(Diverged) as caught:
        with_checksums(7, 8).check_copies()
    assert caught.value.checksums == [7, 8]


def test_parts_hear_of_what_another_part_has_found():
    """What is largest over the parts of a copy is put back into the table of each."""
    good, other = with_checksums(7, 7), with_checksums(7, 8)
    good.correct(torch.maximum(good.standings(), other.standings()))
    with pytest.raises(Diverged) as caught:
        good.check_copies()
    assert caught.value.checksums == [7, 7]

    good, lost = with_checksums(7, 7), with_checksums(9, 9, loss=float("nan"))
    good.correct(torch.maximum(good.standings(), lost.standings()))
    good.check_copies()
    with pytest.raises(NotFinite, match="in another part of the model"):
        good.read(2)


def test_a_gradient_that_is_no_number_names_its_parameters():
    layout = plan_layout([[("first", 100_000), ("second", 10), ("third", 70_000)]])
    assert len(layout.chunks) > 2
    values = torch.zeros(layout.total)
    at = dict(zip(layout.names, layout.offsets, strict=True))
    values[at["second"] + 3] = float("nan")
    values[at["first"] + 99_999] = float("inf")
    found = [not_finite(layout, i, values[c.start : c.stop]) for i, c in enumerate(layout.chunks)]
    assert [names for names in found if names] == [["second"], ["first"]]
    squares = [float(values[c.start : c.stop].square().sum()) for c in layout.chunks]
    with pytest.raises(UserError, match="The gradient is nan, though the loss is a number: in second"):
        checked_norm(squares, lambda index: found[index])
    assert checked_norm([9.0, 16.0], lambda index: []) == 5.0


def test_a_batch_without_weight():
    steps = table()
    steps.write([row(0, weight=0.0, loss=0.0)], range(4), 0, Standing(step=0))
    with pytest.raises(UserError, match="add up to zero"):
        steps.read(4)
    assert np.isfinite(steps.values.numpy()).all()
