"""A Trainer whose steps are 20 ms of sleep and a small model: `train.py FOLDER STEPS`. Each rank leaves its times.

With WATCHED=off nothing is written down. Who came when is found out nevertheless: that is part of how workers meet.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shoal
from shoal.observe.recorder import Recorder

FOLDER, NUM_STEPS = Path(sys.argv[1]), int(sys.argv[2])
STEP_SECONDS = 0.02
IS_ON = os.environ.get("WATCHED") != "off"


def nothing(*args: Any, **named: Any) -> None:
    return None


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    time.sleep(STEP_SECONDS)
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def main() -> None:
    if not IS_ON:
        for name in ("step", "event", "flush"):
            setattr(Recorder, name, nothing)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
    data = torch.randn(4096, 32), torch.randn(4096, 8)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    trainer = shoal.Trainer(model, loss, optimizer, data, batch_size=128, shards=4, balance=False, threads=1)
    seconds: list[float] = []
    ended = time.perf_counter()
    while len(seconds) < NUM_STEPS:
        for batch in trainer:
            value = trainer.step(batch)
            if IS_ON:
                shoal.log({f"own/{number}": value for number in range(10)})
            began, ended = ended, time.perf_counter()
            seconds.append(ended - began)
    (FOLDER / f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(seconds[:NUM_STEPS]))


main()
