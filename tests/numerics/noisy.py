"""A regression whose gradient noise is known: what a worker of `test_noise.py` trains."""

import torch
from torch import nn

import shoal
from shoal.train import noise
from shoal.train.flat import CHUNK
from tests.numerics.models import divide

WIDTH, BATCH, STEPS = 16, 64, 200
ERROR = 0.5
"""The standard deviation of what no model explains."""

VARIANCE = (WIDTH + 1) + ERROR**2 * WIDTH
"""x (x . d - e) with |d| = 1 has the mean d, and x ~ N(0, 1), e ~ N(0, ERROR) give this trace of its covariance."""


def loss(model, batch):
    x, y = batch
    return 0.5 * (model(x).squeeze(1) - y).square().mean()


def train(every, steps, lr, shares=None, **settings):
    """Returns the parameters in the end. With `lr` of 0 they stay at a distance of 1 from the best."""
    noise.EVERY = every
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(BATCH * steps, WIDTH, generator=generator)
    y = ERROR * torch.randn(BATCH * steps, generator=generator)
    # A second layer that has no part in it, so that there is more than one chunk to add up.
    model = nn.Linear(WIDTH, 1, bias=False)
    model.register_parameter("rest", nn.Parameter(torch.zeros(CHUNK)))
    with torch.no_grad():
        model.weight.fill_(WIDTH**-0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    settings = {"balance": False, "threads": 1, "unused": "zero", **settings}
    with shoal.Trainer(model, loss, optimizer, (x, y), batch_size=BATCH, **settings) as trainer:
        if shares is not None:
            divide(trainer, shares)
        trainer.fit(steps=steps)
        return model.weight.detach().flatten().tolist()


def train_all(configs):
    return [train(**config) for config in configs]
