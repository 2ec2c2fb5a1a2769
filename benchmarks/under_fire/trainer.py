"""A Trainer, for ever."""

import torch
from model import BATCH, data, loss, make

import shoal

model = make()
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
shoal.Trainer(model, loss, optimizer, data(), batch_size=BATCH).fit(steps=10**9)
