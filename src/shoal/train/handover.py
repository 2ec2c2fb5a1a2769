"""State on its way from one World into the next: from a rank that has it to those that do not."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from shoal.checkpoint import facts as coding
from shoal.comm.group import Group


def share_facts(group: Group, facts: Mapping[str, Any] | None, source: int) -> dict[str, Any]:
    """The source's facts, on every rank; the others' are not looked at."""
    data = torch.frombuffer(bytearray(coding.encode(facts or {})), dtype=torch.uint8)
    size = torch.tensor([data.numel()])
    group.broadcast(size, root=source).wait()
    if group.rank != source:
        data = torch.empty(int(size), dtype=torch.uint8)
    group.broadcast(data, root=source).wait()
    return coding.decode(bytes(data.tolist()))


def shapes_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    """What a newcomer must know of tensors to make room for them."""
    return {name: [str(value.dtype).removeprefix("torch."), list(value.shape)] for name, value in tensors}


def make_room(shapes: Mapping[str, Any], device: str = "cpu") -> dict[str, torch.Tensor]:
    """Empty tensors of those shapes; on the device "meta" they have no memory."""
    return {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        for name, (dtype, shape) in shapes.items()
    }


def share_tensors(group: Group, tensors: Mapping[str, torch.Tensor], source: int) -> None:
    """Give every rank the source's values; all have tensors of the same names and shapes."""
    for name in sorted(tensors):
        value = tensors[name]
        if value.numel():
            # In main memory: newcomers have no place on their device for it yet.
            data = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
            data = data.clone() if group.rank == source else data
            group.broadcast(data, root=source).wait()
            if not value.is_cpu and group.rank != source:
                value.detach().copy_(data.view(value.dtype).view(value.shape))


def give_tensors(
    group: Group, tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, Any], source: int, *, is_newcomer: bool
) -> None:
    """Give newcomers the source's values, of which all know the shapes. Others take part in it and keep their own."""
    is_part = is_newcomer or group.rank == source
    for name in sorted(name for name in shapes if not name.startswith("model/")):
        share_tensors(group, {name: tensors[name]} if is_part else make_room({name: shapes[name]}), source)
