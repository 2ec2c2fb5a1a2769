"""One step of a shoal.Trainer: `trainer.py FOLDER`."""

import sys
import time
from pathlib import Path

import torch
from torch import nn

import shoal


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


if __name__ == "__main__":
    torch.manual_seed(0)
    net = nn.Linear(16, 4)
    trainer = shoal.Trainer(net, loss, torch.optim.SGD(net.parameters(), 0.1), torch.randn(64, 16), batch_size=16)
    for batch in trainer:
        trainer.step(batch)
        Path(sys.argv[1], str(trainer.rank)).write_text(repr(time.time()))
        break
    trainer.close()
