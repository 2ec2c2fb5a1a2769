"""The few acts on files that a store of checkpoints needs, in a folder of a disk or in a store that has a URL.

Here alone the two are told apart. `disk.py` and `remote.py` say how each is done, and what it promises.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from shoal.checkpoint import disk, remote
from shoal.checkpoint import manifest as manifests
from shoal.files import Place, Url

Sizes = dict[str, int]


def make_folder(folder: Place) -> None:
    """Have a folder to write into. Object stores need none; their buckets are not made here."""
    if isinstance(folder, Path):
        disk.make_folder(folder)


def list_names(folder: Place) -> list[str]:
    """The names in a folder; none if it is not there."""
    return remote.list_names(folder) if isinstance(folder, Url) else disk.list_names(folder)


def list_folders(folder: Place) -> dict[str, Sizes | None]:
    """The names of what may be checkpoints; with the sizes of their files, where those come with the names."""
    if isinstance(folder, Url):
        return {name: sizes for name, sizes in remote.list_folders(folder).items() if manifests.NAME in sizes}
    with os.scandir(folder) as found:
        return {item.name: None for item in found if item.is_dir(follow_symlinks=False)}


def read_small(path: Place, max_bytes: int) -> bytes:
    """All of a file that must not be larger than `max_bytes`; raises `Damaged`."""
    return remote.read_small(path, max_bytes) if isinstance(path, Url) else disk.read_small(path, max_bytes)


def check_size(path: Place, size: int, sizes: Sizes | None) -> None:
    """Raise `Damaged` unless there is a plain file of `size` bytes."""
    if isinstance(path, Path):
        with disk.open_regular(path, size):
            return
    found = (sizes or {}).get(path.name)
    if found is None:
        raise manifests.Damaged(f"{path.name}: is missing")
    if found != size:
        raise manifests.Damaged(f"{path.name}: has {found:,} bytes, {size:,} were written")


def read_into(path: Place, size: int, views: Iterable[memoryview]) -> str:
    """Fill `views` one after another from a file of `size` bytes; returns the sha256 of what went into them."""
    if isinstance(path, Url):
        return remote.read_into(path, views)
    with disk.open_regular(path, size) as descriptor:
        return disk.read_into(descriptor, path.name, views)


def write_file(path: Place, parts: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Make a new file of `parts`; returns its size and sha256. One pass."""
    return remote.write_file(path, parts) if isinstance(path, Url) else disk.write_file(path, parts)


def replace_file(path: Place, generation: int, data: bytes) -> None:
    """Put a small file there, durable on return; whoever reads finds the old one or the new one."""
    if isinstance(path, Url):
        remote.put(path, data)
        return
    written = disk.name_draft(path.parent, generation, "fence")
    try:
        disk.write_file(written, [data])
        disk.publish(written, path)
    except BaseException:
        with suppress(OSError):
            disk.remove_file(written)
        raise


def begin(folder: Place, generation: int, step_name: str, name: str) -> Place:
    """Where to write the files of a checkpoint that is to be called `name`. It is none before `publish`."""
    return remote.begin(folder, name) if isinstance(folder, Url) else disk.begin(folder, generation, step_name)


def publish(written: Place, name: str, manifest: bytes) -> Place:
    """Make a checkpoint of the files that were written; returns where it is. Durable on return, as the place is."""
    if isinstance(written, Url):
        remote.publish(written, manifest)
        return written
    disk.write_file(written / manifests.NAME, [manifest])
    final = _free_path(written.parent, name)
    disk.publish(written, final)
    return final


def _free_path(folder: Path, name: str) -> Path:
    """The name, with `-2` if that is taken: two renames to swap could lose both."""
    path, number = folder / name, 1
    while os.path.lexists(path):
        number += 1
        path = folder / f"{name}-{number}"
    return path


def discard(path: Place) -> None:
    """Remove a checkpoint so that nobody sees it half gone."""
    if isinstance(path, Url):
        remote.discard(path)
    else:
        disk.discard(path)


def remove_file(path: Place) -> None:
    """Remove a file; one that is gone already is fine."""
    if isinstance(path, Url):
        remote.remove_file(path)
    else:
        disk.remove_file(path)


def free_bytes(folder: Place) -> int | None:
    """How much may still be written; None where nobody can tell."""
    return disk.free_bytes(folder) if isinstance(folder, Path) else None


def clear_leftovers(folder: Place, generation: int) -> None:
    """Remove what writers that died left behind. The caller is the only one who writes."""
    if isinstance(folder, Url):
        remote.clear_leftovers(folder, generation)
    else:
        disk.clear_leftovers(folder, generation)
