"""The few acts on files that shards need, in a folder or in a store that has a URL. Both are texts here."""

import os
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shoal.files import Url, asking, check, list_below, locate
from shoal.spec.errors import UserError


@contextmanager
def landing(folder: str, name: str) -> Iterator[str]:
    """A path to write to. The file gets its name in the folder once it is whole, and none if writing fails."""
    place = locate(folder)
    if isinstance(place, Url):
        with tempfile.TemporaryDirectory(prefix="shoal-frames-") as here:
            yield os.path.join(here, name)
            _upload(os.path.join(here, name), place / name)
        return
    place.mkdir(parents=True, exist_ok=True)
    hidden = place / f".{uuid.uuid4().hex[:8]}-{name}"
    try:
        yield str(hidden)
        os.replace(hidden, place / name)
    finally:
        hidden.unlink(missing_ok=True)


def _upload(path: str, url: Url) -> None:
    written = url if url.is_object_store else url.parent / f".{url.name}"
    with asking(url):
        url.fs.put_file(path, written.path)
        if written != url:
            url.fs.mv(written.path, url.path)


@contextmanager
def writing_to(folder: str, node: str) -> Iterator[None]:
    """Turn what the disk says into a UserError that names the node."""
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        raise UserError(
            f"Node {node} cannot write to {folder}.",
            why=error.strerror or str(error),
            hint="give `dir=` a folder in which the driver and all executors may write, on a disk with room",
        ) from error


def prepare(folder: str) -> None:
    """See to it that the folder can be written to; raises OSError, or StoreFailed for a URL."""
    place = locate(folder)
    if isinstance(place, Url):
        check(place)
        return
    place.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=place).close()


def write_small(folder: str, name: str, data: bytes) -> None:
    """Put a small file there, in place of one that is there."""
    place = locate(folder)
    if isinstance(place, Url):
        with asking(place):
            place.fs.pipe_file((place / name).path, data)
        return
    with landing(folder, name) as path:
        Path(path).write_bytes(data)


def read_small(folder: str, name: str) -> bytes:
    """All of a small file; FileNotFoundError if there is none."""
    place = locate(folder)
    if isinstance(place, Path):
        return (place.expanduser() / name).read_bytes()
    with asking(place):
        return bytes(place.fs.cat_file((place / name).path))


def list_sizes(folder: str) -> dict[str, int]:
    """The files in a folder by name, hidden ones too; none if it is not there."""
    place = locate(folder)
    if isinstance(place, Url):
        return list_below(place)
    try:
        with os.scandir(place) as found:
            return {entry.name: entry.stat().st_size for entry in found}
    except OSError:
        return {}


def remove(folder: str, names: Iterable[str]) -> None:
    """Remove files, and the folder if nothing is left in it, as far as that can be done."""
    place = locate(folder)
    for name in names:
        with suppress(OSError):
            if isinstance(place, Url):
                with asking(place):
                    place.fs.rm_file((place / name).path)
            else:
                (place / name).unlink()
    if isinstance(place, Path):
        with suppress(OSError):
            place.rmdir()
