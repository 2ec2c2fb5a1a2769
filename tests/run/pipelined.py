"""What two workers do and are told with a model in two stages, one case after the other in the same processes."""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import shoal
from shoal.spec.errors import ShoalError

RANK = int(os.environ.get("RANK", "0"))
DATA = (torch.linspace(-1, 1, 160).view(40, 4), torch.arange(40) % 3)


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def layers(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), *more, nn.Linear(8, 3))


def make(model: nn.Module | None = None, optimizer: Any = torch.optim.SGD, **settings: Any) -> shoal.Trainer:
    model = model or layers()
    function, data = settings.pop("loss", loss), settings.pop("data", DATA)
    given = {"split": "pipeline:2", "batch_size": 16, **settings}
    chosen = optimizer([p for p in model.parameters() if p.requires_grad], lr=0.05)
    return shoal.Trainer(model, function, chosen, data, **given)


def fit(*args: Any, **settings: Any) -> str:
    steps = settings.pop("steps", 5)
    with make(*args, **settings) as trainer:
        trainer.fit(steps=steps)
        return trainer.digest()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.second(self.first(x)))
        return out


class Decides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x))
        return out if out.sum() > 0 else -out


class Recomputing(nn.Module):
    """Recomputes its layers in backward, in both of torch's ways."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Tanh()) for _ in range(4)])
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=number % 2 == 0)
        out: torch.Tensor = self.last(x)
        return out


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.spare = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x))
        return out


class Counting(nn.Module):
    """Counts its calls in a buffer, in one of the ways in which that is written, and computes with the count."""

    def __init__(self, way: str, is_layer: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        width = 8 if is_layer else 4
        self.first, self.last = nn.Linear(width, 8), nn.Linear(8, 8 if is_layer else 3)
        self.way = way
        self.register_buffer("seen", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        if self.way == "in place":
            self.seen.add_(1)
        elif self.way == "augmented":
            self.seen += 1
        else:
            self.seen = self.seen + 1
        out: torch.Tensor = self.last(x / self.seen)
        return out


def counting_layer(way: str) -> Callable[[], nn.Module]:
    return lambda: layers(Counting(way, is_layer=True))


def frozen() -> nn.Sequential:
    model = layers(nn.ReLU(inplace=True))
    model[0].requires_grad_(False)
    return model


def twice(model: nn.Module, batch: Any) -> torch.Tensor:
    return loss(model, batch) + loss(model, batch)


def penalized(model: nn.Module, batch: Any) -> torch.Tensor:
    return loss(model, batch) + sum(p.square().sum() for p in model.parameters())


def hooked() -> nn.Module:
    model = layers()
    model.register_forward_hook(lambda *_: None)
    return model


def spoiled() -> Any:
    inputs = DATA[0].clone()
    inputs[17] = torch.nan
    return inputs, DATA[1]


REFUSED: dict[str, Callable[[], Any]] = {
    "twice": lambda: make(loss=twice),
    "never": lambda: make(loss=lambda model, batch: batch[0].sum() * torch.ones((), requires_grad=True)),
    "parameters": lambda: make(loss=penalized),
    "compile": lambda: make(compile=True),
    "clipped": lambda: make(exact=True, max_norm=1.0),
    "turns": lambda: make(exact=True, split="pipeline:2,schedule=interleaved"),
    "hooks": lambda: make(hooked()),
    "tied": lambda: make(Tied()),
    "decides": lambda: make(Decides()),
    "stages": lambda: make(nn.Sequential(nn.Linear(4, 3))),
    "samples": lambda: make(split="pipeline:2,microbatches=17"),
    "shards": lambda: make(layers(nn.Dropout()), split="pipeline:2,microbatches=9"),
    "cuts": lambda: make(split=shoal.pipeline(2, cuts=("7",))),
    "pieces": lambda: make(microbatch_size=4 + RANK),
    "precision": lambda: make(precision=("float32", "bf16")[RANK]),
    "unused": lambda: fit(Unused()),
    "nan": lambda: fit(data=spoiled(), not_finite="error"),
}

DONE: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "recomputed": (Recomputing, {"optimizer": torch.optim.AdamW}),
    "frozen": (frozen, {}),
    "whole optimizer": (layers, {"optimizer": torch.optim.Adafactor}),
    "past nan": (layers, {"data": spoiled(), "steps": 7}),
    "unused, allowed": (Unused, {"unused": "zero"}),
    "counted in place": (lambda: Counting("in place"), {}),
    "counted with +=": (lambda: Counting("augmented"), {}),
    "counted anew": (lambda: Counting("anew"), {}),
    "counted in place in a layer": (counting_layer("in place"), {}),
    "counted with += in a layer": (counting_layer("augmented"), {}),
    "counted anew in a layer": (counting_layer("anew"), {}),
    "cut by hand": (layers, {"split": shoal.pipeline(2, cuts=("1",))}),
    "cut by text": (layers, {"split": "pipeline:2,cuts=2"}),
}


def collect() -> dict[str, str]:
    """What this worker is told in each case, and what it trains."""
    told = {}
    for name, act in REFUSED.items():
        try:
            act()
        except ShoalError as error:
            told[name] = error.render()
    for name, (model, settings) in DONE.items():
        told[name] = fit(model(), exact=True, **settings)
    return told


def train_whole() -> dict[str, str]:
    return {name: fit(model(), exact=True, **{**settings, "split": None}) for name, (model, settings) in DONE.items()}
