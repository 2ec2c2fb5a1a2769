"""Where gradients and parameters go in sharded training: every element has one place, on one rank."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shoal.train.flat import plan_layout
from shoal.train.homes import choose_blocks, watching_homes
from shoal.train.sync.sharded_route import padded, plan_route
from shoal.train.sync.sharded_units import cut_by_size, plan_units

GROUPS = st.lists(st.lists(st.integers(1, 3000), min_size=1, max_size=6), min_size=1, max_size=3)


def layout_of(groups):
    return plan_layout([[(f"{g}.{i}", size) for i, size in enumerate(sizes)] for g, sizes in enumerate(groups)])


@given(GROUPS, st.integers(1, 4), st.integers(100, 5000), st.randoms())
def test_every_gradient_reaches_its_place(groups, num_ranks, bucket, random):
    layout = layout_of(groups)
    order = list(range(len(layout.names)))
    random.shuffle(order)
    stream, expected = [], torch.zeros(layout.total)
    for index in order:
        values = torch.arange(1, layout.sizes[index] + 1, dtype=torch.float32) + 10_000 * index
        stream.append(torch.cat([values, torch.zeros(padded(layout, index) - len(values))]))
        expected[layout.offsets[index] : layout.offsets[index] + len(values)] = values
    flat = torch.cat(stream)
    found = torch.zeros(layout.total)
    for rank in range(num_ranks):
        owned = layout.dealt(rank, num_ranks)
        route = plan_route(layout, order, owned, bucket)
        for number, segments in enumerate(route.segments):
            for s in segments:
                at = owned[s.chunk].start + s.at
                found[at : at + s.stop - s.start] += flat[number * bucket : (number + 1) * bucket][s.start : s.stop]
    assert torch.equal(found, expected)


@given(GROUPS, st.integers(1, 4), st.integers(100, 5000))
def test_every_element_of_a_unit_is_kept_by_one_rank(groups, num_ranks, bucket):
    layout = layout_of(groups)
    blocks = cut_by_size(layout.sizes, range(len(layout.names)), bucket)
    assert sorted(index for _, indices in blocks for index in indices) == list(range(len(layout.names)))
    counts = [torch.zeros(size) for size in layout.sizes]
    for rank in range(num_ranks):
        units = plan_units(layout, blocks, rank, num_ranks)
        kept = torch.zeros(sum(unit.part for unit in units))
        for unit in units:
            assert unit.size == num_ranks * unit.part
            for s in unit.segments:
                counts[s.index][s.start : s.stop] += 1
                kept[s.at : s.at + s.stop - s.start] += 1
            covered = torch.zeros_like(kept)
            for chunk in unit.chunks:
                covered[chunk.start : chunk.stop] += 1
            for s in unit.segments:
                assert covered[s.at : s.at + s.stop - s.start].eq(1).all()
        assert kept.max() <= 1
    assert all(count.eq(1).all() for count in counts)


class Uses(nn.Module):
    """Ties weights, uses a child's weight without calling it, and leaves one parameter out."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.attention = nn.MultiheadAttention(4, 1)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.spare = nn.Parameter(torch.zeros(3))

    def forward(self, tokens):
        x = self.embed(tokens)
        x = self.attention(x, x, x)[0]
        for layer in self.layers:
            x = layer(x)
        assert self.spare.shape == (3,)
        return self.head(x)


@pytest.fixture
def homes():
    model = Uses()
    with watching_homes(model) as found:
        model(torch.tensor([1, 2]))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    return found


def test_homes_are_where_parameters_are_used(homes):
    assert homes["embed.weight"] == ("",)  # in `embed` and in `head`
    assert homes["attention.out_proj.weight"] == ("", "attention")
    assert homes["layers.1.0.bias"] == ("", "layers.1", "layers.1.0")
    assert "spare" not in homes


def test_blocks_are_as_large_as_they_may_be(homes):
    sizes = {name: p.numel() for name, p in Uses().named_parameters()}
    blocks = choose_blocks(sizes, homes, limit=30, smallest=10)
    assert set(blocks) == {"", "attention", "layers.0", "layers.1"}  # the list itself is never called
    assert set(blocks[""]) == {"embed.weight", "spare"}
    assert set(blocks["layers.0"]) == {"layers.0.0.weight", "layers.0.0.bias"}
    assert sorted(name for names in blocks.values() for name in names) == sorted(sizes)
