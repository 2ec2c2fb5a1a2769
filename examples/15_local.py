"""Workers that train by themselves and agree now and then: for links that are slow beside the computing.

    shoal run -n 2 examples/15_local.py
    shoal run -n 2 -o sync=all_reduce examples/15_local.py

The first is DiLoCo: every worker takes 10 steps of its own, then all agree, while the next steps go on. The second
trains together, step by step. On one machine both are fast; over a slow link the first is many times faster.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import shoal

digits = load_digits()
x, y = torch.from_numpy(digits.data).float() / 16, torch.from_numpy(digits.target)
train, test = (x[:1500], y[:1500]), (x[1500:], y[1500:])


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def accuracy(model, batch):
    return (model(batch[0]).argmax(1) == batch[1]).float().mean()


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
trainer = shoal.Trainer(model, loss, optimizer, train, batch_size=64, sync=shoal.diloco(every=10))
trainer.fit(epochs=8)
right = trainer.evaluate(test, accuracy)["loss"]  # all workers have the same parameters now
if trainer.rank == 0:
    print(f"{trainer.settings.sync}: {100 * right:.1f} % right")
trainer.close()
