"""One process of shoal against a plain PyTorch loop over the same samples."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoal

TOLERANCE = 1e-5
"""Relative. Both sides sum the same float32 numbers, in another order."""


@pytest.fixture
def problem():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    return model, torch.randn(50, 6), torch.randint(0, 3, (50,))


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def reference(model, data, make_optimizer, ledger, steps, *, max_norm=None, scheduler=None, batch_loss=loss):
    """What PyTorch alone does with the same batches."""
    optimizer = make_optimizer(model.parameters())
    schedule = scheduler(optimizer) if scheduler else None
    place = ledger.place(0)
    for _ in range(steps):
        count = ledger.count(place)
        ids = torch.from_numpy(ledger.ids(place.epoch, place.offset, place.offset + count))
        optimizer.zero_grad()
        result = batch_loss(model, tuple(part[ids] for part in data))
        (result[0] / result[1] if isinstance(result, tuple) else result).backward()
        if max_norm:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        if schedule:
            schedule.step()
        place = ledger.advance(place, count)
    return model


def assert_equal_models(ours, theirs):
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=TOLERANCE, atol=TOLERANCE, msg=name)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "dampening": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.5),
    "adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01),
    "nadam": lambda p: torch.optim.NAdam(p, 0.01),
    "radam": lambda p: torch.optim.RAdam(p, 0.01),
    "adamax": lambda p: torch.optim.Adamax(p, 0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.05),
    "adadelta": lambda p: torch.optim.Adadelta(p, 1.0),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, 0.01),
    "asgd": lambda p: torch.optim.ASGD(p, 0.05),
    "adafactor": lambda p: torch.optim.Adafactor(p, 0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_does_what_pytorch_does(name, problem, run_dir):
    model, *data = problem
    theirs = copy.deepcopy(model)
    with shoal.Trainer(
        model, loss, OPTIMIZERS[name](model.parameters()), tuple(data), batch_size=16, run_dir=run_dir
    ) as trainer:
        trainer.fit(steps=9)
        reference(theirs, data, OPTIMIZERS[name], trainer.ledger, 9)
        assert_equal_models(model, theirs)


@pytest.mark.parametrize("microbatch_size", [None, 5])
def test_clipping_schedules_and_accumulation(microbatch_size, problem, run_dir):
    model, *data = problem
    theirs = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)

    def cosine(optimizer):
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    with shoal.Trainer(
        model,
        loss,
        optimizer,
        tuple(data),
        batch_size=16,
        scheduler=cosine(optimizer),
        max_norm=0.1,
        microbatch_size=microbatch_size,
        run_dir=run_dir,
    ) as trainer:
        trainer.fit(steps=12)
        reference(
            theirs, data, lambda p: torch.optim.AdamW(p, 0.05), trainer.ledger, 12, max_norm=0.1, scheduler=cosine
        )
        assert_equal_models(model, theirs)


def weighted(model, batch):
    """As with padded tokens: samples of class 0 do not count, and the others count as much as their class."""
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return (losses * batch[1]).sum(), batch[1].sum()


@pytest.mark.parametrize("exact", [False, True])
def test_weights_give_the_mean_over_the_global_batch_and_not_a_mean_of_means(exact, problem, run_dir):
    model, *data = problem
    theirs = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    with shoal.Trainer(
        model, weighted, optimizer, tuple(data), batch_size=16, exact=exact, microbatch_size=3, run_dir=run_dir
    ) as trainer:
        trainer.fit(steps=6)
        reference(theirs, data, lambda p: torch.optim.SGD(p, 0.5), trainer.ledger, 6, batch_loss=weighted)
        assert_equal_models(model, theirs)


def test_parameter_groups_keep_their_own_settings(problem, run_dir):
    model, *data = problem
    theirs = copy.deepcopy(model)

    def optimizer_of(model):
        groups = [
            {"params": model[0].parameters(), "lr": 0.5},
            {"params": model[2].parameters(), "weight_decay": 0.3},
        ]
        return torch.optim.SGD(groups, 0.01, momentum=0.9)

    with shoal.Trainer(model, loss, optimizer_of(model), tuple(data), batch_size=16, run_dir=run_dir) as trainer:
        trainer.fit(steps=6)
        reference(theirs, data, lambda _: optimizer_of(theirs), trainer.ledger, 6)
        assert_equal_models(model, theirs)


def test_the_moving_average_follows_the_parameters(problem, run_dir):
    model, *data = problem
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    with shoal.Trainer(model, loss, optimizer, tuple(data), batch_size=16, ema=0.9, run_dir=run_dir) as trainer:
        average = [p.detach().clone() for p in model.parameters()]
        for _ in range(5):
            trainer.fit(steps=1)
            for kept, p in zip(average, model.parameters(), strict=True):
                kept.lerp_(p.detach(), 0.1)
        now = [p.detach().clone() for p in model.parameters()]
        with trainer.averaged():
            for kept, p in zip(average, model.parameters(), strict=True):
                torch.testing.assert_close(p.detach(), kept)
        for kept, p in zip(now, model.parameters(), strict=True):
            assert torch.equal(p.detach(), kept)


def test_bf16_trains_close_to_float32(problem, run_dir):
    model, *data = problem
    theirs = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with shoal.Trainer(
        model, loss, optimizer, tuple(data), batch_size=16, precision="bf16", run_dir=run_dir
    ) as trainer:
        trainer.fit(steps=6)
        reference(theirs, data, lambda p: torch.optim.SGD(p, 0.1), trainer.ledger, 6)
    for a, b in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=0.02, atol=0.02)
        assert a.dtype == torch.float32


def test_a_model_keeps_working_after_the_trainer_is_closed(problem, run_dir):
    model, *data = problem
    with shoal.Trainer(
        model, loss, torch.optim.SGD(model.parameters(), 0.1), tuple(data), batch_size=16, run_dir=run_dir
    ) as trainer:
        trainer.fit(epochs=1)
        digest = trainer.digest()
    assert len(digest) == 64
    loss(model, tuple(data)).backward()
    assert all(p.grad is not None for p in model.parameters())
