"""Local steps under fire: `python elastic_local_jobs.py NAME`. `-o sync=...` says how the workers agree.

Every worker writes down which samples it learns from, in which World and step, and where it enters a World: what
counts in the end can be added up from that. See `test_elastic_local.py`.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from elastic_jobs import PACE, WANTED, die_once
from torch import nn

import shoal
from shoal.train.course import Course

NUM_SAMPLES, BATCH = 96, 12
RUN_DIR = os.environ.get("SHOAL_RUN_DIR", "")
ME = f"{os.environ.get('RANK', '0')}.{os.environ.get('SHOAL_INCARNATION', '0')}"
SLOW = float(os.environ.get("LOCAL_SLOW", "0"))
"""Seconds that each inner batch of worker 0 takes longer: the others are ahead of it."""


def note(**told: Any) -> None:
    with Path(RUN_DIR, f"learned-{ME}.jsonl").open("a") as file:
        file.write(json.dumps(told) + "\n")


def watch_worlds() -> None:
    """Write down where each World begins."""
    settle_in = Course.settle_in

    def settle_and_note(course: Course) -> None:
        settle_in(course)
        note(world=course._team.world.generation, enters=course.place.step)

    Course.settle_in = settle_and_note


def data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_SAMPLES, 8, generator=source)
    return x, x[:, :4].argmax(1), torch.arange(NUM_SAMPLES)


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    PACE.keep()
    x, y, ids = batch
    trainer = PACE.trainer
    if trainer is not None and model.training:
        time.sleep(SLOW * (ME[0] == "0") + 0.1 * (trainer.world_size < WANTED))
        note(world=trainer._team.world.generation, step=trainer.place.step, ids=ids.tolist())
    return F.cross_entropy(model(x), y)


def make_trainer(**settings: Any) -> shoal.Trainer:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
    settings = {"batch_size": BATCH, "ema": 0.9, "max_norm": 1.0, "checkpoint_every": 6, **settings}
    PACE.trainer = shoal.Trainer(model, loss, optimizer, data(), scheduler=scheduler, **settings)
    return PACE.trainer


def say(trainer: shoal.Trainer, **more: Any) -> None:
    told = {"step": trainer.place.step, "digest": trainer.digest(), "loss": trainer.evaluate(data())["loss"]}
    with trainer.averaged():
        told["averaged"] = trainer.digest()
    told["lr"] = trainer.optimizer.param_groups[0]["lr"]
    print("ended", json.dumps({**told, **more}, sort_keys=True), flush=True)


def fit(epochs: int) -> None:
    with make_trainer() as trainer:
        trainer.fit(epochs=epochs)
        say(trainer)


def loop(epochs: int) -> None:
    """A loop of one's own that looks at the model within rounds, and in which workers are lost while they do."""

    def measure(model: nn.Module, batch: Any) -> torch.Tensor:
        die_once("evaluate", 1)
        return F.cross_entropy(model(batch[0]), batch[1])

    with make_trainer(checkpoint_every=None) as trainer:
        for _ in range(epochs):
            for batch in trainer:
                trainer.step(batch)
                if trainer.place.step % 5 == 0:
                    print("looked", json.dumps([trainer.place.step, trainer.digest()]), flush=True)
                if trainer.place.step % 11 == 0:
                    trainer.evaluate(data(), measure)
        say(trainer)


if __name__ == "__main__":
    watch_worlds()
    {"fit": fit, "loop": loop}[sys.argv[1]](int(sys.argv[2]))
