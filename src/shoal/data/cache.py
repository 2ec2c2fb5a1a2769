"""Copies on this machine of files that have a URL: all its workers, epochs and later runs read the network once.

A copy is known by the URL and by what the store says of the file's content (its ETag, else its size and time): a file
that has changed is fetched anew. What a store says nothing of is fetched each time. Workers that want the same file
wait for the one that fetches it. Copies that nobody used for longest go when there are too many.
"""

import fcntl
import hashlib
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shoal.files import Url, asking
from shoal.spec.errors import UserError

MAX_BYTES = 32 << 30
KEEP_SECONDS = 3600.0
"""A copy that was used within this time stays, however many there are: its user may be about to open it."""

_COPY = re.compile(r"[0-9a-f]{40}(\.\w+)?")
_TIMES = ("LastModified", "last_modified", "Last-Modified", "modificationTime", "mtime", "updated")


def find(url: Url) -> list[Url]:
    """The files that a URL names, which may be a pattern; sorted. Without a pattern nobody is asked."""
    if not re.search(r"[*\[]", url.path):
        return [url]
    with asking(url):
        found = sorted(url.fs.glob(url.path))
    start = url.shown.removesuffix(url.path)
    if not found:
        raise UserError(f"No file matches {url}", why="looked there just now", hint="check the URL")
    return [Url(start + path, path, url.fs) for path in found]


def fetch(url: Url, folder: Path, max_bytes: int = MAX_BYTES) -> Path:
    """A copy of the file on this machine, fetched unless it is there."""
    try:
        with asking(url):
            info = url.fs.info(url.path)
    except FileNotFoundError:
        raise UserError(f"There is no file {url}", why="the store does not know it", hint="check the URL") from None
    size = info.get("size")
    copy = folder / (_key(url, info) + Path(url.name).suffix)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f".lock-{copy.stem}"):
            if not (copy.is_file() and size in (None, copy.stat().st_size)):
                _download(url, copy, size)
            os.utime(copy)
        _trim(folder, max_bytes)
    except OSError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"No copy of {url} can be kept in {folder}.",
            why=str(error),
            hint="make room there, or keep copies elsewhere (SHOAL_HOME)",
        ) from error
    return copy


def _key(url: Url, info: dict[str, object]) -> str:
    etag = info.get("ETag") or info.get("etag")
    times = [info[name] for name in _TIMES if info.get(name)]
    version = etag or (times and (info.get("size"), *times)) or os.urandom(16)
    return hashlib.sha256(f"{url.shown}\0{url.path}\0{version!r}".encode()).hexdigest()[:40]


def _download(url: Url, copy: Path, size: int | None) -> None:
    """Only a whole file gets the name. The caller holds its lock, so nobody else writes here."""
    unfinished = copy.with_name(f".fetching-{copy.name}")
    try:
        with asking(url):
            url.fs.get_file(url.path, str(unfinished))
        with open(unfinished, "rb") as file:
            os.fsync(file.fileno())
            found = os.fstat(file.fileno()).st_size
        if size is not None and found != size:
            raise UserError(
                f"{url} came with {found:,} bytes, {size:,} were promised.",
                why="it changed meanwhile",
                hint="try again",
            )
        os.rename(unfinished, copy)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time; the kernel frees the lock of one that died."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _trim(folder: Path, max_bytes: int) -> None:
    """Remove what was used longest ago, as far as there is too much."""
    copies = []
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # another worker may be tidying too
            if _COPY.fullmatch(path.name):
                copies.append((path.stat().st_mtime, path.stat().st_size, path))
    total = sum(size for _, size, _ in copies)
    for used, size, path in sorted(copies):
        if total <= max_bytes or used > time.time() - KEEP_SECONDS:
            return
        path.unlink(missing_ok=True)
        (folder / f".lock-{path.stem}").unlink(missing_ok=True)
        total -= size
