"""The one JSON file that says what a checkpoint is. No torch, no I/O.

    {"format": "shoal-checkpoint", "version": 1, "sha256": "<of the body's bytes>", "body": {step, facts, files, ...}}

The manifest is written last and carries the digest of every file and of itself, so that a checkpoint is either proven
whole or known to be damaged. Everything read from it is checked before it is used: it may come from a broken disk
or from someone who means harm.
"""

import hashlib
from typing import Annotated, TypeVar

import msgspec

from shoal.checkpoint.layout import DTYPES, TensorEntry
from shoal.spec.errors import UserError

NAME = "manifest.json"
FORMAT = "shoal-checkpoint"
VERSION = 1
MAX_BYTES = 64 << 20  # about half a million tensors; what is larger is not a manifest of ours

Sha256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]
T = TypeVar("T")
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]


class Damaged(Exception):
    """Why a checkpoint cannot be used. Internal: people see it as the reason of a `Skipped` or in a UserError."""


class FileEntry(msgspec.Struct, frozen=True):
    """One file: its size and digest, where its data starts, and its tensors in the order of the data."""

    # A bare file name: no separator, no leading dot, so that it cannot point out of the checkpoint's folder.
    name: Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z0-9_-]{0,99}\.safetensors$")]
    size: Count
    sha256: Sha256
    data_start: Count
    tensors: tuple[TensorEntry, ...]


class Manifest(msgspec.Struct, frozen=True):
    """What a checkpoint holds. `sequence` grows with each save in a folder: the newest has the largest.

    `generation` is that of the World that wrote it, `nonce` tells it from all others.
    """

    step: Count
    sequence: Count
    saved_at: float
    facts: msgspec.Raw  # as `facts.encode` wrote them
    files: tuple[FileEntry, ...]
    generation: Count = 0
    nonce: Annotated[str, msgspec.Meta(max_length=64)] = ""

    @property
    def identity(self) -> str:
        """What a fence calls it by: names of folders are used again, this is not."""
        return f"{self.step}-{self.sequence}-{self.nonce}"

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files)


class _Envelope(msgspec.Struct):
    format: str
    version: int
    sha256: Sha256
    body: msgspec.Raw


def encode(manifest: Manifest) -> bytes:
    """The bytes of `manifest.json`."""
    body = msgspec.json.encode(manifest)
    envelope = _Envelope(FORMAT, VERSION, hashlib.sha256(body).hexdigest(), msgspec.Raw(body))
    data = msgspec.json.encode(envelope)
    if len(data) > MAX_BYTES:
        raise UserError(
            f"The checkpoint's manifest would have {len(data):,} bytes; at most {MAX_BYTES:,} are allowed.",
            why="the facts, or the number of tensors, are too many for one JSON file",
            hint="keep large values as tensors, not as facts",
        )
    return data


def decode(data: bytes) -> Manifest:
    """Read and check a manifest; raises `Damaged` with the reason."""
    envelope = _decode(data, _Envelope)
    if envelope.format != FORMAT:
        raise Damaged(f"its format is {envelope.format!r}, not {FORMAT!r}")
    if envelope.version != VERSION:
        raise Damaged(f"it has format version {envelope.version}; this shoal reads version {VERSION}")
    body = bytes(envelope.body)
    if hashlib.sha256(body).hexdigest() != envelope.sha256:
        raise Damaged("its content does not match its own sha256")
    manifest = _decode(body, Manifest)
    _check(manifest)
    return manifest


def _decode(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Damaged(f"it is not a valid manifest: {error}") from None


def _check(manifest: Manifest) -> None:
    """What the types alone do not say: known dtypes, sizes that add up, every name once."""
    names: set[str] = set()
    for file in manifest.files:
        if file.name in names:
            raise Damaged(f"it names the file {file.name} twice")
        names.add(file.name)
        for tensor in file.tensors:
            if tensor.dtype not in DTYPES:
                raise Damaged(f"tensor {tensor.name!r} has the unknown type {tensor.dtype!r}")
            if f"/{tensor.name}" in names:
                raise Damaged(f"it names the tensor {tensor.name!r} twice")
            names.add(f"/{tensor.name}")
        content = sum(tensor.num_bytes for tensor in file.tensors)
        if file.data_start + content != file.size:
            raise Damaged(f"{file.name} has {file.size} bytes, but its tensors need {file.data_start} + {content}")
