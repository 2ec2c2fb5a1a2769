"""Read and write folders of PyTorch's distributed checkpoint (DCP), in one process and without its pickle.

DCP's `.metadata` file is a pickle, and PyTorch reads it with plain `pickle.load`, which runs whatever the file says.
Here it is read by an unpickler that knows only the few names DCP writes and replaces each by an inert record of our
own: no code of the file's choosing runs, and no class of torch can be tampered with. Tensor data is read with
`torch.load(weights_only=True)`. Objects that are not tensors are pickles of any kind and are left out.
"""

import io
import pickle
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint import disk
from shoal.checkpoint.manifest import Damaged
from shoal.checkpoint.read import check_memory

METADATA = ".metadata"
MAX_METADATA_BYTES = 256 << 20
_MODULES = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
    "torch.distributed._shard.sharded_tensor.metadata",
)
_RECORDS = (
    *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata"),
    *("ChunkStorageMetadata", "TensorProperties", "_StorageInfo", "_StoragePrefix"),
)
# Parts of a training state under which people put their weights.
_MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A block of a tensor and the bytes of a file that hold it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharded:
    """A tensor in pieces. `path` is where it was in the nested state that was saved."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


def read_dcp(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a DCP folder, put together; raises `Damaged`.

    If the saved state had a part called `model` (or `state_dict`), only that part, and names start below it.
    """
    tensors = _decode(disk.read_small(folder / METADATA, MAX_METADATA_BYTES))
    chosen = pick_model({name: item.path for name, item in tensors.items()})
    check_memory(sum(_num_bytes(tensors[name]) for name in chosen), METADATA)
    return {short: _read_tensor(folder, tensors[name]) for name, short in chosen.items()}


def pick_model(paths: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """Which names belong to the model, and what to call them: of a path `("app", "model", "fc.weight")` its end."""
    for depth in (0, 1):
        for key in _MODEL_KEYS:
            below = {name: path for name, path in paths.items() if path[depth : depth + 1] == (key,)}
            if below and all(len(path) > depth + 1 for path in below.values()):
                return {name: ".".join(path[depth + 1 :]) for name, path in below.items()}
    return {name: name for name in paths}


def write_dcp(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write tensors as a DCP folder that `torch.distributed.checkpoint.load` reads."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    with warnings.catch_warnings():
        # It says that there is no process group, which is what was asked for.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            save(dict(tensors), storage_writer=FileSystemWriter(folder), no_dist=True)
        except CheckpointException as error:  # it is not even an Exception
            cause, _ = next(iter(error.failures.values()))
            raise RuntimeError("DCP could not write") from cause


def _read_tensor(folder: Path, item: Sharded) -> torch.Tensor:
    result = torch.empty(item.shape, dtype=item.dtype)
    covered = 0
    for chunk in item.chunks:
        found = _read_chunk(folder, chunk)
        place = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
        target = result[place]
        if target.shape != chunk.sizes or found.shape != chunk.sizes or found.dtype != item.dtype:
            raise Damaged(f"{chunk.file}: a block of {'.'.join(item.path)} is not what {METADATA} says")
        target.copy_(found)
        covered += target.numel()
    if covered != result.numel():
        raise Damaged(f"{METADATA}: the blocks of {'.'.join(item.path)} do not make up the tensor")
    return result


def _read_chunk(folder: Path, chunk: Chunk) -> torch.Tensor:
    with disk.open_regular(folder / chunk.file) as descriptor, open(descriptor, "rb", closefd=False) as file:
        file.seek(chunk.start)
        data = io.BytesIO(file.read(chunk.length))
    try:
        found = torch.load(data, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for bytes it cannot read
        raise Damaged(f"{chunk.file}: cannot be read as tensors ({type(error).__name__})") from error
    if not isinstance(found, torch.Tensor):
        raise Damaged(f"{chunk.file}: holds a {type(found).__name__} where a tensor should be")
    return found


def _num_bytes(item: Sharded) -> int:
    total = item.dtype.itemsize
    for size in item.shape:
        total *= size
    return total


class _Record:
    """Stands for an object of the file. It has fields and does nothing."""

    fields: dict[str, Any]

    def __setstate__(self, state: object) -> None:
        self.fields = state if isinstance(state, dict) else {"state": state}


class _Unpickler(pickle._Unpickler):
    """Knows the names DCP writes and nothing else.

    It is the one written in Python: the one in C, and the opcode left out here, can be told to fill all memory.
    """

    dispatch = {code: load for code, load in pickle._Unpickler.dispatch.items() if code != pickle.BYTEARRAY8[0]}  # noqa: RUF012

    def find_class(self, module: str, name: str) -> Any:
        if module in _MODULES and name in _RECORDS:
            return type(name, (_Record,), {})
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) in _VALUES:
            return _VALUES[module, name]
        if module.startswith("pathlib") and name.endswith("Path"):
            return lambda *parts: "/".join(parts)
        raise Damaged(f"{METADATA}: names {module}.{name}, which no DCP checkpoint needs; it was not run")


# Builtin, unchangeable types and throw-away functions; what they make is not looked at, except shapes.
_VALUES: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): str,
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): str,
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"): str,
    ("builtins", "getattr"): lambda owner, name: name,  # how Python 3.11.0 wrote an enum's member
    ("collections", "OrderedDict"): dict,
}


def _decode(data: bytes) -> dict[str, Sharded]:
    """The tensors a `.metadata` file speaks of; raises `Damaged` for anything unexpected in it."""
    try:
        top = _Unpickler(io.BytesIO(data)).load().fields
        places = {(key.fields["fqn"], _ints(key.fields.get("offset") or ())): item for key, item in _items(top)}
        paths = top.get("planner_data") or {}
        return {
            name: _sharded(name, item.fields, paths.get(name, (name,)), places)
            for name, item in top["state_dict_metadata"].items()
            if type(item).__name__ == "TensorStorageMetadata"
        }
    except Damaged:
        raise
    except Exception as error:  # a pickle of other shape can fail anywhere above
        raise Damaged(f"{METADATA}: is not what DCP writes ({type(error).__name__}: {error})") from error


def _items(top: Mapping[str, Any]) -> list[tuple[_Record, _Record]]:
    return list(top["storage_data"].items())


def _sharded(name: str, item: Mapping[str, Any], path: Any, places: Mapping[Any, _Record]) -> Sharded:
    chunks = []
    for record in item["chunks"]:
        offsets, sizes = _ints(record.fields["offsets"]), _ints(record.fields["sizes"])
        chunks.append(_chunk(offsets, sizes, places[name, offsets].fields))
    properties = item["properties"].fields
    dtype = properties["state"][0] if "state" in properties else properties["dtype"]
    if not isinstance(dtype, torch.dtype):
        raise Damaged(f"{METADATA}: {name} has no type")
    return Sharded(
        path=tuple(str(part) for part in path), shape=_ints(item["size"]), dtype=dtype, chunks=tuple(chunks)
    )


def _chunk(offsets: tuple[int, ...], sizes: tuple[int, ...], info: Mapping[str, Any]) -> Chunk:
    file, (start, length) = info["relative_path"], _ints((info["offset"], info["length"]))
    if not isinstance(file, str) or file != Path(file).name:
        raise Damaged(f"{METADATA}: names the file {file!r}, which is not in this folder")
    if info.get("transform_descriptors"):
        raise Damaged(f"{file}: is compressed or encrypted by an extension, which shoal does not read")
    return Chunk(offsets=offsets, sizes=sizes, file=file, start=start, length=length)


def _ints(values: Any) -> tuple[int, ...]:
    numbers = tuple(values)
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise Damaged(f"{METADATA}: {numbers!r} are not sizes")
    return numbers
