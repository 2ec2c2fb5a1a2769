"""A job whose model is held in parts, as options say. `EXACT`: bits are comparable. `WANTED`: how many workers."""

import json
import os
import time

import torch
from torch import nn

import shoal

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
made = []
source = torch.Generator().manual_seed(1)
data = torch.randn(120, 6, generator=source), torch.randn(120, 1, generator=source)


def loss(model, batch):
    if made and made[0].world_size < int(os.environ.get("WANTED", "0")):
        time.sleep(0.5)  # until the lost are replaced
    inputs, targets = batch
    return (model(inputs) - targets).square().mean()


trainer = shoal.Trainer(
    model,
    loss,
    optimizer,
    data,
    batch_size=24,
    shards=4,
    scheduler=scheduler,
    exact=bool(os.environ.get("EXACT")),
    balance=False,
    checkpoint_every=5,
)
made.append(trainer)
trainer.fit(steps=int(os.environ.get("STEPS", "30")))
ending = {"digest": trainer.digest(), "step": trainer.place.step, "lr": optimizer.param_groups[0]["lr"]}
ending |= {"loss": trainer.evaluate(data)["loss"], "first": float(trainer.predict(data)[0])}
print("ended", json.dumps(ending), flush=True)
