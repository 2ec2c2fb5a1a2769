"""What workers do in the tests of sharding: they import it by name."""

import os
import shutil
import threading

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import shoal
from tests.numerics import models


def train(kind="mlp", steps=52, shares=None, optimizer=torch.optim.SGD, lr=0.02, **settings):
    """[digest, losses, parameters, loss over the data, a few answers] after so many steps, as plain values."""
    model, data, loss = (make_attention if kind == "attention" else models.make)(kind)
    trainer = shoal.Trainer(
        model, loss, optimizer(groups_of(model), lr=lr), data, batch_size=48, balance=False, max_norm=1.0, **settings
    )
    if shares is not None:
        models.divide(trainer, shares)
    losses = models.run_until(trainer, steps)
    measured = trainer.evaluate(data)["loss"]  # the loop was left early; from here on the model is whole again
    parameters = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).double().tolist()
    answers = trainer.predict(data)[:2].double().reshape(-1).tolist()
    found = [trainer.digest(), losses, parameters, measured, answers]
    if settings.get("ema"):
        with trainer.averaged():
            found.append(trainer.digest())
    trainer.close()
    assert all(torch.equal(p.isfinite(), torch.ones_like(p, dtype=torch.bool)) for p in model.parameters())
    return found


def train_all(configs):
    """Under one configuration after the other."""
    return [train(**config) for config in configs]


def groups_of(model):
    """Two groups, as everybody has them: one with weight decay, and one without."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.01},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]


class Layer(nn.Module):
    """Uses weights of a layer that it does not call, hands on a dict, and computes its network twice."""

    def __init__(self, width):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width))

    def forward(self, state):
        x = state["x"]
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return {"x": x + checkpoint(self.mlp, x, use_reentrant=False)}


class Attention(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.first = nn.Linear(6, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(3))
        self.last = nn.Linear(width, 10)

    def forward(self, x):
        state = {"x": self.first(x)}
        for layer in self.layers:
            state = layer(state)
        return self.last(state["x"].mean(1))


def make_attention(kind):
    torch.manual_seed(5)
    return Attention(), (torch.randn(200, 5, 6), torch.randint(0, 10, (200,))), models.class_loss


def go_on(steps, settings, folder, source):
    """Continue the run of another folder in this one up to a step, and save."""
    if source is not None and os.environ["RANK"] == "0":
        shutil.copytree(os.path.join(source, "checkpoints"), os.path.join(folder, "checkpoints"))
    model, data, loss = models.make("gpt")
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    trainer = shoal.Trainer(
        model,
        loss,
        optimizer,
        data,
        batch_size=48,
        scheduler=scheduler,
        balance=False,
        ema=0.9,
        resume=True,
        **settings,
    )
    begun = trainer.place.step, trainer.digest()
    trainer.fit(steps=steps)
    with trainer.averaged():
        average = trainer.digest(), trainer.evaluate(data)["loss"]
    found = begun, trainer.digest(), average, trainer.evaluate(data)["loss"]
    trainer.close()
    return found


def hold(settings):
    """Train a model of 64 MiB; the most memory this worker had in steps, in MiB, without what libraries take."""
    with shoal.Trainer(  # so that all that is imported has been
        small := nn.Linear(4, 4),
        lambda model, x: model(x).sum(),
        torch.optim.AdamW(small.parameters()),
        torch.zeros(8, 4),
        batch_size=8,
        **settings,
    ) as trainer:
        trainer.fit(steps=1)
    before = own_mib()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(16)))
    trainer = shoal.Trainer(
        model,
        lambda model, x: F.mse_loss(model(x), x),
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        torch.randn(128, 1024),
        batch_size=16,
        balance=False,
        **settings,
    )
    samples, is_over = [0.0], threading.Event()

    def sample():
        while not is_over.wait(0.002):
            samples.append(own_mib())

    thread = threading.Thread(target=sample)
    thread.start()
    for batch in trainer:
        trainer.step(batch)
        if trainer.place.step == 6:
            break
    is_over.set()
    thread.join()
    trainer.close()
    return max(samples) - before


def own_mib():
    """What this process has to itself, and its part of what it shares with other workers; no code."""
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith(("Pss_Anon:", "Pss_Shmem:"))) / 1024
