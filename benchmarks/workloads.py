"""What is trained in the benchmarks: three kinds of models, with data of the right shape and no meaning."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model, its loss and its data. `samples` are those of one worker in a step, `steps` those of a timed block.

    `make` builds the same model every time; `data(n)` gives n samples, as a tuple of tensors.
    """

    about: str
    samples: int
    steps: int
    make: Callable[[], nn.Module]
    data: Callable[[int], tuple[torch.Tensor, ...]]
    loss: Callable[[nn.Module, Any], torch.Tensor]


class Residual(nn.Module):
    """Two convolutions beside a shortcut, each followed by BatchNorm."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv2d(width_in, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.second = nn.Sequential(nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width))
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or width_in != width:
            self.shortcut = nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.second(self.first(x)) + self.shortcut(x))


class Block(nn.Module):
    """Attention to what came before, then a little network, each with dropout."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.dropout(self.out(seen))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """Tokens in, the next token's odds out; embedding and output share their weight."""

    def __init__(self, vocabulary: int, length: int, width: int, num_layers: int, num_heads: int, dropout: float):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*(Block(width, num_heads, dropout) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embed(tokens) + self.position)))


def make_mlp(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def make_cnn(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, width, 3, 1, 1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        Residual(width, width, 1),
        Residual(width, 2 * width, 2),
        Residual(2 * width, 4 * width, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )


def make_gpt(width: int, num_layers: int, length: int, dropout: float) -> nn.Module:
    torch.manual_seed(0)
    return GPT(256, length, width, num_layers, 8, dropout)


def make_classes(shape: tuple[int, ...], count: int) -> tuple[torch.Tensor, ...]:
    source = torch.Generator().manual_seed(1)
    return torch.randn(count, *shape, generator=source), torch.randint(0, 10, (count,), generator=source)


def make_tokens(length: int, count: int) -> tuple[torch.Tensor, ...]:
    return (torch.randint(0, 256, (count, length + 1), generator=torch.Generator().manual_seed(1)),)


def class_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def next_token_loss(model: nn.Module, batch: tuple[torch.Tensor]) -> torch.Tensor:
    rows = batch[0]
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def _mlp(is_quick: bool) -> Workload:
    width, samples = (16, 8) if is_quick else (2048, 128)
    return Workload(
        about=f"MLP 784-{width}-{width}-10, {samples} samples a worker",
        samples=samples,
        steps=2 if is_quick else 10,
        make=partial(make_mlp, width),
        data=partial(make_classes, (784,)),
        loss=class_loss,
    )


def _cnn(is_quick: bool) -> Workload:
    width, samples, side = (4, 8, 8) if is_quick else (32, 64, 32)
    return Workload(
        about=f"ResNet-like CNN on {side}×{side}, 3 residual blocks from {width} wide, {samples} samples a worker",
        samples=samples,
        steps=2 if is_quick else 4,
        make=partial(make_cnn, width),
        data=partial(make_classes, (3, side, side)),
        loss=class_loss,
    )


def _gpt(is_quick: bool, dropout: float = 0.0) -> Workload:
    width, num_layers, length, samples = (16, 1, 8, 4) if is_quick else (256, 4, 128, 8)
    about = f"GPT of {num_layers} layers, d={width}, {samples} sequences of {length} tokens a worker"
    return Workload(
        about=f"{about}, dropout {dropout:g}",
        samples=samples,
        steps=2 if is_quick else 4,
        make=partial(make_gpt, width, num_layers, length, dropout),
        data=partial(make_tokens, length),
        loss=next_token_loss,
    )


WORKLOADS: dict[str, Callable[[bool], Workload]] = {
    "MLP": _mlp,
    "CNN": _cnn,
    "GPT": _gpt,
    "GPT dropout": partial(_gpt, dropout=0.1),
}
"""By name; called with whether to be quick, which makes everything tiny."""

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=1e-4),
}
