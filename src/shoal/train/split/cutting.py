"""Where a forward may be cut: before a layer, and where no parameter would be needed on both sides."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shoal.spec.errors import UserError
from shoal.train.flat import shorten
from shoal.train.split.stages import Layer, Program


@dataclass(frozen=True, slots=True)
class Span:
    """A parameter, or a buffer that forwards change, and the first and last call that reads it."""

    name: str
    first: int
    last: int
    num_bytes: int
    is_buffer: bool


class Places:
    """The layers of a forward, and those that stages may begin with."""

    def __init__(self, layers: Sequence[Layer], spans: Sequence[Span]) -> None:
        self._layers, self._spans = layers, spans
        self.allowed = [layer.at for layer in layers[1:] if not self._shared(layer.at)]

    def _shared(self, at: int) -> list[Span]:
        """What calls before and after this place both read."""
        return [span for span in self._spans if span.first < at <= span.last]

    def name_at(self, at: int) -> str:
        return next(layer.name for layer in self._layers if layer.at == at)

    def num_bytes(self, start: int, stop: int) -> int:
        return sum(span.num_bytes for span in self._spans if start <= span.first < stop and not span.is_buffer)

    def check_enough(self, num_stages: int) -> None:
        names = [layer.name for layer in self._layers]
        if len(names) < num_stages:
            raise UserError(
                f"{num_stages} stages are more than the model's {len(names)} layer(s): {shorten(names)}.",
                why="a stage has at least one layer; the interleaved schedule has two stages for each worker",
                hint=f"use shoal.pipeline({max(1, len(names))}) or fewer, or a model of more layers",
            )
        if len(self.allowed) + 1 < num_stages:
            raise self.cannot_cut(self._layers[1:])

    def cannot_cut(self, layers: Sequence[Layer]) -> UserError:
        """The error for layers that no stage can begin with, by what is in the way of most."""
        shared = [span for layer in layers for span in self._shared(layer.at)]
        worst = max(shared, key=lambda span: (sum(other == span for other in shared), span.last - span.first))
        users = [layer.name for layer in self._layers if layer.at in (worst.first, worst.last)]
        fitting = [self.name_at(at) for at in self.allowed]
        what = "buffer" if worst.is_buffer else "parameter"
        return UserError(
            f"The model cannot be cut before {shorten([layer.name for layer in layers])}: "
            f"the {what} {worst.name} is used on both sides, by {' and '.join(users) or 'the forward'}.",
            why=f"each {what} belongs to one stage" + (", which changes it" if worst.is_buffer else ""),
            hint=(f"cut before {shorten(fitting)}, or " if fitting else "use fewer stages, or ")
            + (
                "untie it: give each layer a parameter of its own"
                if not worst.is_buffer
                else "use it in one layer only"
            ),
        )

    def given(self, cuts: Sequence[str], num_stages: int) -> list[int]:
        """The places that the user chose."""
        if len(cuts) != num_stages - 1:
            raise UserError(
                f"{len(cuts)} cut(s) do not make {num_stages} stages.",
                why="cuts= names the layers that later stages begin with; interleaved has two stages for each worker",
                hint=f"name {num_stages - 1} of: {shorten([self.name_at(at) for at in self.allowed], 12)}",
            )
        found = [self._find(name) for name in cuts]
        places = [layer.at for layer in found]
        if any(layer.at == self._layers[0].at for layer in found) or places != sorted(set(places)):
            raise UserError(
                f"The cuts {', '.join(cuts)} are not in the order of the model's layers.",
                why="each stage has at least one layer, and the first begins with the first",
                hint=f"the order is {shorten([layer.name for layer in self._layers], 12)}",
            )
        refused = [layer for layer in found if layer.at not in self.allowed]
        if refused:
            raise self.cannot_cut(refused)
        return places

    def _find(self, name: str) -> Layer:
        for layer in self._layers:
            if layer.name == name or layer.name.startswith(f"{name}."):
                return layer
        raise UserError(
            f"There is no layer {name!r} to cut before.",
            why="cuts= names layers as the model does",
            hint=f"there are: {shorten([layer.name for layer in self._layers], 12)}",
        )


def find_places(program: Program, model: nn.Module, changing: Sequence[torch.Tensor]) -> Places:
    parameters = {id(value): value for value in model.parameters()}
    follows = {id(value): value for value in changing}
    spans = [
        Span(name, first, last, value.numel() * value.element_size(), key in follows)
        for key, (name, first, last) in program.spans().items()
        if (value := parameters.get(key, follows.get(key))) is not None
    ]
    return Places(program.layers, spans)


def given_places(places: Places, cuts: Sequence[str], num_stages: int, end: int) -> list[int]:
    return [0, *places.given(cuts, num_stages), end]
