"""Strategies that cannot be, and models that cannot be cut: run as `shoal run -n 4 mistakes_in_meshes.py CASE`."""

import os
import sys
from dataclasses import dataclass
from typing import Any

import torch
from mistakes import Mistake, fit, use
from torch import nn

import shoal

RANK = int(os.environ.get("RANK", "0"))


@dataclass(frozen=True, kw_only=True)
class MeshMistake(Mistake):
    """With so many workers, and these options on the command line."""

    num_workers: str
    options: tuple[str, ...] = ()

    @property
    def command(self) -> tuple[str, ...]:
        given = [text for option in self.options for text in ("-o", option)]
        return ("run", "-n", self.num_workers, *given, __file__, self.did)


class Heads(nn.Module):
    """Four heads of attention over the features of a sample."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.attention, self.down = nn.Linear(1, 12), nn.MultiheadAttention(12, 4), nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.up(x.unsqueeze(-1)).transpose(0, 1)
        out: torch.Tensor = self.down(self.attention(wide, wide, wide, need_weights=False)[0].mean(0))
        return out


class Deciding(nn.Module):
    """Its forward depends on the data, or on how often it was called."""

    def __init__(self, counts: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.counts, self.calls = nn.Linear(4, 8), nn.Linear(8, 3), counts, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.first(x))
        if self.counts:
            self.calls += 1
            return out / self.calls
        return out if out.sum() > 0 else -out


class Remembering(nn.Module):
    """A buffer that the forward changes in the beginning, and reads in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.9).add_(0.1 * x.mean())
        out: torch.Tensor = self.last(self.first(x)) - self.mean
        return out


def both() -> Any:
    return shoal.tensor(2), shoal.pipeline(2)


CUT = "cannot be cut into stages: the forward of itself"

MESHES = [
    MeshMistake(
        did="more stages than layers",
        num_workers="4",
        act=lambda: fit(split=shoal.pipeline(4)),
        error="4 stages are more than the model's 3 layer(s): 0, 1, 2.",
        do="use shoal.pipeline(3) or fewer",
    ),
    MeshMistake(
        did="more stages than layers, with `-o`",
        num_workers="4",
        options=("split=pipeline:4",),
        act=fit,
        error="4 stages are more than the model's 3 layer(s): 0, 1, 2.",
        do="use shoal.pipeline(3) or fewer",
    ),
    MeshMistake(
        did="`shoal.tensor(3)` of 4 heads",
        num_workers="3",
        act=lambda: fit(model=Heads(), split=shoal.tensor(3)),
        error="tensor(3) does not fit this model: 4 in layer 'attention' is not a multiple of 3.",
        do="use tensor(2) or tensor(4)",
    ),
    MeshMistake(
        did="`-o split=tensor:3` of 4 heads",
        num_workers="3",
        options=("split=tensor:3",),
        act=lambda: fit(model=Heads()),
        error="tensor(3) does not fit this model: 4 in layer 'attention' is not a multiple of 3.",
        do="use tensor(2) or tensor(4)",
    ),
    MeshMistake(
        did="2 × 2 parts on 3 workers",
        num_workers="3",
        act=lambda: fit(split=both()),
        error="3 workers cannot hold copies of 4 parts each.",
        do="start with -n 4",
    ),
    MeshMistake(
        did="2 parts in an elastic run of 1",
        num_workers="1:1",
        act=lambda: fit(split=shoal.pipeline(2)),
        error="1 workers cannot hold copies of 2 parts each.",
        do="start with -n 2",
    ),
    MeshMistake(
        did="fewer samples than micro-batches",
        num_workers="2",
        act=lambda: fit(split=shoal.pipeline(2, microbatches=11)),
        error="10 samples of each copy are too few for 11 micro-batches.",
        do="use microbatches=10",
    ),
    MeshMistake(
        did="a forward that decides by its data, in a pipeline",
        num_workers="2",
        act=lambda: fit(model=Deciding(), split=shoal.pipeline(2)),
        error=f"The model (Deciding) {CUT} cannot be followed.",
        do="move that code into a layer of its own",
    ),
    MeshMistake(
        did="a forward that counts its calls, in a pipeline",
        num_workers="2",
        act=lambda: fit(model=Deciding(counts=True), split=shoal.pipeline(2)),
        error=f"The model (Deciding) {CUT} changes `self.calls`.",
        do="keep it in a buffer",
    ),
    MeshMistake(
        did="a buffer that is changed in one stage and read in another",
        num_workers="2",
        act=lambda: fit(model=Remembering(), split=shoal.pipeline(2)),
        error="The model cannot be cut before last: the buffer mean is used on both sides, by the forward.",
        do="use it in one layer only",
    ),
    MeshMistake(
        did="a cut at a layer that is not there",
        num_workers="2",
        options=("split=pipeline:2,cuts=blocks.7",),
        act=fit,
        error="There is no layer 'blocks.7' to cut before.",
        do="there are: 0, 1, 2",
    ),
    MeshMistake(
        did="a `microbatch_size` of each worker's own, in one copy",
        num_workers="2",
        act=lambda: fit(split=shoal.pipeline(2), microbatch_size=4 + RANK),
        error="The workers do not agree: microbatch_size is 4 on rank 0 and 5 on rank 1.",
        do="give every worker the same",
    ),
    MeshMistake(
        did="agreeing less often than `fit(steps=)` has steps",
        num_workers="2",
        options=("sync=local:32",),
        act=lambda: fit(steps=3),
        error="The workers would agree every 32 steps, and fit() is to take 3.",
        do="use every=3 or less",
        step=0,
    ),
]
"""Each is noticed by the workers, before they take a step."""

ALONE = [
    Mistake(
        did="two parts and one process",
        act=lambda: fit(split=shoal.pipeline(2)),
        error="1 workers cannot hold copies of 2 parts each.",
        do="start with -n 2",
    ),
    Mistake(
        did="agreeing less often than a run has steps",
        act=lambda: fit(sync=shoal.local(every=4)),
        error="The workers would agree every 4 steps, and fit() is to take 3.",
        do="use every=3 or less",
        step=0,
    ),
    Mistake(
        did="agreeing less often than all epochs have steps",
        act=lambda: use(lambda trainer: trainer.fit(epochs=2), sync=shoal.diloco(every=9)),
        error="The workers would agree every 9 steps, and fit() is to take 8.",
        do="use every=8 or less",
        step=0,
    ),
    Mistake(
        did="`exact=True` and local steps",
        act=lambda: fit(exact=True, sync="local:2"),
        error="exact=True and sync=local:2 exclude each other.",
        do="use sync=all_reduce",
    ),
    Mistake(
        did='`precision="auto"` and a split',
        act=lambda: fit(precision="auto", split=shoal.pipeline(2)),
        error='precision="auto" and split=pipeline:2 exclude each other.',
        do="say which it is to be",
    ),
]
"""And these by one process as well."""


if __name__ == "__main__":
    next(mistake for mistake in MESHES if mistake.did == sys.argv[1]).act()
