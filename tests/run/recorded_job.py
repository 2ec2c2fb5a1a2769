"""A job that trains until it is stopped, or has done that for far too long."""

import time

import torch
from torch import nn

import shoal

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
data = torch.utils.data.TensorDataset(torch.randn(256, 16), torch.randn(256, 1))


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    time.sleep(0.005)
    return nn.functional.mse_loss(model(batch[0]), batch[1])


trainer = shoal.Trainer(
    model, loss, torch.optim.SGD(model.parameters(), lr=0.01), data, batch_size=32, checkpoint_every=50, balance=False
)
trainer.fit(epochs=2000)
