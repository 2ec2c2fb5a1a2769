"""Who may still commit a checkpoint: a fence keeps out writers of older generations. No torch.

A worker that was stopped, or cut off, may wake up long after the others went on without it, in the middle of a save.
No lock can keep it out: it may hold the lock. So the order of things does:

    new generation:  write `.fence-G` (open) -> list the checkpoints there are -> write `.fence-G` (with that list)
    every writer:    rename its checkpoint into place -> look for a newer fence -> only then say that it is saved

A writer that sees no newer fence after its rename was there before the list was made, and is in it. Any other sees
the fence, takes its checkpoint away and says so; and if it is stopped before it can do that, readers pass its
checkpoint over, since it is of an older generation and not in the list. Each generation has a file of its own, so
that a fence that comes late cannot replace a newer one. A fence costs four fsyncs.
"""

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Annotated

import msgspec

from shoal.checkpoint import disk, place
from shoal.checkpoint.manifest import Damaged
from shoal.files import Place
from shoal.spec.errors import ShoalError

MAX_BYTES = 16 << 20
_NAME = re.compile(r"\.fence-(\d{1,18})")


class Stale(ShoalError):
    """This writer belongs to a generation that the others have left behind. Nothing of it was committed."""

    exit_code = 4


class Fence(msgspec.Struct, frozen=True):
    """Generations before `generation` may not commit. Of what they wrote, `known` counts (None: not listed yet)."""

    generation: Annotated[int, msgspec.Meta(ge=0)]
    known: tuple[str, ...] | None = None

    def admits(self, generation: int, identity: str) -> bool:
        """Whether a checkpoint counts."""
        return self.known is None or generation >= self.generation or identity in self.known


OPEN = Fence(0)


def newest_generation(folder: Place) -> int:
    """The newest generation that has a fence here, finished or not; 0 if there is none."""
    return max(_generations(folder), default=0)


def in_force(folder: Place) -> Fence:
    """The newest finished fence; `OPEN` if there is none. One that cannot be read counts as none."""
    for generation in sorted(_generations(folder), reverse=True):
        found = _read(folder, generation)
        if found.known is not None:
            return found
    return OPEN


def draw(folder: Place, generation: int, list_known: Callable[[], Iterable[str]]) -> None:
    """Keep older generations out from now on; durable on return. `list_known` names the checkpoints that are there.

    Does nothing if it was done before. Raises `Stale` if a newer one is there, OSError if the disk refuses.
    """
    check(folder, generation)
    if _read(folder, generation).known is not None:
        return
    place.make_folder(folder)
    _put(folder, Fence(generation))
    _put(folder, Fence(generation, tuple(list_known())))
    for older in _generations(folder):
        if older < generation:
            with suppress(OSError):
                place.remove_file(_path(folder, older))


def check(folder: Place, generation: int) -> None:
    """Raise `Stale` if a newer generation has taken over."""
    newest = newest_generation(folder)
    if newest > generation:
        raise Stale(
            f"This worker may not save checkpoints in {folder} any more.",
            why=f"it belongs to generation {generation}; generation {newest} went on without it",
            hint="nothing needs to be done: the others save; look in the journal for why this one was left behind",
            generation=generation,
        )


def confirm(folder: Place, generation: int, identity: str) -> None:
    """Raise `Stale` unless the checkpoint that was just given its name counts."""
    if newest_generation(folder) > generation and identity not in (in_force(folder).known or ()):
        check(folder, generation)


def lock_name(folder: Place) -> str:
    """What writers lock: each fence has a lock of its own, so that one who was fenced out holds up nobody."""
    newest = newest_generation(folder)
    return _path(folder, newest).name if newest else disk.LOCK


def _generations(folder: Place) -> list[int]:
    return [int(match[1]) for name in place.list_names(folder) if (match := _NAME.fullmatch(name))]


def _path(folder: Place, generation: int) -> Place:
    return folder / f".fence-{generation:09d}"


def _read(folder: Place, generation: int) -> Fence:
    try:
        found = msgspec.json.decode(place.read_small(_path(folder, generation), MAX_BYTES), type=Fence)
    except (Damaged, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return Fence(generation)
    return found if found.generation == generation else Fence(generation)


def _put(folder: Place, fence: Fence) -> None:
    place.replace_file(_path(folder, fence.generation), fence.generation, msgspec.json.encode(fence))
