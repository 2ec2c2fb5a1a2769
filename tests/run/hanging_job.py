"""A job that gets stuck: `hanging_job.py HOW`. The first process of rank 1 hangs in its data, or skips a step."""

import os
import sys
import time

import torch
from torch import nn

import shoal

HOW, HANG_AT, STEPS = sys.argv[1], 20, 30
IS_BAD = os.environ.get("RANK") == "1" and os.environ.get("SHOAL_INCARNATION") == "0"
trainer: shoal.Trainer | None = None


def is_time(how: str) -> bool:
    return how == HOW and IS_BAD and trainer is not None and trainer.place.step >= HANG_AT


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> torch.Tensor:
        if is_time("data"):
            time.sleep(600)  # stuck in data
        return torch.full((4,), index / 256)


def elsewhere() -> None:
    time.sleep(600)  # stuck in skip


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


if __name__ == "__main__":
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    trainer = shoal.Trainer(
        model, loss, torch.optim.SGD(model.parameters(), lr=0.1), Numbers(), batch_size=8, shards=4, exact=True
    )
    for batch in trainer:
        if is_time("skip"):
            elsewhere()
        time.sleep(0.1)
        trainer.step(batch)
        if trainer.place.step >= STEPS:
            break
    print("digest", trainer.digest(), flush=True)
