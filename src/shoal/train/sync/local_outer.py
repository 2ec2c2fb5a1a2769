"""What all copies have agreed on, and how the mean of their ways moves it on."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from shoal.comm.codec import BLOCK
from shoal.comm.codec_mean import mean_int8, mean_plain
from shoal.comm.group import Group
from shoal.spec.strategy import Local
from shoal.train.flat import CHUNK, FlatModel, round_up
from shoal.train.sync.local_rounds import Span

PREFIX = {"anchor": "anchor/", "momentum": "momentum/"}
"""Of the names in a checkpoint. Other ways to agree do not know them, and need not."""


YOUNG_ROUNDS = 10
"""Momentum reaches back a round, and a part of the run's age: one in so many rounds."""


def warmed_up(momentum: float, age: float) -> float:
    """The momentum of a run that is so many rounds old.

    A run's first ways are its longest, and all in one direction. Momentum that remembers them for ten rounds pushes
    on long after the copies have turned; so it remembers no more than a tenth of the run: 0.9 after 90 rounds.
    """
    return min(momentum, age / (age + YOUNG_ROUNDS))


class Outer:
    """The agreed parameters (`anchor`), and with "nesterov" their momentum: the same on all copies, bit for bit.

    `mean` and `move` touch nothing but a span of what is here, so they may run while the copies train on.
    """

    def __init__(self, sync: Local, flat: FlatModel, group: Group) -> None:
        self._sync, self._flat, self._group = sync, flat, group
        # Agreed values of 16 bits would not get on: a mean differs from them by less than they can tell.
        dtype = torch.float64 if flat.dtype == torch.float64 else torch.float32
        self.anchor = flat.values.detach().to(dtype, copy=True)
        self.momentum = torch.zeros_like(self.anchor) if sync.outer == "nesterov" else None
        self._code = Code(flat, group) if sync.codec == "int8" and group.size > 1 else None

    def way(self, span: Span) -> torch.Tensor:
        """How far our copy has come from the anchor, backwards: the pseudo-gradient."""
        return self.anchor[slice(*span)] - self._flat.values[slice(*span)]

    def mean(self, way: torch.Tensor, span: Span, weights: list[float]) -> torch.Tensor:
        """The mean of everybody's ways, on every copy. Zero if none of them weighs anything."""
        if not sum(weights):
            return torch.zeros_like(way)
        if self._group.size == 1:
            return way.clone()
        if self._code is not None:
            return self._code.mean(way, span, weights)
        mean = way.clone()
        mean_plain(self._group, mean, weights)
        return mean

    def move(self, mean: torch.Tensor, way: torch.Tensor, span: Span, age: float) -> torch.Tensor:
        """Move the anchor on by a mean way; turn our own `way` into what brings our copy there, which is returned.

        The run is `age` rounds old. In parts that stay in the cache: most of the time this takes is memory's.
        """
        sync, at, decay = self._sync, slice(*span), warmed_up(self._sync.momentum, age)
        momenta = self.momentum[at].split(CHUNK) if self.momentum is not None else [None] * len(mean.split(CHUNK))
        for taken, own, anchor, momentum in zip(
            mean.split(CHUNK), way.split(CHUNK), self.anchor[at].split(CHUNK), momenta, strict=True
        ):
            if momentum is not None:
                momentum.mul_(decay).add_(taken)
                taken.add_(momentum, alpha=decay).mul_(sync.lr)
            anchor.sub_(taken)
            own.sub_(taken)
        return way

    def take(self, other: "Outer") -> None:
        """Have what another has agreed on."""
        self.anchor.copy_(other.anchor)
        if self.momentum is not None and other.momentum is not None:
            self.momentum.copy_(other.momentum)

    def share(self, group: Group, source: int) -> None:
        """Give all ranks what the source has agreed on."""
        for values in (self.anchor, self.momentum):
            if values is not None:
                group.broadcast(values, root=source).wait()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What a resumed run needs besides the parameters: with "average" nothing, for the mean is all there is."""
        if self.momentum is not None:
            for kind, flat in (("anchor", self.anchor), ("momentum", self.momentum)):
                for name, view in self._flat.named(flat):
                    yield PREFIX[kind] + name, view

    def restart(self, tensors: Mapping[str, Any]) -> None:
        """Go on from a checkpoint whose parameters are in place: with its anchor and momentum, if it has them."""
        self.anchor.copy_(self._flat.values)
        if self.momentum is not None:
            self.momentum.zero_()
        if self._code is not None:
            self._code.forget()
        for name, view in self.tensors():
            if name in tensors:
                view.copy_(tensors[name])


class Code:
    """Ways as int8, and what rounding has left over so far.

    Each parameter begins a block of its own. So one that several parts of a split model hold becomes the same bits on
    all of them, whatever lies beside it there; and no large layer makes the scale of a small one coarse.
    """

    def __init__(self, flat: FlatModel, group: Group) -> None:
        self._group = group
        self._places: list[tuple[int, int, int]] = []
        total = 0
        for at, size in zip(flat.layout.offsets, flat.layout.sizes, strict=True):
            self._places.append((at, size, total))
            total += round_up(size, BLOCK)
        self._rest = torch.zeros(total, device=flat.values.device)
        # Two copies send nothing on.
        self._rest_of_mean = torch.zeros_like(self._rest) if group.size > 2 else self._rest

    def mean(self, way: torch.Tensor, span: Span, weights: Sequence[float]) -> torch.Tensor:
        start, stop = span
        places = [place for place in self._places if start <= place[0] < stop]
        first, last = places[0][2], places[-1][2] + round_up(places[-1][1], BLOCK)
        rest = self._rest[first:last]
        pairs = [
            (slice(at - start, at - start + size), slice(to - first, to - first + size)) for at, size, to in places
        ]
        for here, there in pairs:
            rest[there].add_(way[here])
        padded = mean_int8(self._group, rest, weights, self._rest_of_mean[first:last])
        mean = torch.zeros_like(way)
        for here, there in pairs:
            mean[here] = padded[there]
        return mean

    def forget(self) -> None:
        self._rest.zero_()
        self._rest_of_mean.zero_()
