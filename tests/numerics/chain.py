"""Trains on from the last checkpoint of a run, in whatever cell. Workers run this file as a script."""

import json
import sys
from collections.abc import Sequence
from typing import Any

import torch

from tests.numerics import models
from tests.numerics.everything import Cell, make_trainer


def go_on(cell: Cell, goals: Sequence[int], **place: Any) -> dict[str, Any]:
    """Train up to each of these steps, and save there; all workers return the same.

    eps is larger than usual: some gradients of attention are zero but for rounding, which Adam makes whole steps of.
    """
    model, *_ = models.make("recomputed")
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, eps=1e-4)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    losses: list[float] = []
    with make_trainer(cell, optimizer, model, shards=4, ema=0.9, keep=10, scheduler=scheduler, **place) as trainer:
        began, digest = trainer.place.step, trainer.digest()
        for goal in goals:
            losses += models.run_until(trainer, goal)
            trainer.save(wait=True)
        lr = optimizer.param_groups[0]["lr"]
        return {"began": began, "digests": (digest, trainer.digest()), "losses": losses, "lr": lr}


if __name__ == "__main__":
    told, goal = sys.argv[1:]
    print("RESULT", json.dumps(go_on(Cell(**json.loads(told)), [int(goal)])), flush=True)
