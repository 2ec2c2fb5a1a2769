"""A model that keeps 4 MB for each sample, trained by workers of which one has little memory. Also run as a script.

RANK 1 gets `memory=` LITTLE_MB more than it uses, or goes into the control group LITTLE_GROUP; the others have no
limit. Every worker prints a line of JSON.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shoal
from shoal.engine.machine import forget_peak, peak_memory_bytes, used_memory_bytes

BATCH_SIZE = 32
NUM_STEPS = 8
MB = 1 << 20


class Scaled(nn.Module):
    """A layer that costs memory and hardly any time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + torch.randn(width) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x * self.weight)


class Deep(nn.Module):
    def __init__(self, num_layers: int = 8, width: int = 256) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Scaled(width) for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, None, :].expand(-1, 512, -1)
        for layer in self.layers:
            x = layer(x)
        return x.mean((1, 2))


def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def make_trainer(little_mb: str | None = None, **settings: Any) -> tuple[shoal.Trainer, nn.Module]:
    model = Deep()
    source = torch.Generator().manual_seed(1)
    data = torch.randn(256, 256, generator=source), torch.randn(256, generator=source)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    if little_mb is not None:  # torch has loaded most of itself by now
        loss(model, tuple(column[:1] for column in data)).backward()
        optimizer.zero_grad()
        settings["memory"] = used_memory_bytes() + int(little_mb) * MB
    return shoal.Trainer(model, loss, optimizer, data, batch_size=BATCH_SIZE, **settings), model


def values_of(model: nn.Module) -> list[float]:
    return torch.cat([value.detach() for value in model.parameters()])[::64].tolist()


def main() -> None:
    is_small = os.environ["RANK"] == "1"
    if is_small and "LITTLE_GROUP" in os.environ:
        Path(os.environ["LITTLE_GROUP"], "cgroup.procs").write_text(str(os.getpid()))
    trainer, model = make_trainer(os.environ.get("LITTLE_MB") if is_small else None, balance=False)
    before = used_memory_bytes()
    forget_peak()
    trainer.fit(steps=NUM_STEPS)
    peak = peak_memory_bytes()
    facts = {"memory": trainer.settings.memory, "before": before, "peak": peak, "values": values_of(model)}
    facts["loss"] = trainer.evaluate((torch.ones(200, 256), torch.ones(200)))["loss"]
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
