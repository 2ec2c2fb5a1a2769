"""Exact mode: the same parameters, bit for bit, for any number of workers.

    python examples/04_exact.py
    shoal run -n 2 examples/04_exact.py
    shoal run -n 3 examples/04_exact.py

All of them print the same digest, although the model has batch statistics and dropout. docs/exact.md says how, what
is promised and what it costs. Without `exact=True` results agree to rounding instead.
"""

import torch
import torch.nn.functional as F

import shoal

torch.manual_seed(0)
pictures = torch.randn(960, 1, 8, 8)
labels = (pictures.mean(dim=(1, 2, 3)) > 0).long()
model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 16, 3, padding=1),
    torch.nn.BatchNorm2d(16),
    torch.nn.ReLU(),
    torch.nn.Dropout(0.1),
    torch.nn.Flatten(),
    torch.nn.Linear(16 * 64, 2),
)
optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def loss(model, batch):
    pictures, labels = batch
    return F.cross_entropy(model(pictures), labels)


trainer = shoal.Trainer(model, loss, optimizer, (pictures, labels), batch_size=96, exact=True)
trainer.fit(epochs=4)

# The sha256 of all parameters and buffers: equal exactly if every bit of them is equal.
print(f"digest of the parameters: {trainer.digest()[:12]}")
trainer.close()
