"""Write one checkpoint: whole and durable, or not at all. And decide which older ones are no longer needed."""

import errno
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from shoal.checkpoint import facts, listing, place
from shoal.checkpoint import fence as fences
from shoal.checkpoint import manifest as manifests
from shoal.checkpoint.layout import FilePlan, header, plan_files
from shoal.checkpoint.listing import Entry
from shoal.checkpoint.manifest import FileEntry, Manifest
from shoal.checkpoint.state import State, describe
from shoal.files import Place
from shoal.spec.errors import UserError

MAX_STEP = 10**15


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A state without its bytes: what will be written, in which files. It holds no reference to the caller's data."""

    step: int
    facts: bytes
    plans: tuple[FilePlan, ...]

    @property
    def num_bytes(self) -> int:
        return sum(plan.data_bytes for plan in self.plans)


def draft(state: State, max_file_bytes: int) -> Draft:
    """Plan the files of a state. What can never be saved is a UserError that names the tensor or fact."""
    if isinstance(state.step, bool) or not isinstance(state.step, int) or not 0 <= state.step <= MAX_STEP:
        raise UserError(f"{state.step!r} is not a step.", why="steps are counted from 0", hint="pass a whole number")
    entries = [describe(name, tensor) for name, tensor in state.tensors.items()]
    plans = plan_files(entries, max_file_bytes)
    return Draft(step=state.step, facts=facts.encode(state.facts), plans=tuple(plans))


def write_checkpoint(
    folder: Place,
    planned: Draft,
    data: Iterable[memoryview],
    generation: int = 0,
    confirm: Callable[[], None] = lambda: None,
) -> Place:
    """Write the files where nobody takes them for a checkpoint, then make them one; returns its path.

    Nothing is left behind if any of it fails, or if a newer generation takes over meanwhile (`Stale`). The caller
    is the only one who writes, which `confirm` may still deny in the end, by raising.
    """
    _check_space(folder, planned.num_bytes)
    sequence = next_sequence(listing.list_checkpoints(folder), time.time())
    name = f"{_name(planned.step)}-g{generation}" if generation else _name(planned.step)
    hidden = place.begin(folder, generation, _name(planned.step), name)
    try:
        files = [_write_tensors(hidden, plan, view) for plan, view in zip(planned.plans, data, strict=True)]
        found = Manifest(
            step=planned.step,
            sequence=sequence,
            saved_at=time.time(),
            facts=msgspec.Raw(planned.facts),
            files=tuple(files),
            generation=generation,
            nonce=os.urandom(8).hex(),
        )
        encoded = manifests.encode(found)
        fences.check(folder, generation)
        final = place.publish(hidden, name, encoded)
    except BaseException:
        with suppress(OSError):
            place.discard(hidden)
        raise
    _confirm(folder, final, found, confirm)
    return final


def _confirm(folder: Place, final: Place, found: Manifest, confirm: Callable[[], None]) -> None:
    """Take it back if it does not count. Only its own generation uses its name, so it is ours that goes."""
    try:
        fences.confirm(folder, found.generation, found.identity)
        confirm()
    except BaseException:
        with suppress(OSError):
            place.discard(final)
        raise


def next_sequence(there: Iterable[Entry], now: float) -> int:
    """A number larger than that of every checkpoint saved before.

    The clock alone may be set back, and counting alone goes wrong where a manifest cannot be read for a moment.
    """
    return max(int(now * 1000), *(entry.sequence + 1 for entry in there), 0)


def _check_space(folder: Place, num_bytes: int) -> None:
    free = place.free_bytes(folder)
    if free is not None and free < num_bytes:
        raise OSError(errno.ENOSPC, f"{num_bytes:,} bytes are needed, {free:,} are free")


def _write_tensors(folder: Place, plan: FilePlan, data: memoryview) -> FileEntry:
    start = header(plan.tensors)
    size, sha256 = place.write_file(folder / plan.name, [start, data])
    return FileEntry(plan.name, size, sha256, len(start), plan.tensors)


def _name(step: int) -> str:
    return f"step-{step:09d}"


def pick_doomed(entries: Iterable[Entry], keep: int | None) -> list[Entry]:
    """Which checkpoints may go, given all of them with the last saved first.

    The `keep` last ones of different steps stay, counting only those without a problem; what was fenced out goes.
    What has no readable manifest stays too: it may come from a newer shoal, and someone may want to look at it.
    """
    doomed: list[Entry] = []
    kept: set[int] = set()
    for entry in entries:
        is_surplus = entry.is_stale or entry.step in kept or (keep is not None and len(kept) >= keep)
        if is_surplus and entry.sequence >= 0:
            doomed.append(entry)
        elif not entry.problem:
            kept.add(entry.step)
    return doomed
