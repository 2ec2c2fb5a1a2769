"""Attempts at jobs: have one run, look at it, stop it. All of it is in folders and locks, so that a service that was
killed at any moment finds everything again. Every function is quick, and may be called twice."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shoal.checkpoint.disk import make_folder
from shoal.engine.env import inherited_env
from shoal.observe.ps import newest_step
from shoal.observe.runs import is_held
from shoal.service.clock import Mark
from shoal.service.folders import attempt_folder, job_folder, newest_token, read, reserve, write
from shoal.service.orders import CAUSE_OF, CAUSES, Orders, Seen, Size
from shoal.service.processes import MARK
from shoal.service.resources import here
from shoal.spec.errors import UserError

__all__ = ["CAUSES", "Orders", "Seen", "here", "look", "resize", "start", "stop"]

Fork = Callable[[Path, Orders], bool]
START_SECONDS = 10.0
"""How long a keeper may take from its start to its lock, on a machine that is very busy."""
_DETACH_FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "detach.py")


def start(jobs_folder: str, orders: Orders, fork: Fork | None = None) -> None:
    """Have an attempt run. The same one twice runs once; one with a lower token than one seen before never runs.

    `fork` may make its keeper, a shorter way; it returns False where it did not, or not for sure. Returns when it has
    one, about 15 ms later. Raises UserError where the disk refuses.
    """
    folder = attempt_folder(jobs_folder, orders.job, orders.token)
    try:
        if newest_token(job_folder(jobs_folder, orders.job)) > orders.token:
            return
        make_folder(folder)
        if not (folder / "orders.json").exists():
            reserve(folder / "claimed.json")
            reserve(folder / "ended.json")
            write(folder / "orders.json", asdict(orders), is_durable=True)
        os.utime(folder / "orders.json")  # it was ordered now, if not for the first time
    except OSError as error:
        raise UserError(
            f"Job {orders.job} cannot be started.",
            why=f"{error.strerror or error}: {folder}",
            hint="make room on that disk, or let the service write there",
        ) from error
    if not (fork is not None and _needs_keeper(folder) and fork(folder, orders)):
        _have_kept(folder)


def look(jobs_folder: str, job: str, token: int) -> Seen:
    """What has become of an attempt so far."""
    folder = attempt_folder(jobs_folder, job, token)
    orders = read(folder / "orders.json")
    if not orders:
        return Seen()
    is_alive = is_held(str(folder))
    # In this order: a keeper that ends writes what became of it, and lets go of the lock then.
    status, ended = read(folder / "status.json"), read(folder / "ended.json")
    if ended:
        return _seen(orders, status | ended, "ended", is_alive=is_alive)
    if not (folder / "claimed.json").exists():
        return _seen(orders, status, "starting", is_alive=is_alive) if is_alive or _is_new(folder) else Seen()
    if not is_alive:
        told = {"cause": "lost", "message": f"The keeper of attempt {token} was killed, or its machine went down."}
        return _seen(orders, status | told, "ended", is_alive=False)
    return _seen(orders, status, "running" if status.get("pid") else "starting", is_alive=True)


def _is_new(folder: Path) -> bool:
    """Whether a keeper may still be on its way. One that has not come by now was killed before it began."""
    try:
        return time.time() - os.stat(folder / "orders.json").st_mtime < START_SECONDS
    except OSError:
        return False


def _seen(orders: dict[str, Any], told: dict[str, Any], state: str, *, is_alive: bool) -> Seen:
    run_dir = str(told.get("run_dir", ""))
    most = max(int(orders["max_workers"]), 1)
    step, loss = newest_step(run_dir, range(most)) if run_dir else (None, None)
    run = read(Path(run_dir, "run.json")) if run_dir and state == "running" else {}
    now = run.get("num_workers") if run.get("pid") == told.get("pid") else None  # not that of an earlier attempt
    names = (
        "pid",
        "run_dir",
        "exit_code",
        "cause",
        "message",
        "hint",
        "machine",
        "memory_bytes",
        "peak_memory_bytes",
        "worker_peak_bytes",
    )
    known = {name: told[name] for name in (*names, "started_at") if name in told}
    workers = now if isinstance(now, int) else int(told.get("num_workers", 0))
    limits = tuple(map(str, told.get("limits", ())))
    return Seen(
        state=state,
        is_alive=is_alive,
        num_workers=workers,
        step=step,
        loss=loss,
        limits=limits,
        mark=_mark_of(told.get("mark")),
        **known,
    )


def _mark_of(value: Any) -> Mark | None:
    try:
        return Mark(**value)
    except TypeError:  # none, or of another version
        return None


def stop(jobs_folder: str, job: str, token: int, why: str) -> None:
    """Have an attempt save a checkpoint and end: "cancel", "preempt" or "time". One that has not begun never will."""
    if why not in CAUSE_OF:
        raise UserError(f"{why!r} is no reason to stop a job.", hint=f"use one of: {', '.join(CAUSE_OF)}")
    folder = attempt_folder(jobs_folder, job, token)
    if not (folder / "orders.json").exists() or (folder / "ended.json").exists():
        return
    _tell(folder, "asked.json", {"why": why})
    _have_kept(folder)


def resize(jobs_folder: str, job: str, token: int, size: Size) -> None:
    """Have an elastic attempt go on with another number of workers, within its limits."""
    folder = attempt_folder(jobs_folder, job, token)
    orders = read(folder / "orders.json")
    if not orders or (folder / "ended.json").exists():
        return
    least, most = orders["min_workers"], orders["max_workers"]
    if not least <= size.num_workers <= most:
        raise UserError(
            f"Job {job} cannot have {size.num_workers} workers.",
            why=f"it asked for {least} to {most}",
            hint="ask for those",
        )
    _tell(folder, "resize.json", {name: value for name, value in asdict(size).items() if value})


def _tell(folder: Path, name: str, value: dict[str, Any]) -> None:
    try:
        write(folder / name, value)
    except OSError as error:
        raise UserError(
            "The keeper of a job cannot be told.", why=f"{error.strerror}: {folder}", hint="make room on that disk"
        ) from error


def _needs_keeper(folder: Path) -> bool:
    is_begun = (folder / "claimed.json").exists() or (folder / "ended.json").exists()
    return not is_begun and not is_held(str(folder))


def _have_kept(folder: Path) -> None:
    """Start a keeper, unless there is one or was one. Two may be started at once: only one takes the lock."""
    if not _needs_keeper(folder):
        return
    command = [sys.executable, "-P", "-m", "shoal.service.keeper", str(folder)]
    done = subprocess.run(
        [sys.executable, "-I", "-S", _DETACH_FILE, str(folder / "keeper.log"), *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**inherited_env(), MARK: str(folder)},
        check=False,
    )
    if done.returncode:
        raise UserError("No keeper could be started.", why=done.stderr.decode(errors="replace")[-300:])
