"""Bytes to disk so that they stay there, and back with proof. Every system call of the store is made here.

Order matters: a file's bytes are durable after fsync of the file, its name after fsync of the folder. A rename is
atomic, and durable after fsync of the folder that holds the name.
"""

import errno
import fcntl
import hashlib
import os
import re
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shoal.checkpoint.manifest import Damaged
from shoal.spec.errors import UserError

CHUNK_BYTES = 4 << 20  # hash and write (or read and hash) while the chunk is in cache
LOCK = ".lock"
_LEFTOVER = re.compile(r"\.(?:writing-(?:(\d{1,18})-)?|removing-)")


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Make a new file of `parts`, durable on return; returns its size and sha256. One pass, no copies."""
    total = hashlib.sha256()
    size = 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        for part in parts:
            view = memoryview(part)
            for start in range(0, len(view), CHUNK_BYTES):
                chunk = view[start : start + CHUNK_BYTES]
                total.update(chunk)
                _write_all(descriptor, chunk)
            size += len(view)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return size, total.hexdigest()


def _write_all(descriptor: int, chunk: memoryview) -> None:
    while chunk:
        chunk = chunk[os.write(descriptor, chunk) :]


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Make a folder and those above it; each new name is durable on return."""
    if path.is_dir():
        return
    make_folder(path.parent)
    with suppress(FileExistsError):
        os.mkdir(path)
    sync_folder(path.parent)


def publish(written: Path, final: Path) -> None:
    """Give a finished folder or file its name. Durable on return.

    If the last fsync fails, a folder loses its name again; a file keeps it, since it may have replaced another.
    """
    is_folder = written.is_dir()
    if is_folder:
        sync_folder(written)
    os.rename(written, final)
    try:
        sync_folder(final.parent)
    except OSError:
        if is_folder:
            with suppress(OSError):
                os.rename(final, written)
        raise


def name_draft(folder: Path, generation: int, name: str) -> Path:
    """A hidden name for what a writer of `generation` has not finished yet."""
    return folder / f".writing-{generation}-{name}-{os.urandom(4).hex()}"


def begin(folder: Path, generation: int, name: str) -> Path:
    """A new, hidden folder to write `name` into. It is not durable, and not a checkpoint, before `publish`."""
    path = name_draft(folder, generation, name)
    os.mkdir(path)
    return path


def list_names(folder: Path) -> list[str]:
    """The names in a folder; none if it is not there or is not a folder."""
    try:
        with os.scandir(folder) as found:
            return [item.name for item in found]
    except (FileNotFoundError, NotADirectoryError):
        return []


def clear_leftovers(folder: Path, generation: int) -> None:
    """Remove what a writer or remover that died left in `folder`. The caller holds the lock of `generation`.

    So no writer of it is alive; those of older ones may be, and will fail. Files of newer ones are left alone.
    """
    for name in list_names(folder):
        match = _LEFTOVER.match(name)
        if match and int(match[1] or 0) <= generation:
            _remove_all(folder / name)


def _remove_all(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            remove_file(path)


def remove_file(path: Path) -> None:
    """Remove a file; one that is gone already is fine."""
    with suppress(FileNotFoundError):
        os.unlink(path)


def discard(path: Path) -> None:
    """Remove a folder so that nobody sees it half gone: first its name, then its files."""
    hidden = path if path.name.startswith(".") else path.with_name(f".removing-{path.name}-{os.urandom(4).hex()}")
    if hidden != path:
        os.rename(path, hidden)
    with suppress(FileNotFoundError):  # another who tidies here may be faster
        shutil.rmtree(hidden)


@contextmanager
def open_regular(path: Path, size: int | None = None) -> Iterator[int]:
    """Open a file for reading; raises `Damaged` unless it is a plain file (of `size` bytes).

    Links, pipes and devices are refused without blocking on them, so a hostile folder cannot make us wait or read
    something else.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise Damaged(f"{path.name}: {_why_unreadable(error)}") from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise Damaged(f"{path.name}: is not a plain file")
        if size is not None and found.st_size != size:
            raise Damaged(f"{path.name}: has {found.st_size:,} bytes, {size:,} were written")
        yield descriptor
    finally:
        os.close(descriptor)


def read_into(descriptor: int, name: str, views: Iterable[memoryview]) -> str:
    """Fill `views` one after another from the file and return the sha256 of what went into them."""
    total = hashlib.sha256()
    try:
        for view in views:
            for start in range(0, len(view), CHUNK_BYTES):
                total.update(_read_exactly(descriptor, name, view[start : start + CHUNK_BYTES]))
    except OSError as error:
        raise Damaged(f"{name}: {_why_unreadable(error)}") from error
    return total.hexdigest()


def _read_exactly(descriptor: int, name: str, view: memoryview) -> memoryview:
    filled = 0
    while filled < len(view):
        count = os.readv(descriptor, [view[filled:]])
        if count == 0:
            raise Damaged(f"{name}: ended early while it was read")
        filled += count
    return view


def read_small(path: Path, max_bytes: int) -> bytes:
    """All of a file that must not be larger than `max_bytes`; raises `Damaged`."""
    with open_regular(path) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > max_bytes:
            raise Damaged(f"{path.name}: has {size:,} bytes, at most {max_bytes:,} are allowed")
        data = bytearray(size)
        read_into(descriptor, path.name, [memoryview(data)])
        return bytes(data)


def _why_unreadable(error: OSError) -> str:
    words = {errno.ENOENT: "is missing", errno.ELOOP: "is a link, not a plain file", errno.EACCES: "may not be read"}
    return words.get(error.errno or 0, f"cannot be read ({error.strerror})")


@contextmanager
def locked(path: Path, timeout_seconds: float) -> Iterator[bool]:
    """Hold a folder's lock file, so that one process at a time writes or tidies there.

    Yields whether it is held: file systems without locks yield False, and the caller leaves leftovers alone. The
    kernel frees the lock of a process that died. Raises UserError if another holds it for `timeout_seconds`.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        held = _lock(descriptor, path.parent, time.monotonic() + timeout_seconds)
        try:
            yield held
        finally:
            if held:  # a process forked meanwhile shares the descriptor, so closing it would not free the lock
                fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise UserError(
                    f"Another process is writing a checkpoint in {folder}.",
                    why="two runs share one folder, or a stopped process holds its lock",
                    hint="give each run a folder of its own, or end the other process",
                ) from None
            time.sleep(0.02)
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS):
                return False
            raise


def free_bytes(folder: Path) -> int:
    """What an ordinary user may still write on the folder's file system."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def explain(error: OSError) -> tuple[str, str]:
    """Why a write failed and what to do, in words."""
    if isinstance(error, UserError):  # of a store that has a URL: it says so itself
        return f"{error.message} {error.why}", error.hint
    name = errno.errorcode.get(error.errno or 0, "OSError")
    hint = _HINTS.get(error.errno or 0, "look at the system's log (`dmesg`) for the cause")
    return f"{error.strerror or error} ({name})", hint


_HINTS = {
    errno.ENOSPC: "free some space, keep fewer checkpoints (`keep=`), or put the run on another disk (`--log-dir`)",
    errno.EDQUOT: "your quota is used up: remove files, keep fewer checkpoints (`keep=`), or use another disk",
    errno.EROFS: "the file system is read-only: put the run elsewhere (`--log-dir`), or mount it read-write",
    errno.EACCES: "allow this user to write there (`ls -ld` shows who may), or choose another folder (`--log-dir`)",
    errno.EPERM: "allow this user to write there (`ls -ld` shows who may), or choose another folder (`--log-dir`)",
    errno.EIO: "the disk reports errors: move the run to another disk (`--log-dir`) and check this one (`dmesg`)",
    errno.EMFILE: "too many files are open: raise the limit (`ulimit -n`)",
    errno.ENOTDIR: "a file stands where the folder should be: remove it, or choose another folder (`--log-dir`)",
}
