"""DistributedDataParallel, for ever, as torchrun's documentation has it: a checkpoint that a restart goes on from.

It is written after every step, so that as little as possible is lost. `FOLDER/pids` has a file for each worker,
`FOLDER/steps` a line for each step: its number, when it was done, and how often everything was restarted.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from model import BATCH, data, loss, make
from torch.nn.parallel import DistributedDataParallel

folder = Path(sys.argv[1])
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
model = DistributedDataParallel(make())
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
saved, step = folder / "checkpoint.pt", 0
if saved.exists():
    state = torch.load(saved)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
(folder / "pids" / str(rank)).write_text(str(os.getpid()))

samples = data()
share = BATCH // size
with (folder / "steps").open("a") as steps:
    while True:
        first = (step * BATCH + rank * share) % len(samples[0])
        optimizer.zero_grad()
        loss(model, tuple(part[first : first + share] for part in samples)).backward()
        optimizer.step()
        step += 1
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, folder / "next.pt")
            os.replace(folder / "next.pt", saved)
            print(step, time.time(), os.environ["TORCHELASTIC_RESTART_COUNT"], file=steps, flush=True)
