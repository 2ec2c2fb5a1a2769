"""Jobs in which workers are lost in ways that only mirrors, or not even they, make up for: `mirror_jobs.py NAME`."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from elastic_jobs import PACE, RUN_DIR, Counting, data, loss, make_net, make_trainer, say
from torch import nn

from shoal.train.sync.sharded_state import Shards

WORKER = os.environ.get("RANK", "")


def die(*others: str) -> None:
    """End these workers and this one at once, as a host does that they are on."""
    for worker in others:
        os.kill(int(Path(RUN_DIR, f"pid-{worker}").read_text()), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def is_first(name: str) -> bool:
    """Whether this is a run under fire in which nobody has done this yet."""
    if not RUN_DIR:
        return False
    try:
        Path(RUN_DIR, f"done-{name}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def neighbours(name: str) -> None:
    """Ranks 1 and 2 die in the same moment, after the checkpoint of step 10."""
    model = Counting(make_net())

    def dying(model: nn.Module, batch: Any) -> torch.Tensor:
        if WORKER == "1" and PACE.trainer is not None and PACE.trainer.place.step == 14 and is_first(name):
            while not any(Path(RUN_DIR, "checkpoints").glob("step-000000010*")):
                time.sleep(0.01)  # it is written in the background
            die("2")
        return loss(model, batch)

    optimizer = torch.optim.SGD(model.groups(momentum=0.9), lr=0.01)
    with make_trainer(model, optimizer, data(), checkpoint_every=10, loss=dying) as trainer:
        trainer.fit(epochs=4)
        say(name, trainer)


def joining(name: str) -> None:
    """A newcomer dies while it takes its parts, and a member when the next one has taken them."""
    inherit = Shards.inherit

    def inherit_or_die(shards: Shards, *args: Any) -> None:
        if os.environ.get("SHOAL_INCARNATION") != "0" and shards.num_parts == 3 and is_first("newcomer"):
            die()
        inherit(shards, *args)
        if WORKER == "0" and shards.num_parts == 3 and Path(RUN_DIR, "done-newcomer").exists() and is_first("member"):
            time.sleep(0.5)  # now they wait for each other
            die()

    Shards.inherit = inherit_or_die  # type: ignore[method-assign]
    model = Counting(make_net())
    optimizer = torch.optim.SGD(model.groups(momentum=0.9), lr=0.01)
    with make_trainer(model, optimizer, data(), ema=0.9) as trainer:
        trainer.fit(epochs=3)
        say(name, trainer)


def loops(name: str) -> None:
    """Loops of one's own; evaluating, predicting and averages between them; checkpoints that are asked for."""
    model = make_net(is_plain=True)
    held_out = data()[:2]
    with make_trainer(model, torch.optim.AdamW(model.parameters(), 1e-3), data(), ema=0.9) as trainer:
        for _ in range(2):
            for batch in trainer:
                trainer.step(batch)
                if trainer.place.step % 5 == 0:
                    trainer.save()
            rows = trainer.predict(held_out)
            with trainer.averaged():
                measured = trainer.evaluate(held_out, measure)
        trainer.fit(epochs=1)
        say(name, trainer, rows=float(rows.double().sum()), measured=measured["loss"])


def measure(model: nn.Module, batch: Any) -> torch.Tensor:
    if WORKER == "2" and is_first("evaluate"):
        die()
    return F.cross_entropy(model(batch[0]), batch[1])


JOBS = {"neighbours": neighbours, "joining": joining, "loops": loops}

if __name__ == "__main__":
    if RUN_DIR:
        Path(RUN_DIR, f"pid-{WORKER}").write_text(str(os.getpid()))
    for job in sys.argv[1:] or JOBS:
        JOBS[job](job)
