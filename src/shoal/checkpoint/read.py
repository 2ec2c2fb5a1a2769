"""Read checkpoints, proving that they are whole. Nothing here writes, so it may look at a run that is alive.

Bytes are read into memory of our own and hashed there, chunk by chunk, and the tensors are views of that memory: what
was verified is what is used. A memory-mapped file would save a copy, but it can change after the check, and it kills
the process (SIGBUS) if it is cut short meanwhile.
"""

import os
from dataclasses import dataclass

import torch

from shoal.checkpoint import facts, place
from shoal.checkpoint import manifest as manifests
from shoal.checkpoint.layout import DTYPES, TensorEntry
from shoal.checkpoint.listing import Entry, compare, list_checkpoints, read_manifest
from shoal.checkpoint.manifest import Damaged, FileEntry
from shoal.checkpoint.state import TORCH_DTYPES, State
from shoal.files import Place
from shoal.spec.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A checkpoint that was passed over, and why. The reason starts with the file that is wrong."""

    path: Place
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The state that was found, where, and the newer ones that could not be used."""

    state: State
    path: Place
    skipped: tuple[Skipped, ...]


def load(folder: Place, step: int | None = None, part: str = "") -> Loaded:
    """The state saved last (or at `step`) that proves whole; `part` limits the tensors to `model`, `ema`, ...

    Damaged ones are passed over and named in the answer. If none is left it is a UserError that lists each.
    """
    for _ in range(3):  # a live run may replace the checkpoints we are looking at: then look again
        entries = _candidates(folder, step)
        loaded, skipped = _first_whole(entries, part)
        if loaded is not None:
            return loaded
        if entries == _candidates(folder, step):
            break
    raise _none_usable(folder, step, skipped)


def _candidates(folder: Place, step: int | None) -> list[Entry]:
    return [entry for entry in list_checkpoints(folder) if step is None or entry.step == step]


def _first_whole(entries: list[Entry], part: str) -> tuple[Loaded | None, list[Skipped]]:
    skipped: list[Skipped] = []
    for entry in entries:
        try:
            if entry.problem:
                raise Damaged(entry.problem)
            return Loaded(state=read_state(entry.path, part), path=entry.path, skipped=tuple(skipped)), skipped
        except Damaged as damage:
            skipped.append(Skipped(path=entry.path, reason=str(damage)))
    return None, skipped


def _none_usable(folder: Place, step: int | None, skipped: list[Skipped]) -> UserError:
    which = "checkpoint" if step is None else f"checkpoint of step {step}"
    if not skipped:
        there = sorted({entry.step for entry in list_checkpoints(folder)})
        return UserError(
            f"There is no {which} in {folder}.",
            why=f"steps found there: {', '.join(map(str, there)) or 'none'}",
            hint="check the folder's name, or start without resuming",
        )
    return UserError(
        f"No usable {which} in {folder}.",
        why="; ".join(f"{item.path.name}: {item.reason}" for item in skipped),
        hint="restore one from a backup, or start without resuming",
    )


def read_state(path: Place, part: str = "") -> State:
    """Read one checkpoint folder and prove it; raises `Damaged`. Costs one copy and one sha256 of its bytes."""
    found = read_manifest(path)
    prefix = f"{part}/" if part else ""
    files = [file for file in found.files if any(entry.name.startswith(prefix) for entry in file.tensors)]
    check_memory(sum(file.size for file in files), manifests.NAME)
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        tensors.update(_read_tensors(path, file))
    try:
        known = facts.decode(bytes(found.facts))
    except ValueError as error:
        raise Damaged(f"{manifests.NAME}: its facts cannot be read: {error}") from None
    kept = {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    return State(step=found.step, tensors=kept, facts=known)


def check_memory(num_bytes: int, name: str) -> None:
    """A sparse file can claim to be larger than any memory; asking for that much could end the process.

    `name` is the file that says what the others hold.
    """
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if num_bytes > available:
        raise Damaged(f"{name}: its files need {num_bytes:,} bytes of memory; this machine has {available:,}")


def _read_tensors(path: Place, file: FileEntry) -> dict[str, torch.Tensor]:
    header = bytearray(file.data_start)
    data = torch.empty(file.size - file.data_start, dtype=torch.uint8)
    compare(file, place.read_into(path / file.name, file.size, [memoryview(header), data.numpy().data]))
    tensors, start = {}, 0
    for entry in file.tensors:
        end = start + entry.num_bytes
        tensors[entry.name] = _view(data[start:end], entry)
        start = end
    return tensors


def _view(data: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    if data.storage_offset() % DTYPES[entry.dtype][1]:
        data = data.clone()  # not in the order we write: give it an aligned place of its own
    return data.view(TORCH_DTYPES[entry.dtype]).view(entry.shape)
