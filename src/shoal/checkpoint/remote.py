"""Checkpoints in a store that is reached by URL: no locks, no fsync, and in object stores no rename.

A checkpoint is a prefix of its own that nobody else writes to: its number is drawn. The files come first, the
manifest last. An object appears whole and durable with the answer to its PUT, so the manifest's is what makes the
checkpoint one; what has no manifest is none, and is removed by the next save. File systems (HDFS) show a file while
it is being written, so there the manifest is written under another name and renamed.

Who saves here says so in `.writer`, and looks there after each save: a writer whose place was taken by another takes
its checkpoint back. With the order of things this is enough, as with fences: who takes over says so *before* it
looks for leftovers, who saves looks *after* its manifest is there.
"""

import hashlib
import random
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoal.checkpoint import manifest as manifests
from shoal.checkpoint.manifest import Damaged
from shoal.files import Url, asking, list_below
from shoal.spec.errors import UserError

CHUNK_BYTES = 16 << 20  # of one request that reads
PART_BYTES = 32 << 20  # of one request that writes; S3 takes 10,000 of them for one object
WRITER = ".writer"
_UNFINISHED = ".writing"
_PREFIX = re.compile(r"step-\d{9,18}(?:-g(\d{1,18}))?(?:-\d{1,9})?")


def begin(folder: Url, name: str) -> Url:
    """A prefix that nothing else has."""
    return folder / f"{name}-{random.SystemRandom().randrange(10**8, 10**9)}"


def write_file(path: Url, parts: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Make a file of `parts`; returns its size and sha256. An object is durable on return. One pass."""
    total, size = hashlib.sha256(), 0
    with asking(path):
        file = path.fs.open(path.path, "wb", block_size=PART_BYTES)
        try:
            for part in parts:
                view = memoryview(part)
                for start in range(0, len(view), PART_BYTES):
                    chunk = view[start : start + PART_BYTES]
                    total.update(chunk)
                    file.write(chunk)
                size += len(view)
            file.close()
        except BaseException:
            _abandon(file)
            raise
    return size, total.hexdigest()


def _abandon(file: Any) -> None:
    """Let go of a file that could not be written to its end, so that closing does not make one of its beginning."""
    with suppress(Exception):
        file.discard()
    with suppress(Exception):
        file.closed = True


def put(path: Url, data: bytes) -> None:
    """Write a small file, at once in an object store. One that is there is replaced."""
    with asking(path):
        path.fs.pipe_file(path.path, data)


def publish(written: Url, manifest: bytes) -> None:
    """Make a checkpoint of the files in a prefix."""
    final = written / manifests.NAME
    if final.is_object_store:
        put(final, manifest)
    else:
        unfinished = written / (manifests.NAME + _UNFINISHED)
        put(unfinished, manifest)
        _rename(unfinished, final)


def upload(file: Path, final: Url) -> None:
    """Copy a file to a store, where it appears whole or not at all. One that is there is replaced."""
    written = final if final.is_object_store else final.parent / (final.name + _UNFINISHED)
    with asking(final):
        written.fs.put_file(str(file), written.path)
    if written != final:
        remove_file(final)
        _rename(written, final)


def _rename(written: Url, final: Url) -> None:
    with asking(final):
        final.fs.mv(written.path, final.path)
        final.fs.info(final.path)  # HDFS answers a rename that it did not do with "false"


def read_small(path: Url, max_bytes: int) -> bytes:
    """All of a file that must not be larger than `max_bytes`; raises `Damaged`."""
    try:
        with asking(path):
            size = int(path.fs.info(path.path)["size"])
            data = path.fs.cat_file(path.path) if 0 < size <= max_bytes else b""
    except FileNotFoundError:
        raise Damaged(f"{path.name}: is missing") from None
    if size > max_bytes:
        raise Damaged(f"{path.name}: has {size:,} bytes, at most {max_bytes:,} are allowed")
    return bytes(data)


def read_into(path: Url, views: Iterable[memoryview]) -> str:
    """Fill `views` one after another from a file; returns the sha256 of what went into them."""
    total, position = hashlib.sha256(), 0
    for view in views:
        for start in range(0, len(view), CHUNK_BYTES):
            target = view[start : start + CHUNK_BYTES]
            data = _read_range(path, position, position + len(target))
            if len(data) < len(target):
                raise Damaged(f"{path.name}: ended early while it was read")
            target[:] = data
            total.update(target)
            position += len(target)
    return total.hexdigest()


def _read_range(path: Url, start: int, end: int) -> bytes:
    try:
        with asking(path):
            return bytes(path.fs.cat_file(path.path, start=start, end=end))
    except FileNotFoundError:
        raise Damaged(f"{path.name}: is missing") from None


def list_names(folder: Url) -> list[str]:
    """The names in a folder; none if it is not there."""
    try:
        with asking(folder):
            found = folder.fs.ls(folder.path, detail=False)
    except FileNotFoundError:
        return []
    return [path.rstrip("/").rpartition("/")[2] for path in found]


def list_folders(folder: Url) -> dict[str, dict[str, int]]:
    """The prefixes in a folder with the sizes of their files: of checkpoints, and of what became none."""
    found: dict[str, dict[str, int]] = {}
    for path, size in list_below(folder).items():
        prefix, is_below, name = path.partition("/")
        if is_below:
            found.setdefault(prefix, {})[name] = size
    return found


def discard(path: Url) -> None:
    """Remove a checkpoint so that nobody sees it half gone: first its manifest, then its files."""
    remove_file(path / manifests.NAME)
    if path.is_object_store:
        for name in list_below(path):
            remove_file(path / name)
    else:
        with suppress(FileNotFoundError), asking(path):
            path.fs.rm(path.path, recursive=True)


def remove_file(path: Url) -> None:
    """Remove a file; one that is gone already is fine."""
    with suppress(FileNotFoundError), asking(path):
        path.fs.rm_file(path.path)


def clear_leftovers(folder: Url, generation: int) -> None:
    """Remove what writers of this generation and of older ones left unfinished. The caller is the one who saves."""
    for name, files in list_folders(folder).items():
        if manifests.NAME not in files and _is_ours(name, generation):
            discard(folder / name)
    _end_uploads(folder, generation)


def _is_ours(name: str, generation: int) -> bool:
    match = _PREFIX.fullmatch(name)
    return match is not None and int(match[1] or 0) <= generation


def _end_uploads(folder: Url, generation: int) -> None:
    """S3 keeps the parts of an object that was not finished, unseen and paid for, until somebody ends its upload."""
    call = getattr(folder.fs, "call_s3", None)
    if call is None:
        return
    bucket, _, prefix = folder.path.partition("/")
    with suppress(Exception):  # not every store has this call; a lifecycle rule of the bucket does the same
        for upload in call("list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/").get("Uploads", ()):
            if _is_ours(upload["Key"].removeprefix(f"{prefix}/").partition("/")[0], generation):
                call("abort_multipart_upload", Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])


def claim(folder: Url, writer: str) -> None:
    """Be the one who saves here. Whoever was it before finds that out."""
    put(folder / WRITER, writer.encode())


def check_claim(folder: Url, writer: str) -> None:
    """UserError if another has taken over."""
    try:
        found = read_small(folder / WRITER, 4096).decode(errors="replace")
    except Damaged:
        found = ""  # removed by hand: nobody else is here
    if found not in ("", writer):
        raise UserError(
            f"Another process saves checkpoints in {folder}.",
            why=f"it took over from this one ({writer}): {found}",
            hint="give each run a place of its own, or end the other process",
        )
