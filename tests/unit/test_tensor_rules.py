"""Every rule, without any process: what each part computes is its slice of what the whole computes."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from shoal.spec.errors import UserError
from shoal.train.split import tensor_rules  # noqa: F401  # portions know their rules by it
from shoal.train.split.tensor_portion import Layout, Portion, Stuck, slice_of
from shoal.train.split.tensor_shapes import reshaped

PARTS = 2


class Quiet:
    """A part that talks to nobody: enough for everything that needs no sum over parts."""

    def __init__(self, part, num_parts=PARTS):
        self.part, self.num_parts = part, num_parts

    def enter(self, whole):
        return whole

    def gather(self, portion, why):
        raise why

    def admit(self, whole, like):
        pass

    def divide(self, size, portion):
        if size % self.num_parts:
            raise Stuck("it does not divide")

    def look(self, portions):
        pass


def parts_of(whole, dim, blocks=1):
    layout = Layout(dim, blocks)
    regions = [Quiet(part) for part in range(PARTS)]
    return [Portion(slice_of(layout, whole.shape[dim], region).of(whole), layout, region) for region in regions]


def check(function, whole, dim, blocks=1):
    expected = function(whole)
    for part in parts_of(whole, dim, blocks):
        assert part.shape == whole.shape
        found = function(part)
        pairs = [(found, expected)] if isinstance(found, torch.Tensor) else zip(found, expected, strict=True)
        for mine, all_of_it in pairs:
            assert isinstance(mine, Portion)
            assert mine.shape == all_of_it.shape
            local = slice_of(mine.cut, all_of_it.shape[mine.cut.dim], part.region).of(all_of_it)
            torch.testing.assert_close(mine.local, local)


HEADS = torch.randn(3, 5, 4, 6)  # batch, length, heads, width of a head: cut by heads
FLAT = torch.randn(3, 5, 24)  # cut by channels
FUSED = torch.randn(3, 5, 36)  # queries, keys and values

ON_HEADS = {
    "transpose": lambda x: x.transpose(1, 2),
    "permute": lambda x: x.permute(2, 0, 3, 1),
    "mT": lambda x: x.transpose(1, 2).mT,
    "flatten": lambda x: x.flatten(2),
    "view as the input": lambda x: x.contiguous().view(x.shape[0], x.shape[1], x.shape[2] * x.shape[3]),
    "merge all before": lambda x: x.transpose(1, 2).reshape(x.shape[0] * x.shape[2], x.shape[1], -1),
    "index others": lambda x: x[:, -1, :, :3],
    "new dimension": lambda x: x[:, :, :, None],
    "unsqueeze": lambda x: x.unsqueeze(2).squeeze(2),
    "select": lambda x: x.select(1, 2),
    "halves of a head": lambda x: torch.cat((-x[..., 3:], x[..., :3]), dim=-1),
    "an empty cache": lambda x: torch.cat([torch.tensor([]), x.transpose(1, 2)], dim=-2),
    "stack": lambda x: torch.stack((x, x), 0),
    "chunk others": lambda x: x.chunk(2, -1),
    "unbind before": lambda x: x.unbind(0),
    "unbind after": lambda x: x.unbind(-1),
    "split others": lambda x: torch.split(x, [2, 4], -1),
    "repeat heads": lambda x: x.repeat_interleave(3, 2),
    "expand heads": lambda x: x[:, :, :, None].expand(3, 5, 4, 2, 6).reshape(3, 5, 8, 6),
    "softmax": lambda x: F.softmax(x, dim=-1),
    "mean": lambda x: x.pow(2).mean(-1, keepdim=True),
    "sum over others": lambda x: x.sum((1, 3)),
    "max": lambda x: x.max(dim=-1).values,
    "layer_norm": lambda x: F.layer_norm(x, (6,), torch.ones(6), torch.zeros(6)),
    "rms_norm": lambda x: F.rms_norm(x, (6,)),
    "linear of each head": lambda x: F.linear(x, torch.ones(7, 6)),
    "a bias of each head": lambda x: x + torch.arange(4.0).view(4, 1),
    "scores": lambda x: x.transpose(1, 2) @ x.transpose(1, 2).mT,
    "scores of a whole": lambda x: x.transpose(1, 2) @ torch.ones(6, 2),
    "einsum": lambda x: torch.einsum("bqhd,bkhd->bhqk", x, x),
    "einsum with a whole": lambda x: torch.einsum("bqhd,hde->bqhe", x, torch.ones(4, 6, 2)),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.transpose(1, 2)] * 3, is_causal=True),
    "attention with a mask": lambda x: F.scaled_dot_product_attention(
        *[x.transpose(1, 2)] * 3, attn_mask=torch.ones(4, 5, 5).tril()
    ),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "masked": lambda x: x.masked_fill(torch.ones(5, 1, 1) > 0, 2.0),
    "double": lambda x: x.to(torch.float64).type_as(torch.ones(1)),
    "arithmetic": lambda x: (1 - x) / (2 + x.abs()) ** 2 * -x,
    "in place": lambda x: (x + 1).mul_(2).clamp_(-1, 1),
}


@pytest.mark.parametrize("name", ON_HEADS)
def test_a_part_by_heads_computes_its_slice(name):
    check(ON_HEADS[name], HEADS, 2)


ON_CHANNELS = {
    "gelu": (F.gelu, 1),
    "silu in place": (lambda x: F.silu(x * 1, inplace=True), 1),
    "a bias": (lambda x: x + torch.arange(24.0), 1),
    "a bias in blocks": (lambda x: x * torch.arange(24.0), 3),
    "to heads": (lambda x: x.view(3, 5, 4, 6), 1),
    "to heads, inferred": (lambda x: x.unflatten(-1, (2, -1)).reshape(3, 5, -1), 1),
    "two halves": (lambda x: x.chunk(2, dim=-1), 2),
    "glu": (lambda x: F.glu(x, -1), 2),
    "to blocks and heads": (lambda x: x.view(3, 5, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0), 3),
    "heads of all": (lambda x: torch.split(x, 8, dim=2), 3),
    "to rows": (lambda x: x.view(-1, 24), 3),
}


@pytest.mark.parametrize("name", ON_CHANNELS)
def test_a_part_by_channels_computes_its_slice(name):
    function, blocks = ON_CHANNELS[name]
    check(function, FLAT, 2, blocks)


@pytest.mark.parametrize("shape", [(3, 5, 24), (24, 5)])
def test_dropout_draws_for_the_whole(shape):
    whole = torch.randn(shape).transpose(0, 1)  # in another order of memory
    dim = whole.shape.index(24)

    def drop(value):
        torch.manual_seed(5)
        return F.dropout(value, 0.3)

    check(drop, whole, dim)


def test_dropout_of_attention_draws_for_all_heads():
    whole = torch.randn(3, 4, 5, 6)

    def attend(value):
        torch.manual_seed(5)
        return F.scaled_dot_product_attention(value, value, value, dropout_p=0.3, is_causal=True)

    check(attend, whole, 1)


STUCK = {
    "softmax over the cut": lambda x: x.softmax(-1),
    "mean of all": lambda x: x.mean(),
    "norm over the cut": lambda x: F.layer_norm(x, (24,)),
    "some channels": lambda x: x[..., :7],
    "thirds of one block": lambda x: x.chunk(3, -1),
    "another width": lambda x: x + torch.ones(3, 5, 24)[:, :, :12],
    "a matrix over the cut": lambda x: x @ torch.ones(24, 2),
    "heads that do not divide": lambda x: x.view(3, 5, 3, 8),
    "transposed and merged": lambda x: x.transpose(1, 2).reshape(3, 120)[:, ::2],
    "no rule at all": lambda x: torch.fft.fft(x),
    "a loss": lambda x: F.cross_entropy(x.view(-1, 24), torch.zeros(15, dtype=torch.int64)),
}


@pytest.mark.parametrize("name", STUCK)
def test_where_no_rule_holds_the_whole_is_asked_for(name):
    part = parts_of(FLAT, 2)[0]
    with pytest.raises(Stuck):
        STUCK[name](part)


def test_nothing_is_changed_in_place_without_a_rule():
    part = parts_of(FLAT, 2)[0]
    with pytest.raises(UserError, match="cannot change an activation"):
        part[..., 3] = 0.0


def test_a_part_says_what_it_is():
    part = parts_of(FLAT, 2)[1]
    assert "1/2 of [3, 5, 24]" in repr(part)
    assert part.dim() == 3
    assert part.size(-1) == 24
    assert part.local.shape == (3, 5, 12)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.data())
def test_a_reshaped_part_is_a_part_of_the_reshaped(shape, data):
    """For any shapes: either the rule refuses, or the local reshape holds just the elements of the new slice."""
    dim = data.draw(st.integers(0, len(shape) - 1))
    blocks = data.draw(st.sampled_from([1, 2, 3]))
    shape[dim] = blocks * PARTS * data.draw(st.integers(1, 3))
    whole = torch.arange(math.prod(shape)).view(shape)
    left, new = whole.numel(), []
    while left > 1 and len(new) < 4:
        new.append(data.draw(st.sampled_from([n for n in range(1, left + 1) if left % n == 0])))
        left //= new[-1]
    new.append(left)
    try:
        layout = reshaped(shape, new, Layout(dim, blocks))
    except Stuck:
        return
    if new[layout.dim] // layout.blocks % PARTS:
        return
    for part in parts_of(whole, dim, blocks):
        local = slice_of(layout, new[layout.dim], part.region).of(whole.view(new))
        assert torch.equal(part.local.reshape(local.shape), local)
