"""Trains small models under one configuration after the other, whole or cut into stages: workers import it by name."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import shoal
from tests.numerics import models

STEPS = 50


def make(kind: str) -> tuple[nn.Module, Any, Any]:
    """As in `models`, but the GPT's embedding is not its head: a parameter belongs to one stage."""
    model, data, loss = models.make(kind)
    if kind == "gpt":
        torch.manual_seed(7)
        assert isinstance(model, models.GPT)
        model.head = nn.Linear(32, 64, bias=False)
    return model, data, loss


def weighted(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Some samples count, some do not: (sum, weight)."""
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    mask = (batch[1] % 3 > 0).float()
    return (losses * mask).sum(), mask.sum()


def train(kind: str, optimizer: str = "AdamW", is_weighted: bool = False, steps: int = STEPS, **settings: Any) -> Any:
    """(digest, losses, loss of an evaluation of the average, sums of the answers)."""
    model, data, loss = make(kind)
    made = getattr(torch.optim, optimizer)(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(made, 20, 0.5)
    chosen = weighted if is_weighted else loss
    losses = []
    with shoal.Trainer(
        model, chosen, made, data, batch_size=48, scheduler=scheduler, balance=False, **settings
    ) as trainer:
        while trainer.place.step < steps:
            for batch in trainer:
                losses.append(trainer.step(batch))
                if trainer.place.step >= steps:
                    break
        with trainer.averaged():
            measured = trainer.evaluate(data)["loss"]
        answers = trainer.predict(data, lambda m, b: m(b[:, :-1]) if kind == "gpt" else m(b[0]))
        return trainer.digest(), losses, measured, answers.double().sum(0).reshape(-1)[:50].tolist()


def train_all(configs: list[dict[str, Any]]) -> list[Any]:
    return [train(**config) for config in configs]


def save_then_resume(folder: str, configs: list[dict[str, Any]]) -> str:
    """Twelve steps, or as many as are left of them, from whatever is in the folder."""
    digest = ""
    for config in configs:
        model, data, loss = make("cnn")
        made = torch.optim.AdamW(model.parameters(), lr=0.01)
        with shoal.Trainer(model, loss, made, data, batch_size=48, exact=True, ema=0.9, resume=True, **config) as trainer:
            trainer.fit(steps=12 - trainer.place.step if trainer.place.step else 6)
            digest = trainer.digest()
    return digest
