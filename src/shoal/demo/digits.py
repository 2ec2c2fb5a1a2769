"""A CNN with batch statistics and dropout reads a noisy display: `shoal run -n 2 -m shoal.demo.digits`."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import shoal

SEGMENTS = ("abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgedc", "abc", "abcdefg", "abcdfg")
"""Which bars of a seven-segment display make each digit."""

BARS = {
    "a": (slice(2, 4), slice(4, 10)),
    "b": (slice(3, 8), slice(9, 11)),
    "c": (slice(8, 13), slice(9, 11)),
    "d": (slice(12, 14), slice(4, 10)),
    "e": (slice(8, 13), slice(3, 5)),
    "f": (slice(3, 8), slice(3, 5)),
    "g": (slice(7, 9), slice(4, 10)),
}


def displays(num_samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures of 16 by 16 points, each a digit that is shifted, dimmed and half drowned in noise."""
    generator = torch.Generator().manual_seed(seed)
    clean = torch.zeros(10, 16, 16)
    for digit, bars in enumerate(SEGMENTS):
        for bar in bars:
            clean[digit][BARS[bar]] = 1.0
    labels = torch.randint(0, 10, (num_samples,), generator=generator)
    shifts = torch.randint(-2, 3, (num_samples, 2), generator=generator).tolist()
    pictures = torch.stack([clean[d].roll(s, (0, 1)) for d, s in zip(labels.tolist(), shifts, strict=True)])
    pictures *= 0.5 + torch.rand(num_samples, 1, 1, generator=generator)
    pictures += 0.6 * torch.randn(pictures.shape, generator=generator)
    return pictures[:, None], labels


def make_model() -> nn.Module:
    def layer(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)
        )

    return nn.Sequential(
        layer(1, 32), layer(32, 64), layer(64, 128), nn.Flatten(), nn.Dropout(0.2), nn.Linear(512, 10)
    )


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    pictures, labels = batch
    return F.cross_entropy(model(pictures), labels)


def accuracy(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    pictures, labels = batch
    return {"accuracy": (model(pictures).argmax(1) == labels).float().mean()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    trainer = shoal.Trainer(model, loss, optimizer, displays(5600, seed=1), batch_size=256, exact=True)
    trainer.fit(epochs=options.epochs)
    found = trainer.evaluate(displays(1000, seed=2), accuracy)
    if trainer.rank == 0:
        print(f"digest of the parameters: {trainer.digest()[:12]}")
        print(f"reads {100 * found['accuracy']:.1f} % of 1000 displays it has never seen")
    trainer.close()


if __name__ == "__main__":
    main()
