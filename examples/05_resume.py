"""Checkpoints, and going on with another number of workers.

    shoal run -n 2 --name first examples/05_resume.py --fail-at 25     two workers; fails on purpose
    shoal run -n 1 --resume first examples/05_resume.py                one worker goes on, from step 20
    python examples/05_resume.py                                       the same without a failure: the same digest

A checkpoint holds no number of workers. `--resume` takes the newest one that proves whole. The script may be left
out; then it is started as before, with the arguments it had.
"""

import argparse

import torch
import torch.nn.functional as F

import shoal

parser = argparse.ArgumentParser()
parser.add_argument("--fail-at", type=int, help="pretend that the power fails after this step")
options = parser.parse_args()

torch.manual_seed(0)
points = torch.randn(2_000, 16)
labels = (points.norm(dim=1) > 4).long()
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), 5e-3)


def loss(model, batch):
    points, labels = batch
    return F.cross_entropy(model(points), labels)


# Saved every 10 steps, in the background; the newest three are kept. `exact=True` is not needed for resuming, it only
# makes the comparison in the end one of bits.
trainer = shoal.Trainer(
    model, loss, optimizer, (points, labels), batch_size=100, exact=True, checkpoint_every=10, keep=3
)
print(f"starting at step {trainer.place.step}")

# A resumed script asks for the same two epochs as before; the steps that were done already do not come again.
for _ in range(2):
    for batch in trainer:
        trainer.step(batch)
        if trainer.place.step == options.fail_at:
            raise SystemExit("the power failed")

print(f"step {trainer.place.step}, digest of the parameters: {trainer.digest()[:12]}")
trainer.close()
