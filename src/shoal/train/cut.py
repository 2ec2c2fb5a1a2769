"""What of a model's state each part of a copy holds: how a whole is divided, and put together again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any

import torch

from shoal.comm.group import Group
from shoal.train.handover import make_room, shapes_of, share_facts

PREFIXES = ("model/", "optimizer/", "ema/", "anchor/", "momentum/")


@dataclass(frozen=True, slots=True)
class Slice:
    """[start, stop) of a tensor's dimension `dim`, which is `size` long as a whole.

    A dimension may be several things one after the other, such as queries, keys and values: then it has that many
    equal `blocks`, and [start, stop) is of each of them.
    """

    dim: int
    start: int
    stop: int
    size: int
    blocks: int = 1

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Our part: a view where there is one block, else a copy."""
        return self._view(whole).flatten(self.dim, self.dim + 1)

    def put(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        """Copy our part to its place."""
        self._view(whole).copy_(part.unflatten(self.dim, (self.blocks, -1)))

    def _view(self, whole: torch.Tensor) -> torch.Tensor:
        blocks: torch.Tensor = whole.unflatten(self.dim, (self.blocks, -1))
        return blocks.narrow(self.dim + 1, self.start, self.stop - self.start)


Held = Slice | EllipsisType | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """For each name of the model's state, what each part holds: None of it, all of it (`...`), or a Slice.

    Names that are not listed are held whole by every part. `facts` say how it was cut, as plain values: enough for
    one who comes later to cut a whole model in the same way.
    """

    held: Mapping[str, Sequence[Held]]
    facts: Mapping[str, Any] = field(default_factory=dict)

    def holding(self, name: str, part: int) -> Held:
        """What this part holds of a tensor: by the name of a parameter, or of a checkpoint's tensor."""
        parts = self.held.get(self._parameter(name))
        return ... if parts is None else parts[part]

    def counts(self, name: str, part: int) -> bool:
        """Whether this part's values of a parameter count where all parts add up: those held twice count once."""
        parts = self.held.get(name)
        if parts is None:
            return part == 0
        held = parts[part]
        return held is not None and all(other != held for other in parts[:part])

    def _parameter(self, name: str) -> str:
        """The parameter that a tensor of a checkpoint belongs to: `optimizer/NAME/KEY` belongs to NAME."""
        for prefix in PREFIXES:
            if name.startswith(prefix):
                bare = name.removeprefix(prefix)
                return bare.rpartition("/")[0] if prefix == "optimizer/" else bare
        return name

    def take(self, whole: Mapping[str, torch.Tensor], part: int) -> dict[str, torch.Tensor]:
        """This part's share of whole tensors."""
        found: dict[str, torch.Tensor] = {}
        for name, tensor in whole.items():
            held = self.holding(name, part)
            if held is not None:
                found[name] = held.of(tensor) if isinstance(held, Slice) else tensor
        return found

    def join(self, mine: Mapping[str, torch.Tensor], parts: Group) -> dict[str, torch.Tensor]:
        """The whole tensors, from what the parts hold, on part 0; the others get nothing. All parts call it."""
        whole: dict[str, torch.Tensor] = {}
        for part in range(parts.size):
            for name, tensor in self._send(mine, parts, part).items():
                if parts.rank == 0 and self.counts(self._parameter(name), part):
                    self._put(whole, name, tensor, part)
        return whole

    def _send(self, mine: Mapping[str, torch.Tensor], parts: Group, part: int) -> Mapping[str, torch.Tensor]:
        """The tensors of one part, on part 0."""
        if part == 0:
            return mine if parts.rank == 0 else {}
        sent = {name: t for name, t in mine.items() if self.counts(self._parameter(name), part)}
        shapes = share_facts(parts, shapes_of(sent.items()) if parts.rank == part else None, part)
        if parts.rank == part:
            for tensor in sent.values():
                parts.send(_bytes(tensor), 0).wait()
            return {}
        if parts.rank != 0:
            return {}
        room = make_room(shapes)
        for tensor in room.values():  # the order of names is the sender's
            parts.recv(tensor.view(-1).view(torch.uint8), part).wait()
        return room

    def _put(self, whole: dict[str, torch.Tensor], name: str, tensor: torch.Tensor, part: int) -> None:
        held = self.holding(name, part)
        if not isinstance(held, Slice):
            whole[name] = tensor
            return
        if name not in whole:
            shape = list(tensor.shape)
            shape[held.dim] = held.size
            whole[name] = tensor.new_empty(shape)
        held.put(tensor, whole[name])


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
