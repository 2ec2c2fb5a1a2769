"""The run folder: making one, and holding it while the run is alive."""

import contextlib
import errno
import fcntl
import json
import os
import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from shoal.files import is_url, locate, mask
from shoal.observe.clean import clean
from shoal.observe.lines import open_file
from shoal.spec.errors import UserError

if TYPE_CHECKING:
    from random import Random

COPIED = "copied.json"
"""In the copy of a run folder: when its launcher has put it there last."""
_LOCK_TRIES = 15
_LETTERS = "abcdefghijkmnpqrstuvwxyz23456789"  # no l, o, 0, 1: people read these aloud


class RunFolder:
    """A run folder held by this process: nobody else can hold it until `close`, or until the process ends.

    Made by `create` or `claim`. `facts` is what run.json says.
    """

    def __init__(self, path: str, lock_fd: int, facts: dict[str, Any]) -> None:
        self.path = path
        self.facts = facts
        self._lock_fd = lock_fd

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    def update(self, **facts: Any) -> None:
        """Change some facts and replace run.json in one step; a reader sees the old one or the new one."""
        self.facts.update(facts)
        write_facts(self.path, self.facts)

    def close(self) -> None:
        """Let go of the folder."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def new_run_name(script: str, now: float, random: "Random") -> str:
    """A name that sorts by time, says what ran, and is short to type at its end: `2026-11-15-193000-train-k3f9`."""
    stem = os.path.basename(script).removesuffix(".py")
    word = re.sub(r"[^A-Za-z0-9_]+", "-", stem).strip("-")[:24] or "run"
    ending = "".join(random.choices(_LETTERS, k=4))
    return f"{time.strftime('%Y-%m-%d-%H%M%S', time.localtime(now))}-{word}-{ending}"


def create(home: str, script: str, facts: Mapping[str, Any], now: float, random: "Random") -> RunFolder:
    """Make a new run folder under `home`/runs and hold it. Two runs never get the same one."""
    for _ in range(20):
        path = os.path.join(home, "runs", new_run_name(script, now, random))
        if not os.path.lexists(path):
            return claim(path, facts, now)
    raise UserError(
        f"No free name for a run folder in {os.path.join(home, 'runs')}.",
        hint="name a folder with `--log-dir`",
    )


def claim(path: str, facts: Mapping[str, Any], now: float, *, is_new: bool = False) -> RunFolder:
    """Hold the folder at `path` for one run, making it where needed, and write run.json with status `running`.

    `facts` are plain JSON values (command, job, versions, ...); name, host, pid and created are filled in. Raises
    UserError where another live run holds the folder, where `is_new` and an earlier run left checkpoints in it, or
    where the disk refuses.
    """
    path = os.path.abspath(local_folder(path))
    try:
        os.makedirs(os.path.join(path, "logs"), exist_ok=True)
        lock_fd = os.open(os.path.join(path, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise explain_disk(error, path) from error
    try:
        _lock(lock_fd, path)
        if is_new and holds_checkpoints(path):
            raise _holds_another(path)
        own = {
            "name": os.path.basename(path),
            "status": "running",
            "created": now,
            "host": os.uname().nodename,
            "pid": os.getpid(),
        }
        folder = RunFolder(path, lock_fd, {**own, **facts})
        folder.update()
        return folder
    except BaseException:
        os.close(lock_fd)
        raise


def local_folder(where: str) -> str:
    """The path of a run folder. Raises UserError for a URL, unless it is that of a file on this machine."""
    if where.startswith("file://"):
        where = str(locate(where))
    if not is_url(where):
        return where
    url = mask(where)
    raise UserError(
        f"This run folder cannot be at a URL: {url}",
        why="it is appended to while the run goes on, which a store cannot do, and nobody here brings it there",
        hint=f"start the script with `shoal run --log-dir {url}`, or keep the folder on this machine and put "
        "checkpoints there: `checkpoint_dir=`",
    )


def _lock(lock_fd: int, path: str) -> None:
    for attempt in range(_LOCK_TRIES):
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            # `shoal ps` looks at a lock by taking it for a microsecond; that is not a second run.
            if attempt + 1 < _LOCK_TRIES:
                time.sleep(0.01)
        except OSError as error:
            raise explain_disk(error, path) from error
    raise _held_by_another(path)


def holds_checkpoints(path: str) -> bool:
    """Whether a run that was kept in a folder saved anything; one that failed before that is no loss."""
    with os.scandir(path) as found:
        folders = [item.path for item in found if item.name.startswith("checkpoints") and item.is_dir()]
    return any(name.startswith("step-") for folder in folders for name in os.listdir(folder))


def newest_step(path: str) -> int | None:
    """The step of the newest checkpoint of a run's first trainer, as far as names tell; None where there is none."""
    try:
        names = os.listdir(os.path.join(path, "checkpoints"))
    except OSError:
        return None
    steps = [int(found[1]) for name in names if (found := re.fullmatch(r"step-(\d+)(?:-g\d+)?", name))]
    return max(steps, default=None)


def _holds_another(path: str) -> UserError:
    # The lock was free, so a run that says it is running was killed.
    status = {"running": "was killed", None: "ended"}.get(read_facts(path).get("status"), "is over")
    return UserError(
        f"Run folder {clean(path)} already holds the checkpoints of a run, which {status}.",
        why="they would be mixed with those of this run, and removed in time",
        hint="go on with that run (`resume=True` in a script, `shoal run --resume`), or name another folder",
    )


def _held_by_another(path: str) -> UserError:
    holder = read_facts(path)
    who = f"process {holder['pid']}" if "pid" in holder else "another process"
    if holder.get("host") not in (None, os.uname().nodename):
        who += f" on {holder['host']}"
    since = holder.get("created")
    if isinstance(since, int | float):
        who += f", since {time.strftime('%H:%M:%S on %Y-%m-%d', time.localtime(since))}"
    command = command_text(holder)
    return UserError(
        f"Run folder {clean(path)} is in use by another run.",
        why=f"{who}" + (f", running `{clean(command)}`" if command else ""),
        hint="wait for it, stop it, or give this run another folder with `--log-dir`",
    )


def explain_disk(error: OSError, path: str) -> UserError:
    """A failing file operation as an error that says what to do about it."""
    other = "`--log-dir`, SHOAL_HOME, or `run_dir=` in a script"
    hints = {
        errno.EACCES: f"choose a folder you may write to with {other}",
        errno.EPERM: f"choose a folder you may write to with {other}",
        errno.EROFS: f"the disk is read-only: choose another folder with {other}",
        errno.ENOSPC: f"free some space, or choose a folder on another disk with {other}",
        errno.EDQUOT: f"your quota is used up: free some space or choose another folder with {other}",
        errno.ENOTDIR: f"a part of this path is a file: choose another folder with {other}",
        errno.EEXIST: f"a file is in the way: choose another folder with {other}",
        errno.ENAMETOOLONG: f"choose a shorter name with {other}",
        errno.ENOLCK: f"this file system cannot lock files: choose a local folder with {other}",
        errno.EOPNOTSUPP: f"this file system cannot lock files: choose a local folder with {other}",
    }
    return UserError(
        f"Cannot use {clean(path)} as a run folder.",
        why=f"{error.strerror or error} ({clean(str(error.filename or path))})",
        hint=hints.get(error.errno or 0, f"choose another folder with {other}"),
    )


def write_facts(path: str, facts: Mapping[str, Any]) -> None:
    """Replace run.json in one step, so that it survives a crash at any moment. Raises UserError on a failing disk."""
    target = os.path.join(path, "run.json")
    passing = f"{target}.{os.getpid()}"
    try:
        with open(passing, "w", encoding="utf-8") as file:
            json.dump(facts, file, indent=1, default=str)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(passing, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(passing)
        raise explain_disk(error, path) from error


def read_facts(path: str) -> dict[str, Any]:
    """What run.json of a folder says; empty where there is none that can be read."""
    try:
        with open_file(os.path.join(path, "run.json")) as file:
            facts = json.load(file)
    except (OSError, ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) else {}


def command_text(facts: Mapping[str, Any]) -> str:
    """The command of a run as one text."""
    command = facts.get("command", "")
    return " ".join(map(str, command)) if isinstance(command, list) else str(command)
