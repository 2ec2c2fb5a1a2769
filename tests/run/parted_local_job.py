"""Copies that are held in parts and train by themselves, as options say. `WANTED`: how many workers are to be there.

Every worker writes down which shards it learns from, in which World; where it enters one, and whether it had to let
go of what it had learned in the last.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shoal
from shoal.train.course import Course
from shoal.train.sync.local_agreement import Agreement
from shoal.train.team import Team

ME = f"{os.environ.get('RANK', '0')}.{os.environ.get('SHOAL_INCARNATION', '0')}"
RUN_DIR, WANTED = Path(os.environ["SHOAL_RUN_DIR"]), int(os.environ["WANTED"])
trainer: shoal.Trainer | None = None


def note(**told: Any) -> None:
    world = trainer._team.world.generation if trainer is not None and trainer._team.world is not None else 0
    with (RUN_DIR / f"learned-{ME}.jsonl").open("a") as file:
        file.write(json.dumps({"world": world, **told}) + "\n")


def watch() -> None:
    settle_in, learn, let_go = Course.settle_in, Agreement.learn, Team._let_go

    def settle_and_note(course: Course) -> None:
        settle_in(course)
        note(world=course._team.world.generation, enters=course.place.step)

    def learn_and_note(agreement: Agreement, step: int, shard: int, update: Any) -> None:
        learn(agreement, step, shard, update)
        note(step=step, shard=shard)

    def let_go_and_note(team: Team) -> None:
        if team.has_state:
            note(is_in_vain=True)
        let_go(team)

    Course.settle_in, Agreement.learn, Team._let_go = settle_and_note, learn_and_note, let_go_and_note


def are_all_up() -> bool:
    """Whether as many processes as are to be there have come as far as this script."""
    return sum(Path("/proc", path.name.removeprefix("up-")).exists() for path in RUN_DIR.glob("up-*")) >= WANTED


def pause() -> None:
    """Until the lost are replaced, however long they take to start; not so long at a time that we seem to hang."""
    deadline = time.monotonic() + 4.0
    while trainer.world_size < WANTED and not are_all_up() and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.2 if trainer.world_size < WANTED else 0.005)


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    if trainer is not None:
        pause()
    inputs, targets = batch
    return (model(inputs) - targets).square().mean()


(RUN_DIR / f"up-{os.getpid()}").touch()
watch()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
source = torch.Generator().manual_seed(1)
inputs = torch.randn(120, 6, generator=source)
data = inputs, inputs.sum(1, keepdim=True)
trainer = shoal.Trainer(
    model, loss, optimizer, data, batch_size=24, shards=4, scheduler=scheduler, max_norm=1.0, checkpoint_every=5
)
trainer.fit(steps=int(os.environ["STEPS"]))
ending = {"digest": trainer.digest(), "step": trainer.place.step, "lr": optimizer.param_groups[0]["lr"]}
print("ended", json.dumps(ending | {"loss": trainer.evaluate(data)["loss"]}), flush=True)
