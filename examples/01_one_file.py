"""One file for one process and for many.

    python examples/01_one_file.py                  one process
    shoal run -n 2 examples/01_one_file.py          two workers, the same file
    shoal run -n auto examples/01_one_file.py       as many workers as measure fastest on this machine

Nothing below knows how many workers there are. `batch_size` is the batch of a whole step, over all of them.
"""

import torch
import torch.nn.functional as F

import shoal

torch.manual_seed(0)
points = torch.randn(20_000, 32)
labels = (points @ torch.randn(32, 4)).argmax(dim=1)
model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.ReLU(), torch.nn.Linear(256, 4))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


trainer = shoal.Trainer(model, loss, optimizer, (points, labels), batch_size=512)
trainer.fit(epochs=3)

# Every worker gets the same answer. Lines that several workers print alike are shown once, as `[0-1] ...`.
print(f"loss after 3 epochs: {trainer.evaluate((points, labels))['loss']:.3f}")
