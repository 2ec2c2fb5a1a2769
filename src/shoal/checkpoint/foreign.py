"""Weights from and to other formats: one function to read them all, one to write."""

import os
import pickle
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import msgspec
import safetensors.torch
import torch

from shoal.checkpoint import disk, listing, read, remote
from shoal.checkpoint import manifest as manifests
from shoal.checkpoint.dcp import METADATA, read_dcp, write_dcp
from shoal.checkpoint.layout import TensorEntry, header, in_file_order
from shoal.checkpoint.manifest import Damaged
from shoal.checkpoint.names import plain_names
from shoal.checkpoint.state import as_bytes, describe
from shoal.files import Place, Url, asking, list_below, locate
from shoal.spec.errors import ShoalError, UserError

Weights = dict[str, torch.Tensor]

INDEX = "model.safetensors.index.json"
ELSEWHERE = "checkpoints.url"
"""In the folder of a run that keeps its checkpoints in another place: where that is."""
UNDERSTOOD = (
    "a run folder, a checkpoint folder, a .safetensors file, a Hugging Face folder, a state_dict (.pt, .pth, .bin), "
    "or a PyTorch distributed checkpoint (DCP) folder"
)
# Where people put the weights inside a larger dict that they torch.save.
_NESTED = ("state_dict", "model_state_dict", "model", "module", "weights")


def read_weights(path: str | Place, part: str = "model") -> Weights:
    """Read the weights at a path or URL, whatever it is: see `UNDERSTOOD`. Names come without wrappers' prefixes.

    `part` chooses among the parts of a shoal checkpoint (`model`, `ema`); other formats have one. Nothing in a file
    is run: pickles are read only in ways that cannot. What cannot be read is a UserError with the file and reason.
    """
    path = locate(path)
    with _named(path):
        weights = _read_url(path, part) if isinstance(path, Url) else _read(path, part)
    if not weights:
        raise UserError(
            f"There are no weights in {path}.", why=f"it has no tensors under {part!r}", hint="check the path"
        )
    return {plain: weights[name] for name, plain in plain_names(weights).items()}


def _read_url(url: Url, part: str) -> Weights:
    """Checkpoints are read in place; a file of another kind, or a folder of them, is fetched first."""
    below = list_below(url)
    if manifests.NAME in below:
        return read.read_state(url, part).part(part)
    for folder in (url / "checkpoints", url):
        if listing.list_checkpoints(folder):
            return read.load(folder, part=part).state.part(part)
    with tempfile.TemporaryDirectory(prefix="shoal-") as temporary:
        target = Path(temporary, url.name)
        for name in [name for name in below if "/" not in name] or [""]:
            source = url / name if name else url
            disk.make_folder((target / name).parent)
            _fetch(source, target / name)
        return {name: tensor.clone() for name, tensor in _read(target, part).items()}


def _fetch(source: Url, target: Path) -> None:
    try:
        with asking(source):
            source.fs.get_file(source.path, str(target))
    except FileNotFoundError:
        raise UserError(
            f"There are no weights at {source}.", why="nothing is there", hint=f"pass the URL of {UNDERSTOOD}"
        ) from None


def _read(path: Path, part: str) -> Weights:
    if path.is_dir():
        return _read_folder(path, part)
    if not path.is_file():
        raise UserError(f"There are no weights at {path}.", why="it does not exist, or is not a file or a folder")
    if path.suffix == ".safetensors":
        return safetensors.torch.load_file(path)
    if path.suffix == ".json":
        return _read_index(path)
    return _read_state_dict(path)


def _read_folder(path: Path, part: str) -> Weights:
    if (path / manifests.NAME).exists():
        return read.read_state(path, part).part(part)
    if (path / ELSEWHERE).is_file():
        return read_weights(disk.read_small(path / ELSEWHERE, 4096).decode(), part)
    for folder in (path / "checkpoints", path):
        if listing.list_checkpoints(folder):
            return read.load(folder, part=part).state.part(part)
    if (path / METADATA).exists():
        return read_dcp(path)
    if (path / INDEX).exists():
        return _read_index(path / INDEX)
    if files := sorted(path.glob("*.safetensors")):
        return {name: tensor for file in files for name, tensor in safetensors.torch.load_file(file).items()}
    raise UserError(f"There are no weights in {path}.", why="none of its files is known", hint=f"pass {UNDERSTOOD}")


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _read_index(path: Path) -> Weights:
    """A sharded Hugging Face folder: the index says which file has which tensor."""
    index = msgspec.json.decode(disk.read_small(path, manifests.MAX_BYTES), type=_Index)
    weights: Weights = {}
    for file in sorted(set(index.weight_map.values())):
        if file != Path(file).name:
            raise Damaged(f"{path.name}: names the file {file!r}, which is not in this folder")
        if not (path.parent / file).is_file():
            raise Damaged(f"{file}: is missing")
        weights.update(safetensors.torch.load_file(path.parent / file))
    for name, file in index.weight_map.items():
        if name not in weights:
            raise Damaged(f"{file}: has no tensor {name!r}, which {path.name} promises")
    return weights


def _read_state_dict(path: Path) -> Weights:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about old formats; what matters is raised
        found = torch.load(path, map_location="cpu", weights_only=True)
    return pick_state_dict(found)


def pick_state_dict(found: object) -> Weights:
    """The weights in what was `torch.save`d: a state_dict, or a dict that holds one under a usual name."""
    if not isinstance(found, Mapping):
        raise Damaged(f"it holds a {type(found).__name__}, not a state_dict")
    for key in _NESTED:
        if isinstance(found.get(key), Mapping):
            return pick_state_dict(found[key])
    weights = {
        name: value for name, value in found.items() if isinstance(name, str) and isinstance(value, torch.Tensor)
    }
    if not weights:
        raise Damaged(f"it holds no tensors; its keys are {', '.join(map(repr, list(found)[:10]))}")
    return weights


@contextmanager
def _named(path: Place) -> Iterator[None]:
    """Turn whatever the libraries raise for a file they cannot read into an error that names it."""
    try:
        yield
    except ShoalError:
        raise
    except Damaged as damage:
        raise UserError(f"Cannot read weights from {path}.", why=str(damage), hint=f"pass {UNDERSTOOD}") from damage
    except pickle.UnpicklingError as error:
        raise _needs_pickle(path, error) from error
    except Exception as error:  # safetensors, msgspec, zipfile and torch have many
        why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no more is known'}"
        raise UserError(f"Cannot read weights from {path}.", why=why, hint=f"pass {UNDERSTOOD}") from error


def _needs_pickle(path: Place, error: Exception) -> UserError:
    named = re.search(r"GLOBAL ([\w.]+)", str(error))
    what = f"it holds {named[1]}" if named else "it is damaged, or holds more than tensors"
    return UserError(
        f"Cannot read weights from {path} without running code from it.",
        why=f"{what}; shoal reads pickles only with weights_only=True",
        hint="if you trust its author: load it yourself with `torch.load(path, weights_only=False)` and save its "
        "`state_dict()` alone",
    )


Format = Literal["safetensors", "state_dict", "dcp"]


def write_weights(tensors: Mapping[str, torch.Tensor], path: str | Place, format: Format = "safetensors") -> Place:
    """Write weights for other programs: one .safetensors file, one `torch.save`d state_dict, or a DCP folder.

    `path` may be the URL of a file; it is made on this machine first, and as durable as that store's files are.

    A file that is there is replaced at once or, on failure, not at all; a DCP folder must not be there yet. Durable
    on return.
    """
    path = locate(path)
    if format not in _WRITERS:
        raise UserError(f"Unknown format {format!r}.", hint=f"use one of {', '.join(_WRITERS)}")
    if isinstance(path, Url):
        return _write_url(tensors, path, format)
    if path.is_dir():
        raise UserError(f"{path} is a folder that is already there.", hint="remove it first, or choose another name")
    for name, tensor in tensors.items():
        describe(name, tensor)
    hidden = path.with_name(f".writing-{path.name}-{os.urandom(4).hex()}")
    try:
        disk.make_folder(path.parent)
        _WRITERS[format](tensors, hidden)
        disk.publish(hidden, path)
    except Exception as error:  # torch wraps the system's errors in its own
        raise _cannot_write(path, error) from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
        with suppress(OSError):
            hidden.unlink()
    return path


def _write_url(tensors: Mapping[str, torch.Tensor], url: Url, format: Format) -> Url:
    if format == "dcp":
        raise UserError(
            f"A DCP folder cannot be written to {url}.",
            why="its files would appear there one after the other",
            hint="write it to a folder and copy that, or use format='safetensors'",
        )
    with tempfile.TemporaryDirectory(prefix="shoal-") as temporary:
        file = Path(temporary, "weights")
        write_weights(tensors, file, format)
        remote.upload(file, url)
    return url


def _cannot_write(path: Path, error: BaseException) -> UserError:
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    why, hint = disk.explain(cause) if cause else (f"{type(error).__name__}: {error}", "check the path and the disk")
    return UserError(f"Cannot write weights to {path}.", why=why, hint=hint)


def _write_safetensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    entries = in_file_order(describe(name, tensor) for name, tensor in tensors.items())
    disk.write_file(path, _parts(entries, tensors))


def _parts(entries: list[TensorEntry], tensors: Mapping[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    yield header(entries)
    for entry in entries:
        yield as_bytes(tensors[entry.name])


def _write_state_dict(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    with path.open("xb") as file:
        torch.save({name: _own(tensor) for name, tensor in tensors.items()}, file)
        file.flush()
        os.fsync(file.fileno())


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with a storage of its own: torch.save writes the whole storage, even of a view on a part of it."""
    plain = tensor.detach().cpu()
    return plain if plain.untyped_storage().nbytes() == plain.nbytes else plain.clone()


def _write_dcp(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    write_dcp({name: _own(tensor) for name, tensor in tensors.items()}, path)


_WRITERS: dict[str, Callable[[Mapping[str, torch.Tensor], Path], None]] = {
    "safetensors": _write_safetensors,
    "state_dict": _write_state_dict,
    "dcp": _write_dcp,
}
