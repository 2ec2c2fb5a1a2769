"""Plans of cut layers: found by rehearsing, said by the script, refused where they do not fit."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shoal.spec.errors import UserError
from shoal.train.split.tensor_plan import Planner
from tests.numerics import blocks

PLANS = {
    blocks.FusedBlock: {
        "block.c_attn": "colwise in 3 blocks",
        "block.c_proj": "rowwise",
        "block.mlp.c_fc": "colwise",
        "block.mlp.c_proj": "rowwise",
    },
    blocks.GroupedBlock: {
        **{f"block.{name}_proj": "colwise" for name in "qkv"},
        "block.o_proj": "rowwise",
        "block.gate_proj": "colwise",
        "block.up_proj": "colwise",
        "block.down_proj": "rowwise",
    },
    blocks.MaskedBlock: {
        **{f"block.{name}": "colwise" for name in ("query", "key", "value")},
        "block.dense": "rowwise",
        "block.fc1": "colwise",
        "block.fc2": "rowwise",
    },
    blocks.EinsumBlock: {
        "block.c_attn": "colwise in 3 blocks",
        "block.c_proj": "rowwise",
        "block.gate_up": "colwise in 2 blocks",
        "block.down": "rowwise",
    },
    blocks.CrossBlock: {
        "block.cross": "heads",
        "block.encoder.self_attn": "heads",
        "block.encoder.linear1": "colwise",
        "block.encoder.linear2": "rowwise",
    },
}


def plan_of(model, batch, num_parts=2, wanted=None, loss=lambda model, batch: model(batch).square().mean()):
    plan = Planner(model, num_parts, wanted, lambda: loss(model, batch)).find()
    return {name: str(cut) for name, cut in plan.items()}


@pytest.mark.parametrize("block", PLANS, ids=lambda block: block.__name__)
def test_blocks_as_people_write_them(block):
    model, data = blocks.make(block)
    assert plan_of(model, data[:4], loss=blocks.loss) == PLANS[block]


class Plain(nn.Module):
    """Layers for `forward` to do something with."""

    def __init__(self, forward, **layers):
        super().__init__()
        self.act = forward
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x):
        return self.act(self, x)


X = torch.randn(4, 8)


def test_chains_are_cut_in_pairs_and_the_rest_is_whole():
    model = nn.Sequential(
        *(layer for _ in range(5) for layer in (nn.Linear(8, 8), nn.ReLU())), nn.Linear(8, 3), nn.Dropout(0.5)
    )
    expected = {"0": "colwise", "2": "rowwise", "4": "colwise", "6": "rowwise", "8": "colwise", "10": "rowwise"}
    assert plan_of(model, X) == expected


def test_a_layer_whose_output_is_used_elsewhere_is_not_a_source_but_the_next_may_be():
    model = Plain(
        lambda m, x: m.c(F.relu(m.b(h := m.a(x)))) + h.mean(),
        a=nn.Linear(8, 16),
        b=nn.Linear(16, 32),
        c=nn.Linear(32, 8),
    )
    assert plan_of(model, X) == {"b": "colwise", "c": "rowwise"}


def test_a_weight_that_is_used_outside_of_its_layer_stays_whole():
    def forward(m, x):
        return m.b(F.relu(m.a(x))) + m.a.weight.mean() + m.d(F.relu(m.c(x)))

    layers = {name: nn.Linear(8, 8) for name in "abcd"}
    found = plan_of(Plain(forward, **layers), X)
    assert found.get("a") is None
    assert found["c"] == "colwise"
    assert found["d"] == "rowwise"


def test_a_layer_that_is_called_in_two_ways_stays_whole():
    model = Plain(
        lambda m, x: m.b(F.relu(m.a(x))) + m.b(x), a=nn.Linear(8, 8), b=nn.Linear(8, 8), more=nn.Linear(800, 8)
    )
    with pytest.raises(UserError, match="Nothing in this model can be cut into 2 parts"):
        plan_of(model, X)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def test_functions_with_a_backward_of_their_own_end_a_cut():
    model = Plain(
        lambda m, x: m.d(m.c(m.b(Double.apply(m.a(x))))), **{name: nn.Linear(8, 8, bias=False) for name in "abcd"}
    )
    found = plan_of(model, X)
    assert "a" not in found or found["a"] != "colwise"
    assert found["b"] == "colwise"


def test_tied_layers_stay_whole_unless_both_are_cut_alike():
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8), nn.Linear(8, 16, False))
    model[4].weight = model[0].weight
    tokens = torch.arange(6).view(2, 3)
    pair = {"1": "colwise", "3": "rowwise"}
    assert plan_of(model, tokens) == pair
    assert plan_of(model, tokens, wanted={"0": "embedding", "4": "colwise"}) == {
        "0": "embedding",
        **pair,
        "4": "colwise",
    }
    with pytest.raises(UserError, match="'0' and '4' share a parameter and are cut in different ways"):
        plan_of(model, tokens, wanted={"0": "embedding"})


def test_what_the_script_says_counts():
    model, data = blocks.make(blocks.GroupedBlock)
    found = plan_of(model, data[:4], wanted={"*_proj": "replicate", "*.up_proj": "colwise"}, loss=blocks.loss)
    assert found == {"block.up_proj": "colwise"}
    found = plan_of(model, data[:4], wanted={"block.q_proj": "replicate"}, loss=blocks.loss)
    assert set(found) == {"block.gate_proj", "block.up_proj", "block.down_proj"}


MISTAKES = {
    "a pattern of nothing": ({"layers.*.fc1": "colwise"}, "'layers.*.fc1' matches no layer", "embed, block.query"),
    "an unknown style": ({"block.fc1": "columns"}, "'columns' is not a style", "colwise, rowwise, embedding"),
    "a style of another kind": ({"embed": "rowwise"}, "'embed' is of type Embedding", "'embedding' or 'replicate'"),
    "a linear embedding": ({"head": "embedding"}, "'head' is of type Linear", "'colwise'"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_wrong_plans_are_refused(name):
    wanted, what, hint = MISTAKES[name]
    model, data = blocks.make(blocks.MaskedBlock)
    with pytest.raises(UserError, match="does not work") as caught:
        plan_of(model, data[:4], wanted=wanted, loss=blocks.loss)
    assert what in caught.value.message
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize("block", [blocks.FusedBlock, blocks.MaskedBlock, blocks.CrossBlock])
def test_three_parts_of_four_heads_are_refused_with_what_would_fit(block):
    model, data = blocks.make(block)
    with pytest.raises(UserError, match=r"tensor\(3\) does not fit this model: 4 in layer 'block\.") as caught:
        plan_of(model, data[:4], num_parts=3, loss=blocks.loss)
    assert "use tensor(2) or tensor(4), or keep it whole: `plan={'block." in (caught.value.hint or "")


def test_fewer_keys_than_queries_are_what_must_be_divided():
    model, data = blocks.make(blocks.GroupedBlock)
    with pytest.raises(UserError, match=r"tensor\(4\) does not fit this model: 2 in layer") as caught:
        plan_of(model, data[:4], num_parts=4, loss=blocks.loss)
    assert "use tensor(2), or" in (caught.value.hint or "")


def test_convolutions_stay_whole_and_a_large_head_behind_them_is_cut_by_inputs():
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10))
    assert plan_of(model, torch.randn(2, 1, 8, 8), num_parts=4) == {"3": "rowwise"}
    with pytest.raises(UserError, match="Nothing in this model can be cut"):
        plan_of(nn.Sequential(*model[:3]), torch.randn(2, 1, 8, 8))


def test_a_rehearsal_leaves_the_model_as_it_was():
    model, data = blocks.make(blocks.FusedBlock)
    before = blocks.make(blocks.FusedBlock)[0].eval()
    plan_of(model, data[:4], loss=blocks.loss)
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch.equal(model.eval()(data), before(data))
