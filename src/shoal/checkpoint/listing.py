"""Which checkpoints there are, and whether they are whole. Nothing here writes, and nothing needs torch."""

import re
from dataclasses import dataclass, replace
from itertools import repeat

from shoal.checkpoint import disk, place
from shoal.checkpoint import fence as fences
from shoal.checkpoint import manifest as manifests
from shoal.checkpoint.manifest import Damaged, FileEntry, Manifest
from shoal.checkpoint.place import Sizes
from shoal.files import Place
from shoal.spec.errors import UserError

_STEP = re.compile(r"step-(\d{9,18})(?:-g\d{1,18})?(?:-\d{1,9})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A checkpoint as far as its manifest and the sizes of its files tell. `problem` is empty if nothing is wrong.

    `is_stale` says that it came from a generation that had been fenced out, so that nobody ever counts on it.
    """

    step: int
    path: Place
    sequence: int = -1
    saved_at: float = 0.0
    num_bytes: int = 0
    generation: int = 0
    identity: str = ""
    is_stale: bool = False
    problem: str = ""


def step_of(name: str) -> int | None:
    """The step a folder's name speaks of, or None if it is not the name of a checkpoint."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def list_checkpoints(folder: Place) -> tuple[Entry, ...]:
    """All checkpoints in a folder, the last saved first. Cheap: reads manifests and sizes, no tensor data.

    Those whose manifest cannot be read come before all others: they may be the newest, and nobody should miss them.
    A folder that is not there has none.
    """
    try:
        found = place.list_folders(folder)
        entries = [
            inspect(folder / name, step, sizes)
            for name, sizes in found.items()
            if (step := step_of(name)) is not None
        ]
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


def inspect(path: Place, step: int, sizes: Sizes | None = None) -> Entry:
    """Look at one checkpoint without reading its tensors. A store that has a URL told the `sizes` of its files."""
    entry = Entry(step=step, path=path)
    try:
        found = read_manifest(path)
        if found.step != step:
            raise Damaged(f"{manifests.NAME}: speaks of step {found.step}, but its folder is called {path.name}")
        entry = replace(entry, sequence=found.sequence, saved_at=found.saved_at, num_bytes=found.num_bytes)
        entry = replace(entry, generation=found.generation, identity=found.identity)
        for file in found.files:
            place.check_size(path / file.name, file.size, sizes)
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


def read_manifest(path: Place) -> Manifest:
    """The manifest of one checkpoint folder; raises `Damaged`."""
    data = place.read_small(path / manifests.NAME, manifests.MAX_BYTES)
    try:
        return manifests.decode(data)
    except Damaged as damage:
        raise Damaged(f"{manifests.NAME}: {damage}") from None


def _verify_file(path: Place, file: FileEntry) -> None:
    chunk = memoryview(bytearray(disk.CHUNK_BYTES))
    whole, rest = divmod(file.size, len(chunk))
    compare(file, place.read_into(path / file.name, file.size, [*repeat(chunk, whole), chunk[:rest]]))


def compare(file: FileEntry, found_sha256: str) -> None:
    """Raise `Damaged` where a file's bytes are not those that were written."""
    if found_sha256 != file.sha256:
        raise Damaged(
            f"{file.name}: its bytes have changed (sha256 {found_sha256[:12]}, written as {file.sha256[:12]})"
        )
