"""The runs there are: listing them, with a status that is true, and finding the one that is meant."""

import fcntl
import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.files import is_url
from shoal.observe.clean import clean
from shoal.observe.folder import COPIED, command_text, read_facts
from shoal.observe.lines import open_file
from shoal.spec.errors import UserError

FRESH_SECONDS = 60.0
"""A copy of a run folder is brought up to date every few seconds while the run goes on."""
YEAR_9999 = 253_370_764_800


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """A run as its folder tells it. `status` is that of run.json, or `lost`: its launcher died without a word.

    An elastic run has `min_workers` and `max_workers`; `num_workers` is how many it had last.
    """

    name: str
    path: str
    status: str
    created: float
    command: str = ""
    num_workers: int | None = None
    min_workers: int | None = None
    max_workers: int | None = None
    pid: int | None = None
    host: str = ""
    ended: float | None = None
    exit_code: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


def is_held(path: str) -> bool:
    """Whether a live process holds this run folder, or that of which it is a copy."""
    return is_locked(path) or _is_fresh_copy(path)


def _is_fresh_copy(path: str) -> bool:
    """Whether the launcher of a run elsewhere was alive just now."""
    try:
        with open_file(os.path.join(path, COPIED)) as file:
            return bool(time.time() < json.load(file)["time"] + FRESH_SECONDS)
    except (OSError, ValueError, TypeError, KeyError):
        return False


def is_locked(path: str) -> bool:
    """Whether a live process of this machine holds this run folder."""
    try:
        fd = os.open(os.path.join(path, "lock"), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


def read_run(path: str) -> RunInfo | None:
    """A run folder's facts with a status that is true now; None for a folder that is not one."""
    facts = read_facts(path)
    if not facts:
        return None
    status = str(facts.get("status", "unknown"))
    if status == "running" and not is_held(path):
        # The launcher may have ended between the two looks: believe the second reading of run.json.
        facts = read_facts(path) or facts
        status = "lost" if facts.get("status") == "running" else str(facts.get("status"))
    return RunInfo(
        name=os.path.basename(os.path.abspath(path)),
        path=os.path.abspath(path),
        status=status,
        created=_time(facts.get("created")) or 0.0,
        command=command_text(facts),
        num_workers=_whole(facts.get("num_workers")),
        min_workers=_whole(facts.get("min_workers")),
        max_workers=_whole(facts.get("max_workers")),
        pid=_whole(facts.get("pid")),
        host=str(facts.get("host", "")),
        ended=_time(facts.get("ended")),
        exit_code=_whole(facts.get("exit_code")),
        facts=facts,
    )


def _time(value: Any) -> float | None:
    """Seconds since 1970, where a calendar has them."""
    return float(value) if isinstance(value, int | float) and 0 <= value < YEAR_9999 else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def list_logs(run_dir: str) -> dict[int, int]:
    """The size in bytes of each rank's log: of what is kept of it."""
    sizes: dict[int, int] = {}
    try:
        with os.scandir(os.path.join(run_dir, "logs")) as entries:
            for entry in entries:
                if match := re.fullmatch(r"(\d{1,9})\.log(?:\.\d{1,18})?", entry.name):
                    sizes[int(match[1])] = sizes.get(int(match[1]), 0) + entry.stat().st_size
    except OSError:
        return {}
    return dict(sorted(sizes.items()))


def list_runs(home: str) -> list[RunInfo]:
    """The runs under `home`, newest first. Folders that are not runs are passed over."""
    folder = os.path.join(home, "runs")
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    runs = [run for name in names if (run := read_run(os.path.join(folder, name)))]
    return sorted(runs, key=lambda run: (run.created, run.name), reverse=True)


def find_run(home: str, text: str) -> RunInfo:
    """The run that `text` means: a name, its beginning or end where only one fits, a path, a URL, or `last`."""
    if is_url(text):
        from shoal.observe.mirror import fetch

        return _run_at(fetch(text, home))
    if os.sep in text or text in (".", ".."):
        return _run_at(text)
    runs = list_runs(home)
    if not runs and not read_run(text):
        raise UserError(
            f"There are no runs in {clean(os.path.join(home, 'runs'))}.",
            hint="start one with `shoal run SCRIPT`, or name a run folder by its path",
        )
    if text == "last":
        return runs[0]
    fitting = (
        [run for run in runs if run.name == text]
        or [run for run in runs if text and run.name.startswith(text)]
        or [run for run in runs if text and run.name.endswith(text)]
    )
    if len(fitting) == 1:
        return fitting[0]
    if not fitting and (here := read_run(text)):
        return here
    raise _not_one(text, fitting, runs)


def _run_at(path: str) -> RunInfo:
    run = read_run(path)
    if run is None:
        raise UserError(
            f"{clean(path)} is not a run folder.",
            why="it has no run.json that can be read" if os.path.isdir(path) else "there is no such folder",
            hint="`shoal ps` lists the runs there are",
        )
    return run


def _not_one(text: str, fitting: list[RunInfo], runs: list[RunInfo]) -> UserError:
    shown = ", ".join(clean(run.name) for run in (fitting or runs)[:5])
    more = len(fitting or runs) - 5
    names = shown + (f" and {more} more" if more > 0 else "")
    if fitting:
        return UserError(
            f"{len(fitting)} runs fit {clean(text)!r}.", why=names, hint="type more of the name, or use `last`"
        )
    return UserError(f"No run is called {clean(text)!r}.", why=f"the newest: {names}", hint="`shoal ps` lists all")
