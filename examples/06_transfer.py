"""Transfer: start from the weights of another run.

    python examples/06_transfer.py
    shoal run -n 2 examples/06_transfer.py

`init_from=` takes the name of a run (or a part of it, or `last`), a run folder, a checkpoint, a `.safetensors` file
or a `state_dict` (docs/checkpoints.md). A layer that does not fit is an error that names it; with `strict=False` it
is left as it is, and a report says which.
"""

import torch
import torch.nn.functional as F

import shoal


def loss(model, batch):
    points, labels = batch
    return F.cross_entropy(model(points), labels)


def accuracy(model, batch):
    points, labels = batch
    return {"accuracy": (model(points).argmax(dim=1) == labels).float().mean()}


def make_model(num_classes):
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, num_classes))


# Of the 64 numbers of a sample only four combinations matter, whatever is asked.
torch.manual_seed(0)
points = torch.randn(12_000, 64)
features = points @ torch.randn(64, 4)

# First: many samples, 12 classes.
many = (points, (features @ torch.randn(4, 12)).argmax(dim=1))
model = make_model(12)
first = shoal.Trainer(model, loss, torch.optim.AdamW(model.parameters(), 5e-3), many, batch_size=256)
first.fit(epochs=3)
print(f"12 classes, 12000 samples: {100 * first.evaluate(many, accuracy)['accuracy']:.0f} % right")
first.close()

# Then: few samples, 3 other classes. The first layer fits, the last one does not.
labels = (features @ torch.randn(4, 3)).argmax(dim=1)
few, test = (points[:80], labels[:80]), (points[80:], labels[80:])
for init_from in (None, first.run_dir):
    torch.manual_seed(1)
    model = make_model(3)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    second = shoal.Trainer(model, loss, optimizer, few, batch_size=40, init_from=init_from, strict=False)
    second.fit(epochs=30)
    start = "from the first run" if init_from else "from nothing"
    print(f"3 classes, 80 samples, {start}: {100 * second.evaluate(test, accuracy)['accuracy']:.0f} % right")
    second.close()
