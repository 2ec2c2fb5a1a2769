"""Weights from elsewhere: names, shapes, and what is said about what does not fit."""

import pytest
import torch

from shoal.checkpoint.names import plain_names
from shoal.checkpoint.state import digest
from shoal.checkpoint.transfer import Shape, match, transfer
from shoal.spec.errors import UserError


def make_model(seed: int = 0, width: int = 4, classes: int = 3) -> torch.nn.Module:
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(2, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, classes)]
    return torch.nn.Sequential(*layers)


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(5, 3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


@pytest.mark.parametrize(
    ("names", "plain"),
    [
        (["fc.weight"], ["fc.weight"]),
        (["module.fc.weight", "module.fc.bias"], ["fc.weight", "fc.bias"]),
        (["module.fc.weight", "head.bias"], ["module.fc.weight", "head.bias"]),
        (["_orig_mod.module.fc.weight"], ["fc.weight"]),
        (["module._orig_mod.fc.weight"], ["fc.weight"]),
        (["layers.0._orig_mod.weight"], ["layers.0.weight"]),
        (["a._fsdp_wrapped_module._checkpoint_wrapped_module.b"], ["a.b"]),
        (["_orig_mod.a", "a"], ["_orig_mod.a", "a"]),
        (["_orig_mod"], ["_orig_mod"]),
        ([], []),
    ],
)
def test_names_without_what_wrappers_add(names, plain):
    assert list(plain_names(names).values()) == plain


def test_weights_that_fit_are_copied():
    model, other = make_model(1), make_model(2)
    done = transfer(model, other.state_dict())
    assert digest(model.state_dict()) == digest(other.state_dict())
    assert done.is_complete
    assert len(done.loaded) == 9
    assert done.report() == "9 of 9 tensors of the model were taken over"


def test_wrapped_models_and_weights_meet():
    model, other = make_model(1), make_model(2)
    wrapped = {f"module._orig_mod.{name}": tensor for name, tensor in other.state_dict().items()}
    assert transfer(torch.compile(model, backend="eager"), wrapped).is_complete
    assert digest(model.state_dict()) == digest(other.state_dict())


def test_strict_names_each_layer_with_both_shapes_and_touches_nothing():
    model = make_model(1)
    before = digest(model.state_dict())
    weights = make_model(2, classes=7).state_dict()
    weights["extra"] = torch.ones(1)
    del weights["0.bias"]
    with pytest.raises(UserError) as caught:
        transfer(model, weights)
    why = caught.value.why
    assert "2.weight: the model has [3, 4] float32, the weights have [7, 4] float32" in why
    assert "2.bias: the model has [3] float32, the weights have [7] float32" in why
    assert "0.bias: is not in the weights" in why
    assert "extra: is not in the model" in why
    assert "strict=False" in caught.value.hint
    assert digest(model.state_dict()) == before


def test_without_strict_what_fits_is_taken_and_the_rest_reported():
    model, other = make_model(1), make_model(2, classes=7)
    head = model[2].weight.detach().clone()
    weights = {name: tensor for name, tensor in other.state_dict().items() if name != "0.bias"} | {"x": torch.ones(1)}
    done = transfer(model, weights, strict=False)
    assert torch.equal(model[0].weight, other[0].weight)
    assert torch.equal(model[2].weight, head)
    assert [item.name for item in done.mismatched] == ["2.weight", "2.bias"]
    assert (done.missing, done.unexpected) == (("0.bias",), ("x",))
    assert done.report().splitlines() == [
        "6 of 9 tensors of the model were taken over",
        "  does not fit, kept as it was: 2.weight: the model has [3, 4] float32, the weights have [7, 4] float32",
        "  does not fit, kept as it was: 2.bias: the model has [3] float32, the weights have [7] float32",
        "  not in the weights, kept as it was: 0.bias",
        "  not in the model, left out: x",
    ]


def test_floats_are_converted_but_kinds_of_number_are_not():
    model = make_model(1).to(torch.bfloat16)
    weights = make_model(2).state_dict()
    assert transfer(model, weights).is_complete
    assert torch.equal(model[0].weight, weights["0.weight"].to(torch.bfloat16))
    weights["1.num_batches_tracked"] = torch.tensor(1.5)
    with pytest.raises(UserError, match="do not fit") as caught:
        transfer(model, weights)
    assert "1.num_batches_tracked: the model has [] int64, the weights have [] float32" in caught.value.why


def test_a_tied_weight_is_there_if_either_name_is():
    model, other = Tied(), Tied()
    done = transfer(model, {"embedding.weight": other.embedding.weight})
    assert set(done.loaded) == {"embedding.weight", "head.weight"}
    assert torch.equal(model.head.weight, other.head.weight)


def test_a_tied_weight_that_does_not_fit_under_one_name_is_a_mismatch():
    model = {"a": Shape(shape=(2,), dtype=torch.float32), "b": Shape(shape=(2,), dtype=torch.float32)}
    weights = {"a": model["a"], "b": Shape(shape=(3,), dtype=torch.float32)}
    done = match(model, weights, [frozenset("ab")])
    assert done.loaded == ("a",)
    assert [item.name for item in done.mismatched] == ["b"]


def test_parameters_stay_where_they_are():
    """They may live in shared memory, so they are written into, not replaced."""
    model = make_model(1)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    transfer(model, make_model(2).state_dict())
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_lazy_layer_is_named():
    with pytest.raises(UserError, match="'weight' has no shape yet"):
        transfer(torch.nn.LazyLinear(2), {"weight": torch.ones(2, 2)})
