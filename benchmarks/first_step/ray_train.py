"""The same step under Ray's TorchTrainer: `ray_train.py FOLDER`."""

import sys
import time
from pathlib import Path
from typing import Any

import torch
from ray.train import ScalingConfig, get_context
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn


def work(config: dict[str, Any]) -> None:
    model = prepare_model(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
    Path(config["folder"], str(get_context().get_world_rank())).write_text(repr(time.time()))


if __name__ == "__main__":
    TorchTrainer(work, train_loop_config={"folder": sys.argv[1]}, scaling_config=ScalingConfig(num_workers=2)).fit()
