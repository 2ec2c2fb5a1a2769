"""Ray's TorchTrainer, for ever, with a checkpoint that a restart goes on from: `ray_train.py FOLDER`.

It is reported after every step, so that as little as possible is lost. `FOLDER/pids` has a file for each worker,
`FOLDER/steps.jsonl` a line for each step: its number, when it was done, and how often workers were started before.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from ray.train import (
    Checkpoint,
    CheckpointConfig,
    FailureConfig,
    RunConfig,
    ScalingConfig,
    get_checkpoint,
    get_context,
    report,
)
from ray.train.torch import TorchTrainer, prepare_model

from benchmarks.under_fire.model import BATCH, data, loss, make

NUM_WORKERS = 2


def work(config: dict[str, Any]) -> None:
    folder, rank = Path(config["folder"]), get_context().get_world_rank()
    model = prepare_model(make())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    step, num_starts = 0, 0
    if (saved := get_checkpoint()) is not None:
        with saved.as_directory() as place:
            state = torch.load(Path(place, "state.pt"))
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, num_starts = state["step"], state["num_starts"]
    (folder / "pids" / str(rank)).write_text(str(os.getpid()))
    samples, share = data(), BATCH // NUM_WORKERS
    while True:
        first = (step * BATCH + rank * share) % len(samples[0])
        optimizer.zero_grad()
        loss(model, tuple(part[first : first + share] for part in samples)).backward()
        optimizer.step()
        step += 1
        if rank == 0:
            with (folder / "steps.jsonl").open("a") as steps:
                print(json.dumps({"step": step, "time": time.time(), "starts": num_starts}), file=steps)
        keep(model, optimizer, {"step": step, "num_starts": num_starts + 1})


def keep(model: torch.nn.Module, optimizer: torch.optim.Optimizer, place: dict[str, int]) -> None:
    """Report a step; rank 0 with a checkpoint."""
    if get_context().get_world_rank():
        report(place)
        return
    with tempfile.TemporaryDirectory() as name:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **place}
        torch.save(state, Path(name, "state.pt"))
        report(place, checkpoint=Checkpoint.from_directory(name))


if __name__ == "__main__":
    Path(sys.argv[1], "pids").mkdir()
    TorchTrainer(
        work,
        train_loop_config={"folder": sys.argv[1]},
        scaling_config=ScalingConfig(num_workers=NUM_WORKERS),
        run_config=RunConfig(
            storage_path=sys.argv[1],
            failure_config=FailureConfig(max_failures=1000),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    ).fit()
