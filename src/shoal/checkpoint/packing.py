"""Tensors as one run of bytes that proves itself: for messages and for memory, not for disks."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import torch

from shoal.checkpoint.layout import TensorEntry, in_file_order
from shoal.checkpoint.state import TORCH_DTYPES, as_bytes, describe
from shoal.spec.errors import UserError

_DIGEST_BYTES, _LENGTH_BYTES = 32, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The tensors of one rank at one step: a sha256 of all that follows, a header with its length, the tensors."""

    owner: int
    step: int
    data: torch.Tensor


class _Header(msgspec.Struct, frozen=True):
    owner: int
    step: int
    tensors: tuple[TensorEntry, ...]


def pack(owner: int, step: int, tensors: Mapping[str, torch.Tensor]) -> Part:
    """Copy tensors into a part. Costs one copy and one sha256; a tensor that cannot be kept is a UserError."""
    entries = tuple(in_file_order(describe(name, tensor) for name, tensor in tensors.items()))
    header = msgspec.json.encode(_Header(owner, step, entries))
    front = len(header).to_bytes(_LENGTH_BYTES, "little") + header
    start = _DIGEST_BYTES + len(front)
    data = torch.empty(start + sum(entry.num_bytes for entry in entries), dtype=torch.uint8)
    raw = data.numpy().data
    raw[_DIGEST_BYTES:start] = front
    for entry in entries:
        raw[start : start + entry.num_bytes] = as_bytes(tensors[entry.name])
        start += entry.num_bytes
    raw[:_DIGEST_BYTES] = hashlib.sha256(raw[_DIGEST_BYTES:]).digest()
    return Part(owner=owner, step=step, data=data)


def is_intact(part: Part) -> bool:
    """Whether its bytes are those that were packed. Costs one sha256."""
    return _open(part) is not None


def unpack(part: Part) -> dict[str, torch.Tensor]:
    """The tensors of a part, in memory of their own; UserError if it is damaged."""
    opened = _open(part)
    if opened is None:
        raise damaged(part)
    header, body = opened
    tensors, start = {}, 0
    for entry in header.tensors:
        end = start + entry.num_bytes
        tensors[entry.name] = body[start:end].clone().view(TORCH_DTYPES[entry.dtype]).view(entry.shape)
        start = end
    return tensors


def _open(part: Part) -> tuple[_Header, torch.Tensor] | None:
    raw = part.data.numpy().data
    if hashlib.sha256(raw[_DIGEST_BYTES:]).digest() != raw[:_DIGEST_BYTES]:
        return None
    begin = _DIGEST_BYTES + _LENGTH_BYTES
    start = begin + int.from_bytes(raw[_DIGEST_BYTES:begin], "little")
    header = msgspec.json.decode(raw[begin:start], type=_Header)
    return (header, part.data[start:]) if (header.owner, header.step) == (part.owner, part.step) else None


def damaged(part: Part) -> UserError:
    """The error for a part that is not what was packed."""
    return UserError(
        f"The copy of what rank {part.owner} had at step {part.step} is damaged.",
        why="its bytes do not match their sha256: they changed on the way or in memory",
        hint="check the memory of this machine, and load a checkpoint",
        step=part.step,
    )
