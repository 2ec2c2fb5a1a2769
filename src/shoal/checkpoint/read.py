"""Find, check and read checkpoints. Nothing here writes, so it may look at a run that is alive.

Bytes are read into memory of our own and hashed there, chunk by chunk, and the tensors are views of that memory: what
was verified is what is used. A memory-mapped file would save a copy, but it can change after the check, and it kills
the process (SIGBUS) if it is cut short meanwhile.
"""

import os
import re
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path

import torch

from shoal.checkpoint import disk, facts
from shoal.checkpoint import fence as fences
from shoal.checkpoint import manifest as manifests
from shoal.checkpoint.layout import DTYPES, TensorEntry
from shoal.checkpoint.manifest import Damaged, FileEntry, Manifest
from shoal.checkpoint.state import TORCH_DTYPES, State
from shoal.spec.errors import UserError

_STEP = re.compile(r"step-(\d{9,18})(?:-g\d{1,18})?(?:-\d{1,9})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A checkpoint as far as its manifest and the sizes of its files tell. `problem` is empty if nothing is wrong.

    `is_stale` says that it came from a generation that had been fenced out, so that nobody ever counts on it.
    """

    step: int
    path: Path
    sequence: int = -1
    saved_at: float = 0.0
    num_bytes: int = 0
    generation: int = 0
    identity: str = ""
    is_stale: bool = False
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A checkpoint that was passed over, and why. The reason starts with the file that is wrong."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The state that was found, where, and the newer ones that could not be used."""

    state: State
    path: Path
    skipped: tuple[Skipped, ...]


def step_of(path: Path) -> int | None:
    """The step a folder's name speaks of, or None if it is not the name of a checkpoint."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None


def list_checkpoints(folder: Path) -> tuple[Entry, ...]:
    """All checkpoints in a folder, the last saved first. Cheap: reads manifests and sizes, no tensor data.

    Those whose manifest cannot be read come before all others: they may be the newest, and nobody should miss them.
    A folder that is not there has none.
    """
    try:
        with os.scandir(folder) as found:
            paths = [Path(item.path) for item in found if item.is_dir(follow_symlinks=False)]
        entries = [inspect(path, step) for path in paths if (step := step_of(path)) is not None]
        # Looked at after the names: whoever wrote one of them since the fence was finished is in no list.
        fence = fences.in_force(folder)
    except FileNotFoundError:
        return ()
    except OSError as error:
        why, _ = disk.explain(error)
        raise UserError(f"Cannot look for checkpoints in {folder}.", why=why, hint="check the path") from error
    entries = [_judge(entry, fence) for entry in entries]
    return tuple(sorted(entries, key=lambda entry: (entry.sequence < 0, entry.sequence, entry.step), reverse=True))


def _judge(entry: Entry, fence: fences.Fence) -> Entry:
    if entry.sequence < 0 or fence.admits(entry.generation, entry.identity):
        return entry
    late = f"was written by generation {entry.generation} after generation {fence.generation} had taken over"
    return replace(entry, is_stale=True, problem=f"{manifests.NAME}: {late}")


def inspect(path: Path, step: int) -> Entry:
    """Look at one checkpoint without reading its tensors."""
    entry = Entry(step=step, path=path)
    try:
        found = read_manifest(path)
        if found.step != step:
            raise Damaged(f"{manifests.NAME}: speaks of step {found.step}, but its folder is called {path.name}")
        entry = replace(entry, sequence=found.sequence, saved_at=found.saved_at, num_bytes=found.num_bytes)
        entry = replace(entry, generation=found.generation, identity=found.identity)
        for file in found.files:
            with disk.open_regular(path / file.name, file.size):
                pass
    except Damaged as damage:
        return replace(entry, problem=str(damage))
    return entry


def verify(entry: Entry) -> Entry:
    """Read every byte of a checkpoint and compare digests; the answer's `problem` is empty if all is well."""
    if entry.problem:
        return entry
    try:
        for file in read_manifest(entry.path).files:
            _verify_file(entry.path, file)
    except Damaged as damage:
        return replace(entry, problem=str(damage))
    return entry


def load(folder: Path, step: int | None = None, part: str = "") -> Loaded:
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


def _candidates(folder: Path, step: int | None) -> list[Entry]:
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


def _none_usable(folder: Path, step: int | None, skipped: list[Skipped]) -> UserError:
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


def read_manifest(path: Path) -> Manifest:
    """The manifest of one checkpoint folder; raises `Damaged`."""
    data = disk.read_small(path / manifests.NAME, manifests.MAX_BYTES)
    try:
        return manifests.decode(data)
    except Damaged as damage:
        raise Damaged(f"{manifests.NAME}: {damage}") from None


def read_state(path: Path, part: str = "") -> State:
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


def _read_tensors(path: Path, file: FileEntry) -> dict[str, torch.Tensor]:
    header = bytearray(file.data_start)
    data = torch.empty(file.size - file.data_start, dtype=torch.uint8)
    with disk.open_regular(path / file.name, file.size) as descriptor:
        found = disk.read_into(descriptor, file.name, [memoryview(header), data.numpy().data])
    _compare(file, found)
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


def _verify_file(path: Path, file: FileEntry) -> None:
    chunk = memoryview(bytearray(disk.CHUNK_BYTES))
    whole, rest = divmod(file.size, len(chunk))
    with disk.open_regular(path / file.name, file.size) as descriptor:
        _compare(file, disk.read_into(descriptor, file.name, [*repeat(chunk, whole), chunk[:rest]]))


def _compare(file: FileEntry, found_sha256: str) -> None:
    if found_sha256 != file.sha256:
        raise Damaged(
            f"{file.name}: its bytes have changed (sha256 {found_sha256[:12]}, written as {file.sha256[:12]})"
        )
