"""The folder of a job: JOBS/JOB/lock, and JOBS/JOB/TOKEN for each attempt. What was promised is durable.

lock          held while anything of an attempt runs: by the keeper, and by the launcher that it starts
TOKEN/        its name is the record that this token was seen
  lock        held by the keeper of this attempt and by its launcher
  orders.json what to run; durable before a keeper is started
  claimed.json this attempt has begun; durable before the launcher is started. It never begins again
  status.json how it goes, every second
  asked.json, resize.json     what the service wants of it
  ended.json  what became of it; durable, and written after everything of it has ended
"""

import contextlib
import fcntl
import json
import os
import re
import time
from pathlib import Path
from typing import Any

from shoal.checkpoint.disk import sync_folder
from shoal.spec.errors import UserError

_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", re.ASCII)
MAX_TOKEN = 10**15
RESERVED_BYTES = 16 << 10
_LOCK_TRIES = 15


def job_folder(jobs_folder: str, job: str) -> Path:
    """Where the attempts of a job are. Raises UserError for an id that could lead elsewhere."""
    if not isinstance(job, str) or not _JOB.fullmatch(job):
        raise UserError(
            f"{str(job)[:100]!r} cannot be the id of a job.", hint="use letters, digits, `_`, `.` and `-`"
        )
    return Path(os.path.abspath(jobs_folder), job)


def attempt_folder(jobs_folder: str, job: str, token: int) -> Path:
    if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token <= MAX_TOKEN:
        raise UserError(f"{str(token)[:40]!r} cannot be the number of an attempt.", hint="count from 0")
    return job_folder(jobs_folder, job) / str(token)


def newest_token(folder: Path) -> int:
    """The largest token that was ever seen for a job; -1 where there is none."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return -1
    return max((int(name) for name in names if name.isdecimal() and name.isascii()), default=-1)


def take_lock(folder: Path) -> int | None:
    """Hold the lock of a folder, as a descriptor; None where somebody else does."""
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    for _ in range(_LOCK_TRIES):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except BlockingIOError:
            time.sleep(0.002)  # who looks at a lock takes it for a microsecond
    os.close(fd)
    return None


def write(path: Path, value: Any, *, is_durable: bool = False) -> None:
    """Replace a file in one step; a reader sees the old one or the new one. Raises OSError where the disk refuses."""
    passing = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(passing, "w", encoding="utf-8", opener=_open_own) as file:
            json.dump(value, file)
            file.flush()
            if is_durable:
                os.fsync(file.fileno())
        os.replace(passing, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(passing)
        raise
    if is_durable:
        sync_folder(path.parent)


def reserve(path: Path) -> None:
    """Make room for `write_reserved`, so that a disk that is full by then cannot keep it from being written."""
    with open(path.with_suffix(".reserved"), "wb", opener=_open_own) as file:
        os.posix_fallocate(file.fileno(), 0, RESERVED_BYTES)
        os.fsync(file.fileno())


def write_reserved(path: Path, value: Any) -> None:
    """As `write`, durable, in the room that was reserved. JSON may end in spaces."""
    room = path.with_suffix(".reserved")
    data = json.dumps(value).encode()
    if len(data) > RESERVED_BYTES or not room.exists():
        return write(path, value, is_durable=True)
    with open(room, "r+b") as file:
        file.write(data.ljust(RESERVED_BYTES))
        file.flush()
        os.fsync(file.fileno())
    os.replace(room, path)
    sync_folder(path.parent)
    return None


def read(path: Path) -> dict[str, Any]:
    """What a file says; empty where there is none that makes sense."""
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _open_own(path: str, flags: int) -> int:
    """Orders carry variables, which may be secrets."""
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
