"""Where each tensor lies: which file, in which order, under which header. No torch, no I/O.

A file is in the safetensors format: eight bytes with the length of a JSON header, the header (name, type, shape and
place of each tensor), then the raw bytes without gaps. We write it ourselves instead of calling the library because
the tensors are already in one staging buffer in file order: one pass over it hashes and writes, on a descriptor that
we can fsync. The library reads these files and we read the library's; a test holds both directions.
"""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec

# safetensors' name of a type -> (torch's name, bytes an element). What the library cannot read back is not here.
DTYPES: dict[str, tuple[str, int]] = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U64": ("uint64", 8),
    "U32": ("uint32", 4),
    "U16": ("uint16", 2),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
    "C64": ("complex64", 8),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1),
}

MAX_FILE_BYTES = 2 << 30

_PART = re.compile(r"([a-z][a-z0-9_]{0,31})/")


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor as the manifest names it. `dtype` is a key of `DTYPES`."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
    dtype: str
    shape: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, le=1 << 48)], ...], msgspec.Meta(max_length=64)]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype][1]


class FilePlan(msgspec.Struct, frozen=True):
    """One file to be written: its tensors in file order."""

    name: str
    tensors: tuple[TensorEntry, ...]

    @property
    def data_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.tensors)


def in_file_order(entries: Iterable[TensorEntry]) -> list[TensorEntry]:
    """Wide types first, which aligns every tensor to its own width; then by name."""
    return sorted(entries, key=lambda entry: (-DTYPES[entry.dtype][1], entry.name))


def plan_files(entries: Iterable[TensorEntry], max_file_bytes: int = MAX_FILE_BYTES) -> list[FilePlan]:
    """Cut tensors into files: one group per part (`model/`, `optimizer/`, ...), split at `max_file_bytes`.

    Parts have files of their own, so that weights can be read without the optimizer. A tensor is never cut; one that
    is larger has a file to itself.
    """
    parts: dict[str, list[TensorEntry]] = {}
    for entry in in_file_order(entries):
        match = _PART.match(entry.name)
        parts.setdefault(match[1] if match else "tensors", []).append(entry)
    return [
        FilePlan(f"{part}-{number:05d}.safetensors", tuple(group))
        for part in sorted(parts)
        for number, group in enumerate(_split(parts[part], max_file_bytes), start=1)
    ]


def _split(entries: Sequence[TensorEntry], max_bytes: int) -> list[list[TensorEntry]]:
    groups: list[list[TensorEntry]] = [[]]
    filled = 0
    for entry in entries:
        if groups[-1] and filled + entry.num_bytes > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(entry)
        filled += entry.num_bytes
    return groups


def header(entries: Iterable[TensorEntry]) -> bytes:
    """What comes before the data: the length, and the JSON padded to a multiple of eight with spaces."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for entry in entries:
        end = start + entry.num_bytes
        table[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": (start, end)}
        start = end
    text = msgspec.json.encode(table)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
