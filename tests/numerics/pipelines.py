"""Trains small models under one configuration after the other, whole or in stages. Workers run it as a script."""

import json
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import shoal
from tests.numerics import models

STEPS = 50

EXACT: list[dict[str, Any]] = [{"kind": kind, "exact": True} for kind in ("mlp", "cnn", "gpt")]
ROUNDED: list[dict[str, Any]] = [
    {"kind": "mlp", "optimizer": "SGD", "max_norm": 0.5, "ema": 0.9},
    {"kind": "cnn", "optimizer": "SGD", "max_norm": 1.0, "is_weighted": True},
    {"kind": "gpt", "optimizer": "SGD", "max_norm": 1.0},
]
BF16: list[dict[str, Any]] = [{"kind": "mlp", "optimizer": "SGD", "precision": "bf16"}]


def cut(configs: list[dict[str, Any]], split: str, **more: Any) -> list[dict[str, Any]]:
    return [{**config, "split": split, **more} for config in configs]


PLANS = {
    "1": {"exact": EXACT, "rounded": ROUNDED, "bf16": BF16},
    "2": {
        "exact": cut(EXACT, "pipeline:2"),
        "exact gpipe": cut(EXACT[1:2], "pipeline:2,schedule=gpipe"),
        "exact over sockets": cut(EXACT[2:], "pipeline:2", transport="tcp"),
        "rounded": cut(ROUNDED, "pipeline:2"),
        "rounded interleaved": cut(ROUNDED[1:], "pipeline:2,schedule=interleaved"),
        "rounded gpipe": cut(ROUNDED[:1], "pipeline:2,schedule=gpipe,microbatches=5"),
        "bf16": cut(BF16, "pipeline:2"),
    },
    "3": {"exact": cut(EXACT, "pipeline:3")},
    "4": {
        "exact": cut(EXACT[1:], "pipeline:2"),
        "rounded": cut(ROUNDED[:1], "pipeline:2"),
        "sharded": cut(ROUNDED[2:], "pipeline:2", sync="sharded:parameters"),
    },
}
"""By number of workers."""


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


def train(kind: str, optimizer: str = "AdamW", is_weighted: bool = False, **settings: Any) -> list[Any]:
    """Digest, losses, the loss in an evaluation of the average, and sums of the answers."""
    model, data, loss = make(kind)
    made = getattr(torch.optim, optimizer)(model.parameters(), lr=0.01)
    settings |= {"batch_size": 48, "shards": 4, "threads": 1, "balance": False}
    settings["scheduler"] = torch.optim.lr_scheduler.StepLR(made, 20, 0.5)
    losses = []
    with shoal.Trainer(model, weighted if is_weighted else loss, made, data, **settings) as trainer:
        while trainer.place.step < STEPS:
            for batch in trainer:
                losses.append(trainer.step(batch))
                if trainer.place.step >= STEPS:
                    break
        with trainer.averaged():
            measured = trainer.evaluate(data)["loss"]
        answers = trainer.predict(data, lambda m, b: m(b[:, :-1]) if kind == "gpt" else m(b[0]))
        return [trainer.digest(), losses, measured, answers.double().sum(0).reshape(-1)[:50].tolist()]


def train_all(num_workers: str) -> dict[str, list[Any]]:
    return {name: [train(**config) for config in configs] for name, configs in PLANS[num_workers].items()}


def go_on(steps: int, split: str, **place: Any) -> list[str]:
    """Train a model with batch statistics up to so many steps, from wherever its folder says it is: digests."""
    model, data, loss = make("cnn")
    made = torch.optim.AdamW(model.parameters(), lr=0.01)
    settings = {"batch_size": 48, "exact": True, "ema": 0.9, "split": split, **place}
    with shoal.Trainer(model, loss, made, data, **settings) as trainer:
        trainer.fit(steps=steps)
        with trainer.averaged():
            average = trainer.digest()
        return [trainer.digest(), average]


if __name__ == "__main__":
    number, goal = sys.argv[1:]
    gone = go_on(int(goal), f"pipeline:{min(2, int(number))}") if int(goal) else []
    print("RESULT", json.dumps({"digests": gone, **train_all(number)}), flush=True)
