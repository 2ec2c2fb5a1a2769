"""Cutting models into stages: what can be followed, what the stages compute together, and where cuts fall."""

import functools
import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from shoal.spec.errors import UserError
from shoal.train.split.balance import choose_bounds, measure_parts, stage_bytes
from shoal.train.split.boundary import Arrival, describe_values, rebuild_values, tensors_in
from shoal.train.split.counting import check_counting, find_changed, read_numbers
from shoal.train.split.cutting import find_places
from shoal.train.split.programs import write_down
from tests.numerics import models


class NanoGPT(nn.Module):
    """Written as many are: containers, positions, a check of the length, recomputation, an argument left out."""

    def __init__(self):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(64, 32),
                "wpe": nn.Embedding(16, 32),
                "h": nn.ModuleList([models.Attention(32, 2, 0.0) for _ in range(3)]),
                "ln": nn.LayerNorm(32),
            }
        )
        self.head = nn.Linear(32, 64)
        self.register_buffer("scale", torch.ones(16, 1))

    def forward(self, tokens, targets=None):
        batch, length = tokens.size()
        assert length <= 16, "too long"
        positions = torch.arange(0, length, device=tokens.device)
        x = self.transformer.wte(tokens) + self.transformer.wpe(positions)
        for block in self.transformer.h:
            x = checkpoint(block, x, use_reentrant=False)
        x = self.transformer.ln(x) * self.scale[:length]
        logits = self.head(x).view(batch * length, -1)
        return (logits, None) if targets is None else (logits, F.cross_entropy(logits, targets))


class Skipping(nn.Module):
    """Values that pass over stages, and a size that is needed late."""

    def __init__(self):
        super().__init__()
        self.down, self.middle, self.up = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(8, 4)

    def forward(self, x, *, gain):
        first = self.down(x)
        size = first.shape[0]
        y = self.middle(first.relu())
        return {"y": self.up(torch.cat([first, y], 1)).view(size, 2, 2) * gain, "n": size}


class Inplace(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.ReLU(inplace=True))

    def forward(self, x):
        return self.layers(x)


class AsksForTypes(nn.Module):
    """Code that only torch.export follows."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        if not isinstance(x, torch.Tensor):
            raise TypeError("a tensor is needed")
        return self.second(self.first(x).relu()).reshape(x.shape[0], 2, 2)


class RecomputesUnfollowed(AsksForTypes):
    """Recomputation in code that only torch.export follows, under another name than torch's."""

    def forward(self, x):
        return super().forward(recompute(self.first, x))


recompute = functools.partial(checkpoint, use_reentrant=False)


def tokens(count=3):
    return torch.randint(0, 64, (count, 12))


CASES = {
    "mlp": (lambda: models.make("mlp")[0], lambda n: ((torch.randn(n, 20),), {})),
    "gpt in blocks": (lambda: models.GPT(0.0), lambda n: ((tokens(n),), {})),
    "nanogpt": (NanoGPT, lambda n: ((tokens(n),), {})),
    "skips": (Skipping, lambda n: ((torch.randn(n, 4),), {"gain": torch.tensor(2.0)})),
    "in place": (Inplace, lambda n: ((torch.randn(n, 4),), {})),
    "exported": (AsksForTypes, lambda n: ((torch.randn(n, 4),), {})),
}


@pytest.mark.parametrize("name", CASES)
def test_the_stages_together_are_the_model(name):
    """For every cut, and another number of samples than was looked at: same outputs, same gradients."""
    make, give = CASES[name]
    torch.manual_seed(0)
    model = make()
    program = write_down(model, *give(3), 2, ())
    args, kwargs = give(5)
    inputs = [*args, *kwargs.values()]
    expected = model(*args, **kwargs)
    tensors = []
    describe_values(expected, tensors)
    wanted = torch.autograd.grad(sum(t.sum() for t in tensors), list(model.parameters()))
    assert len(program.layers) >= 2
    for layer in program.layers[1:]:
        first, second = program.extract(0, layer.at), program.extract(layer.at, len(program.nodes))
        given = first(program.root, *inputs)
        sent = []
        fact = describe_values(given, sent)
        arrival = Arrival([t.detach().clone() for t in sent if t.requires_grad])
        entered = iter(arrival.enter())
        received = rebuild_values(fact, iter([next(entered) if t.requires_grad else t for t in sent]), sent[0].device)
        (found,) = second(program.root, *inputs, *received)
        outputs = []
        assert describe_values(found, outputs) == describe_values(expected, [])
        assert all(torch.equal(a, b) for a, b in zip(outputs, tensors, strict=True))
        sum(t.sum() for t in outputs).backward()
        torch.autograd.backward([t for t in sent if t.requires_grad], arrival.gradients)
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), wanted, strict=True))
        model.zero_grad()


def test_layers_that_are_recomputed_are_called_and_not_read():
    assert set(write_down(NanoGPT(), (tokens(),), {}, 2, ()).direct()) == {"scale"}


def test_activations_that_would_not_be_recomputed_are_refused():
    """torch.export takes layers apart, and would keep them."""
    with pytest.raises(UserError, match=r"cannot recompute activations \(torch.utils.checkpoint\)") as raised:
        write_down(RecomputesUnfollowed(), (torch.randn(3, 4),), {}, 2, ())
    assert "torch.export, which takes layers apart" in raised.value.why


def test_layers_are_those_of_containers_unless_there_are_too_few():
    assert [layer.name for layer in write_down(models.GPT(), (tokens(),), {}, 2, ()).layers] == [
        "embed", "blocks.0", "blocks.1", "head",
    ]  # fmt: skip
    finer = [layer.name for layer in write_down(models.GPT(), (tokens(),), {}, 6, ()).layers]
    assert "blocks.0.qkv" in finer
    named = [layer.name for layer in write_down(models.GPT(), (tokens(),), {}, 2, ("blocks.1.mlp",)).layers]
    assert "blocks.0" in named
    assert "blocks.1.mlp.0" in named


def test_the_user_s_model_is_left_as_it_was():
    model = NanoGPT()
    before = set(vars(model)), torch.get_rng_state()
    write_down(model, (tokens(),), {}, 2, ())
    assert set(vars(model)) == before[0]


class Decides(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        return self.second(x) if x.sum() > 0 else x


def test_a_decision_by_values_is_named():
    with pytest.raises(UserError, match=r"Decides.*cannot be cut into stages") as caught:
        write_down(Decides(), (torch.randn(2, 4),), {}, 2, ())
    assert "decides by the values of a tensor" in caught.value.render()


def test_a_decision_inside_a_layer_is_the_layer_s_own():
    model = nn.Sequential(nn.Linear(4, 4), Decides(), nn.Linear(4, 4))
    assert [layer.name for layer in write_down(model, (torch.randn(2, 4),), {}, 2, ()).layers] == ["0", "1", "2"]


def test_a_decision_by_a_size_holds_for_that_size_only():
    program = write_down(NanoGPT(), (tokens(),), {}, 2, ())
    stage = program.extract(0, program.layers[-1].at)
    stage(program.root, torch.randint(0, 64, (2, 9)))
    with pytest.raises(UserError, match="depends on a size that has changed"):
        stage(program.root, torch.randint(0, 64, (2, 17)))


WAYS = {
    "in place": lambda model: model.seen.add_(1),
    "augmented": lambda model: setattr(model, "seen", operator.iadd(model.seen, 1)),
    "scaled": lambda model: setattr(model, "seen", operator.imul(model.seen, 2)),
    "anew": lambda model: setattr(model, "seen", model.seen + 1),
    "twice": lambda model: (setattr(model, "seen", model.seen + 1), setattr(model, "seen", model.seen * 2)),
    "a constant": lambda model: setattr(model, "seen", torch.tensor(7.0)),
}


class Counting(nn.Module):
    """Changes a buffer between its layers, and computes with what it was and with what it is."""

    def __init__(self, way):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.way = nn.Linear(4, 4), nn.Linear(4, 4), way
        self.register_buffer("seen", torch.ones(()))

    def forward(self, x):
        x = self.first(x)
        before = self.seen
        WAYS[self.way](self)
        return self.last(x * before) / self.seen


@pytest.mark.parametrize("way", WAYS)
def test_a_buffer_that_changes_between_layers_does_so_in_every_call(way):
    model, alone = Counting(way), Counting(way)
    program = write_down(model, (torch.ones(2, 4),), {}, 2, ())
    assert program.called() == ["first", "last"], "layers are called as they are"
    model.seen = torch.ones(())
    forward = program.extract(0, len(program.nodes))
    for _ in range(3):
        inputs = torch.randn(3, 4)
        assert torch.equal(forward(program.root, inputs)[0], alone(inputs))
        assert torch.equal(model.seen, alone.seen)
        assert not model.seen.requires_grad


class CountsCalls(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.calls, self.last = nn.Linear(4, 4), nn.Linear(4, 4), 0, None

    def forward(self, x):
        self.calls += 1
        self.last = self.first(x)
        return self.second(self.last) * self.calls


def counted(model):
    data = torch.ones(2, 4)
    numbers = read_numbers(model)
    model(data)
    return find_changed(model, numbers), write_down(model, (data,), {}, 2, ())


def test_code_that_counts_its_calls_is_refused_and_a_layer_that_does_is_not():
    model = CountsCalls()
    changed, program = counted(model)
    assert changed == {"": "calls"}
    with pytest.raises(UserError, match=r"forward of itself changes `self\.calls`"):
        check_counting(model, program, changed)
    assert isinstance(model.last, torch.Tensor), "what it is to the user"
    model = nn.Sequential(nn.Linear(4, 4), CountsCalls(), nn.Linear(4, 4))
    changed, program = counted(model)
    assert changed == {"1": "calls"}
    check_counting(model, program, changed)
    finer = write_down(model, (torch.ones(2, 4),), {}, 4, ())
    with pytest.raises(UserError, match=r"forward of 1 \(CountsCalls\) changes"):
        check_counting(model, finer, changed)


def places_of(model, inputs, num_stages=2, changing=()):
    return find_places(write_down(model, inputs, {}, num_stages, ()), model, changing)


def test_a_shared_parameter_is_named_with_those_who_share_it():
    places = places_of(models.GPT(), (tokens(),))
    assert places.allowed == []
    with pytest.raises(UserError, match=r"embed\.weight is used on both sides, by embed and head"):
        places.check_enough(2)
    with pytest.raises(UserError, match="cannot be cut before blocks"):
        places.given(("blocks.1",), 2)


def test_a_buffer_that_changes_on_both_sides_is_named():
    norm = nn.BatchNorm1d(4, affine=False)
    model = nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 4), norm)
    places = places_of(model, (torch.randn(3, 4),), 2, list(norm.buffers()))
    with pytest.raises(UserError, match=r"the buffer 1\.running_mean is used on both sides"):
        places.given(("2",), 2)


@pytest.mark.parametrize(
    ("cuts", "stages", "said"),
    [
        (("1",), 3, r"1 cut\(s\) do not make 3 stages"),
        (("nine",), 2, "no layer 'nine'"),
        (("0",), 2, "not in the order"),
        (("2", "1"), 3, "not in the order"),
    ],
)
def test_wrong_cuts_are_refused(cuts, stages, said):
    places = places_of(models.make("mlp")[0], (torch.randn(2, 20),))
    with pytest.raises(UserError, match=said):
        places.given(cuts, stages)


def test_more_stages_than_layers_are_refused():
    with pytest.raises(UserError, match="9 stages are more than the model's 3 layer") as caught:
        places_of(models.make("mlp")[0], (torch.randn(2, 20),)).check_enough(9)
    assert "shoal.pipeline(3)" in caught.value.render()


@pytest.mark.parametrize(
    ("seconds", "num_bytes", "stages", "bounds"),
    [
        ([1, 1, 1, 1], [1, 1, 1, 1], 2, [0, 2, 4]),
        ([4, 1, 1, 1, 1], [0] * 5, 2, [0, 1, 5]),
        ([1, 2, 3, 4, 5, 6], [0] * 6, 3, [0, 3, 5, 6]),
        ([1, 1, 1, 1, 0.01], [9, 1, 1, 1, 9], 2, [0, 2, 5]),
        ([1, 1.01, 0.02, 1, 1], [5, 5, 9, 1, 1], 2, [0, 2, 5]),
        ([1], [1], 1, [0, 1]),
    ],
)
def test_stages_take_equally_long_and_then_need_equally_much(seconds, num_bytes, stages, bounds):
    need = stage_bytes(num_bytes, [0] * len(seconds), [1] * stages)
    assert choose_bounds(seconds, need, stages) == bounds


def test_a_stage_that_keeps_more_microbatches_gets_what_saves_less():
    """Two cuts are as fast; the first stage keeps two micro-batches where the second keeps one."""
    seconds, saved = [1, 0.01, 1], [1, 5, 1]
    assert choose_bounds(seconds, stage_bytes([0, 0, 0], saved, [1, 2]), 2) == [0, 2, 3]
    assert choose_bounds(seconds, stage_bytes([0, 0, 0], saved, [2, 1]), 2) == [0, 1, 3]
    assert choose_bounds(seconds, stage_bytes([0, 0, 9], saved, [2, 1]), 2) == [0, 2, 3], "its state counts, too"


def test_every_part_is_measured():
    model = models.make("cnn")[0]
    program = write_down(model, (torch.randn(3, 1, 8, 8),), {}, 2, ())
    every = [0, *(layer.at for layer in program.layers[1:]), len(program.nodes)]
    held = [*model.parameters(), *model.buffers()]
    seconds, saved = measure_parts(program, every, [torch.randn(3, 1, 8, 8)], torch.enable_grad, held)
    assert len(seconds) == len(saved) == 9
    assert all(value > 0 for value in seconds)


def test_what_a_part_keeps_for_its_backward_is_counted():
    model = nn.Sequential(nn.Linear(4, 100), nn.Linear(100, 50), nn.Tanh())
    data = torch.randn(3, 4)
    program = write_down(model, (data,), {}, 3, ())
    every = [0, *(layer.at for layer in program.layers[1:]), len(program.nodes)]
    _, saved = measure_parts(program, every, [data], torch.enable_grad, list(model.parameters()))
    assert saved == [0, 3 * 100 * 4, 3 * 50 * 4], "what was given, what was received, and its own output"


def test_values_are_described_and_rebuilt():
    value = (torch.ones(2, 3, requires_grad=True), [1, None, {"a": torch.zeros(0, dtype=torch.int64)}], torch.float16)
    tensors = []
    fact = describe_values(value, tensors)
    assert tensors_in(fact) == [(torch.float32, [2, 3], True), (torch.int64, [0], False)]
    made = rebuild_values(fact, iter(tensors), torch.device("cpu"))
    assert made[0] is value[0]
    assert made[1][:2] == [1, None]
    assert made[2] is torch.float16
    with pytest.raises(UserError, match="cannot hand on a set"):
        describe_values({1, 2}, [])
