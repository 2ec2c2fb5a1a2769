"""Your own training loop: `for batch in trainer: trainer.step(batch)`.

    python examples/02_own_loop.py
    shoal run -n 2 examples/02_own_loop.py

`fit` is such a loop and nothing more. Write it yourself where you want to do something between steps.
"""

import torch
import torch.nn.functional as F

import shoal

torch.manual_seed(0)
angles = torch.rand(8_000, 1) * 6.28 - 3.14
heights = torch.sin(angles) + 0.1 * torch.randn(8_000, 1)
model = torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), 2e-2)


def loss(model, batch):
    angles, heights = batch
    return F.mse_loss(model(angles), heights)


trainer = shoal.Trainer(model, loss, optimizer, (angles, heights), batch_size=400)

for epoch in range(20):
    # One pass over the data. `batch` is this worker's part of a step, already loaded; all workers have made the same
    # number of steps when the loop ends.
    for batch in trainer:
        found = trainer.step(batch)  # the mean over the whole global batch: the same number on every worker

    if trainer.rank == 0 and epoch % 5 == 4:
        print(f"epoch {epoch + 1}, step {trainer.place.step}: loss {found:.4f}")

    # A decision taken from `found` is the same on every worker. Leave the loop together, or nobody leaves it.
    if found < 0.015:
        print(f"good enough after {epoch + 1} epochs")
        break

# `fit` saves a checkpoint in the end; in your own loop you say when.
trainer.save(wait=True)
trainer.close()
