"""Mistakes that need two workers: run as `shoal run -n 2 mistaken.py CASE`, or called through `shoal.launch`."""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch
from mistakes import INPUTS, TARGETS, fit, make, mean_loss
from torch import nn
from torch.utils.data import Dataset

from shoal.spec.errors import ShoalError

RANK = int(os.environ.get("RANK", "0"))


# All workers notice, and all say the same.


def with_nan() -> None:
    inputs = INPUTS.clone()
    inputs[17] = torch.nan
    fit(data=(inputs, TARGETS), steps=4, not_finite="error")


def with_bad_gradient() -> None:
    fit(loss=lambda model, batch: mean_loss(model, batch) + (model[2].bias * 0).sum().sqrt(), not_finite="error")


def with_different_models() -> None:
    fit(model=nn.Sequential(nn.Linear(4, 8 + RANK), nn.Linear(8 + RANK, 3)))


def with_different_optimizers() -> None:
    model = nn.Linear(4, 3)
    fit(model=model, optimizer=(torch.optim.SGD, torch.optim.Adam)[RANK](model.parameters(), 0.1))


def with_data_cut_by_rank() -> None:
    fit(data=(INPUTS[RANK::2], TARGETS[RANK::2]))


COMMON: dict[str, Callable[[], None]] = {
    "nan": with_nan,
    "nan over sockets": lambda: fit(data=(INPUTS.log(), TARGETS), transport="tcp"),
    "gradient": with_bad_gradient,
    "models": with_different_models,
    "shards": lambda: fit(batch_size=1),
    "seed": lambda: fit(seed=RANK),
    "optimizer": with_different_optimizers,
    "length": lambda: fit(data=(INPUTS[RANK:], TARGETS[RANK:])),
    "cut": with_data_cut_by_rank,
    "steps": lambda: fit(steps=3 + RANK),
}


def train_past_nan() -> str:
    """Such a step is left out by all, unless they are told to end."""
    inputs = INPUTS.clone()
    inputs[17] = torch.nan
    with make(data=(inputs, TARGETS), exact=True) as trainer:
        for batch in trainer:
            trainer.step(batch)
        return f"{trainer.place.step} {trainer.digest()}"


def collect() -> dict[str, str]:
    """What this worker is told for each of them, one after the other in the same processes."""
    told = {}
    for name, act in COMMON.items():
        try:
            act()
        except ShoalError as error:
            told[name] = error.render()
    return {**told, "past nan": train_past_nan()}


# One worker fails, the other waits for it.


def get_a_wrong_batch() -> None:
    calls = iter(range(1000))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        if RANK == 1 and next(calls) == 3:
            inputs = inputs[:, :3]
        return mean_loss(model, (inputs, targets))

    make(loss=loss, checkpoint_every=1).fit(steps=9)


def die() -> None:
    trainer = make(checkpoint_every=1)
    for batch in trainer:
        if batch.plan.step == 3:
            trainer.save(wait=True)
            if RANK == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        trainer.step(batch)


class Failing(Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, number: int) -> Any:
        if number == 17:
            raise KeyError("label")
        return INPUTS[number], TARGETS[number]


def fail_to_load() -> None:
    make(data=Failing(), loaders=1).fit(steps=4)


# Not a mistake of the script's.


def train() -> None:
    """A model of 600 kB, saved again and again."""
    model = nn.Sequential(nn.Linear(4, 20_000), nn.Linear(20_000, 3))
    make(model=model, checkpoint_every=2).fit(steps=12)
    print("trained")


if __name__ == "__main__":
    globals()[sys.argv[1]]()
