"""State, facts and digests: what must survive, and how to tell that it did."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.checkpoint import facts
from shoal.checkpoint.layout import DTYPES
from shoal.checkpoint.state import TORCH_DTYPES, State, describe, digest, short
from shoal.spec.errors import UserError

numbers = st.integers() | st.floats(allow_nan=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.just("$x"), inner)
    ),
    max_leaves=20,
)


@settings(max_examples=50)
@given(st.dictionaries(st.text(), values))
def test_facts_survive_json_without_loss(known):
    assert repr(facts.decode(facts.encode(known))) == repr(known)


def test_a_fact_that_is_not_a_number_survives():
    assert math.isnan(facts.decode(facts.encode({"loss": math.nan}))["loss"])


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4]),
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=9),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
    ],
)
def test_the_state_of_stock_schedulers_survives(make):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    state = make(optimizer).state_dict()
    assert facts.decode(facts.encode({"scheduler": state}))["scheduler"] == state


@pytest.mark.parametrize(
    ("known", "where"),
    [
        ({"a": {"b": [1, {2}]}}, r"facts\['a'\]\['b'\]\[1\]: it is a set"),
        ({"a": torch.ones(1)}, "it is a Tensor"),
        ({"a": {(1, 2): 3}}, r"the key \(1, 2\)"),
        ({"a": {True: 3}}, "the key True"),
        ({"a": "\ud800"}, "not valid Unicode"),
        ({"\ud800": 1}, "not valid Unicode"),
    ],
)
def test_facts_that_cannot_be_kept_are_named(known, where):
    with pytest.raises(UserError, match=where):
        facts.encode(known)


def test_facts_that_hold_themselves_are_refused():
    known = {}
    known["self"] = known
    with pytest.raises(UserError, match="nested more than 64 deep"):
        facts.encode(known)


def test_facts_at_the_allowed_depth_survive():
    deep = 1
    for _ in range(facts.MAX_DEPTH - 1):
        deep = (deep,)
    assert facts.decode(facts.encode({"deep": deep})) == {"deep": deep}


@pytest.mark.parametrize(
    "data", [b"[1]", b'{"$what": 1}', b'{"$float": "x"}', b'{"$pairs": [1]}', b"[" * 99999, b"{"]
)
def test_facts_that_were_never_written_are_refused(data):
    with pytest.raises(ValueError):
        facts.decode(data)


def test_the_digest_ignores_what_does_not_change_the_values():
    base = torch.arange(6.0).view(2, 3)
    expected = digest({"a": base, "b": torch.ones(1)})
    assert digest({"b": torch.nn.Parameter(torch.ones(1)), "a": base.t().contiguous().t()}) == expected
    assert len(expected) == 64
    assert short(expected) == expected[:12]


@pytest.mark.parametrize(
    "other",
    [
        {"b": torch.zeros(4)},
        {"a": torch.zeros(4, dtype=torch.int32)},
        {"a": torch.zeros(2, 2)},
        {"a": torch.tensor([0.0, 0, 0, -0.0])},
        {"a": torch.zeros(4), "b": torch.zeros(0)},
        {},
    ],
)
def test_the_digest_tells_apart_what_differs(other):
    assert digest(other) != digest({"a": torch.zeros(4)})


@given(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 3), max_size=3))
def test_every_type_can_be_described_and_digested(name, shape):
    tensor = torch.zeros(shape).to(TORCH_DTYPES[name])
    entry = describe("x", tensor)
    assert (entry.dtype, entry.shape, entry.num_bytes) == (name, tuple(shape), tensor.nbytes)
    assert digest({"x": tensor}) == digest({"x": tensor.clone()})


@pytest.mark.parametrize(
    ("tensor", "problem"),
    [
        (torch.zeros(2, device="meta"), "has no data"),
        (torch.nn.LazyLinear(2).weight, "has no data"),
        (torch.zeros(2, dtype=torch.complex128), "complex128"),
        (torch.eye(2).to_sparse(), "sparse"),
        (3.0, "is a float"),
    ],
)
def test_tensors_that_cannot_be_kept_are_named(tensor, problem):
    with pytest.raises(UserError, match=problem) as caught:
        describe("model/x", tensor)
    assert "model/x" in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("name", ["", "__metadata__", "x" * 5000, "\ud800", 3])
def test_names_that_cannot_be_kept_are_refused(name):
    with pytest.raises(UserError, match="a tensor named"):
        describe(name, torch.ones(1))


def test_a_part_of_a_state_comes_without_its_prefix():
    state = State(step=1, tensors={"model/a": torch.ones(1), "model/b/c": torch.ones(1), "ema/a": torch.ones(1)})
    assert set(state.part("model")) == {"a", "b/c"}
