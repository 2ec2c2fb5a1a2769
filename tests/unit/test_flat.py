"""The flat layout: every parameter once, chunks that do not depend on the number of workers."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shoal import UserError
from shoal.train import flat

groups = st.lists(st.lists(st.integers(0, 200_000), min_size=1, max_size=6), min_size=1, max_size=3)


@given(groups, st.integers(1, 9))
def test_layout_holds_every_parameter_once_and_ranks_share_all_chunks(sizes, num_ranks):
    named = [[(f"{g}.{i}", size) for i, size in enumerate(group)] for g, group in enumerate(sizes)]
    layout = flat.plan_layout(named)
    spans = sorted(zip(layout.offsets, layout.sizes, strict=True))
    for (start, size), (after, _) in pairwise(spans):
        assert start + size <= after
        assert start % flat.PARAMETER_ALIGNMENT == 0
    assert sorted(layout.names) == sorted(name for group in named for name, _ in group)
    owned = [chunk for rank in range(num_ranks) for chunk in layout.owned(rank, num_ranks)]
    assert tuple(owned) == layout.chunks
    assert not layout.chunks or layout.owned(0, num_ranks)
    assert layout.total == (layout.chunks[-1].stop if layout.chunks else 0)
    for chunk in layout.chunks:
        assert chunk.start % flat.ALIGNMENT == 0
        assert 0 < chunk.stop - chunk.start <= flat.CHUNK


def allocate(name, num_elements, dtype):
    return torch.zeros(num_elements, dtype=dtype)


def test_last_layers_come_first():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))
    placed = flat.FlatModel(model, torch.optim.SGD(model.parameters(), 0.1), allocate)
    assert placed.layout.names == ("1.bias", "1.weight", "0.bias", "0.weight")


def test_moving_parameters_keeps_values_and_identity():
    model = nn.Linear(5, 3)
    weight, before = model.weight, model.weight.detach().clone()
    placed = flat.FlatModel(model, torch.optim.SGD(model.parameters(), 0.1), allocate)
    placed.place(is_source=True)
    assert model.weight is weight
    assert torch.equal(weight, before)
    placed.values.add_(1)
    assert torch.equal(weight, before + 1)
    placed.release()
    placed.values.add_(1)
    assert torch.equal(weight, before + 1)


def optimizer_of(*parameters):
    return torch.optim.SGD(parameters, 0.1)


def test_one_parameter_used_twice_is_fine():
    model = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)])
    model[1].weight = model[0].weight
    assert [[name for name, _ in group] for group in flat.named_groups(model, optimizer_of(*model.parameters()))] == [
        ["0.weight"]
    ]


def test_two_parameters_over_one_memory_are_refused():
    model = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)])
    model[1].weight = nn.Parameter(model[0].weight.data)
    with pytest.raises(UserError, match=r"'0.weight' and '1.weight' share memory"):
        flat.named_groups(model, optimizer_of(*model.parameters()))


def test_a_parameter_the_optimizer_does_not_hold_is_named():
    model = nn.Linear(2, 2)
    with pytest.raises(UserError, match=r"does not hold 1 trainable parameter\(s\): bias"):
        flat.named_groups(model, optimizer_of(model.weight))


def test_an_optimizer_of_another_model_is_refused():
    with pytest.raises(UserError, match="not in the model"):
        flat.named_groups(nn.Linear(2, 2), optimizer_of(*nn.Linear(2, 2).parameters()))


def test_nothing_to_train_is_refused():
    model = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(UserError, match="nothing to train"):
        flat.named_groups(model, optimizer_of(*model.parameters()))


def test_several_types_are_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(UserError, match="several types"):
        flat.named_groups(model, optimizer_of(*model.parameters()))
