"""A job to be stopped: `stopped_job.py STEPS SECONDS_PER_STEP`. With exact=True it ends the same however it went."""

import sys
import time

import torch
from torch import nn

import shoal

STEPS, PAUSE = int(sys.argv[1]), float(sys.argv[2])
last = -1


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    global last
    if trainer is not None and trainer.place.step != last:
        last = trainer.place.step
        time.sleep(PAUSE)
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


trainer: shoal.Trainer | None = None
source = torch.Generator().manual_seed(1)
data = torch.randn(128, 16, generator=source), torch.randint(0, 4, (128,), generator=source)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 256), nn.Dropout(0.1), nn.ReLU(), nn.Linear(256, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
every = 2 if PAUSE > 1 else None
trainer = shoal.Trainer(model, loss, optimizer, data, batch_size=16, shards=4, exact=True, checkpoint_every=every)
trainer.fit(steps=STEPS)
print("digest", trainer.digest(), flush=True)
