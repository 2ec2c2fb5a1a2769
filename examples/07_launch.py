"""Workers from Python: `shoal.launch(function, num_workers=2)`, in a script or a notebook cell.

    python examples/07_launch.py

Start it with plain `python`: the workers are started from inside. Each calls the function, and what they return comes
back as a list, by rank. Functions of a script or a notebook need cloudpickle: `pip install 'shoal[notebook]'`.
"""

import os

import shoal


def who(greeting):
    """Anything can run in workers, with or without torch. They see the variables that torchrun sets."""
    return f"{greeting} from rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}"


def train(width, steps):
    import torch
    import torch.nn.functional as F

    torch.manual_seed(0)
    points = torch.randn(4_000, 8)
    targets = points.prod(dim=1, keepdim=True)
    model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

    def loss(model, batch):
        return F.mse_loss(model(batch[0]), batch[1])

    with shoal.Trainer(model, loss, optimizer, (points, targets), batch_size=200, exact=True) as trainer:
        trainer.fit(steps=steps)
        return trainer.rank, trainer.digest()[:12]


print(shoal.launch(who, num_workers=3, args=("hello",)))

# The arguments are passed on. A worker that fails raises its error here, with its traceback.
results = shoal.launch(train, num_workers=2, kwargs={"width": 64, "steps": 30})
print(results)
