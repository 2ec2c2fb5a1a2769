"""Sees one attempt of a job through: `python -m shoal.service.keeper FOLDER`, a process that outlives the service.

It takes the lock of the job, claims its token, starts `shoal run` within the limits of the job, and does what it is
asked by files until that has ended. The launcher holds the lock as well. If the keeper is killed the launcher is told
to end by the kernel, and only when both are gone can the next attempt begin; it first makes sure that no process of
an earlier one is left.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from shoal.engine.env import inherited_env, set_all, shoal_home
from shoal.engine.requests import ask
from shoal.service.attempts import (
    CLAIMED,
    ENDED,
    LOCK,
    RESIZE,
    STATUS,
    STOP,
    STOPS,
    TOKEN,
    Orders,
    read_orders,
    read_token,
    write_durably,
)
from shoal.service.isolate import Limits, Usage, left_behind, limit
from shoal.spec.errors import ShoalError, UserError

LOOK_SECONDS = 0.1
WATCH_SECONDS = 0.5
LOCK_SECONDS = 60.0
ATTEMPT = "SHOAL_ATTEMPT"
"""The variable by which all processes of an attempt can be found: JOB_FOLDER/TOKEN."""
_PR_SET_PDEATHSIG = 1


def main(folder: str) -> int:
    folder = os.path.abspath(folder)
    orders = read_orders(folder)
    if orders is None:
        return 2
    lock = take_lock(os.path.dirname(folder), orders.token)
    if lock is None or not claim(folder, orders):
        return 0
    try:
        ended = Keeper(folder, orders, lock).see_through()
    except ShoalError as error:
        ended = {"cause": "failed", "exit_code": error.exit_code, "message": f"{error.message} {error.why}".strip()}
    except OSError as error:
        ended = {"cause": "failed", "exit_code": 1, "message": f"it could not be started: {error}"}
    write_durably(os.path.join(folder, ENDED), ended)
    return 0


def take_lock(job_folder: str, token: int) -> int | None:
    """The lock of the job, or None where a later attempt has begun. Waits for an earlier one that is ending."""
    fd = os.open(os.path.join(job_folder, LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + LOCK_SECONDS
    while read_token(job_folder) <= token and time.monotonic() < deadline:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except BlockingIOError:
            time.sleep(0.02)
    os.close(fd)
    return None


def claim(folder: str, orders: Orders) -> bool:
    """Make this attempt ours, on disk, under the lock; False where it was claimed before or has been overtaken."""
    job_folder = os.path.dirname(folder)
    if read_token(job_folder) > orders.token or os.path.exists(os.path.join(folder, CLAIMED)):
        return False
    write_durably(os.path.join(job_folder, TOKEN), {"token": orders.token})
    write_durably(os.path.join(folder, CLAIMED), {"pid": os.getpid()})
    return True


class Keeper:
    """One attempt that is ours."""

    def __init__(self, folder: str, orders: Orders, lock: int) -> None:
        self._folder, self._orders, self._lock = folder, orders, lock
        self._run_dir = os.path.join(shoal_home(), "runs", orders.run_name)
        self._why_stopped = ""
        self._over = ""
        self._resized: object = None
        self._usage = Usage()
        self._facts: dict[str, Any] = {"max_workers": orders.max_workers, "num_workers": orders.num_workers}

    def see_through(self) -> dict[str, Any]:
        orders = self._orders
        self._end_former()
        if os.path.exists(self._path(STOP)):
            self._read_stop()
            return {"cause": STOPS[self._why_stopped], "message": "before it started"}
        set_all({ATTEMPT: self._folder})
        with limit(f"shoal-{orders.job}-{orders.token}", self._limits()) as cage:
            process = self._launch(cage.join)
            self._facts |= {"pid": process.pid, "run_dir": self._run_dir}
            try:
                self._follow(process, cage.use)
            finally:
                self._end(process)
            cage_kills = cage.num_kills()
        return {**self._facts, **self._verdict(process.returncode, cage_kills), "peak_bytes": self._usage.peak_bytes}

    def _limits(self) -> Limits:
        orders = self._orders
        return Limits(memory_bytes=orders.memory_bytes, cores=orders.cores, num_workers=orders.num_workers)

    def _launch(self, join: Callable[[], None]) -> subprocess.Popen[bytes]:
        orders = self._orders
        env = {**orders.env, **self._devices()}
        return subprocess.Popen(
            command_of(orders, self._run_dir),
            stdin=subprocess.DEVNULL,
            cwd=orders.cwd,
            env={**inherited_env(), **env},
            pass_fds=(self._lock,),
            start_new_session=True,
            # One thread, no locks held: safe. The launcher ends when we are killed, wherever we are then.
            preexec_fn=lambda: _enter(join),
        )

    def _devices(self) -> dict[str, str]:
        numbers = self._orders.devices.get(os.uname().nodename, ())
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, numbers))} if numbers else {}

    def _follow(self, process: subprocess.Popen[bytes], use: Callable[[int, Usage], Usage]) -> None:
        """Do what is asked until the launcher has ended, or was told to and has had its time."""
        began, watch_at, deadline = time.monotonic(), 0.0, None
        limit_seconds = self._orders.time_limit_seconds
        while process.poll() is None:
            now = time.monotonic()
            if now >= watch_at:
                watch_at = now + WATCH_SECONDS
                self._watch(process.pid, use)
            if not self._why_stopped:
                if limit_seconds is not None and now - began > limit_seconds:
                    self._why_stopped = "time"
                self._read_stop()
                self._read_resize()
                if self._why_stopped or self._over:
                    process.send_signal(signal.SIGKILL if self._over else signal.SIGTERM)
                    self._why_stopped = self._why_stopped or "memory"
                    deadline = now + self._orders.grace_seconds
            if deadline is not None and now > deadline:
                return
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_SECONDS)

    def _watch(self, pid: int, use: Callable[[int, Usage], Usage]) -> None:
        self._usage = use(pid, self._usage)
        self._over = self._over or self._usage.over
        self._facts |= {"memory_bytes": self._usage.memory_bytes, "peak_bytes": self._usage.peak_bytes}
        draft = self._path(STATUS) + ".new"
        with contextlib.suppress(OSError):  # nothing that was promised: the next one may succeed
            with open(draft, "w", encoding="utf-8") as file:
                json.dump(self._facts, file)
            os.replace(draft, self._path(STATUS))

    def _read_stop(self) -> None:
        found = _read_json(self._path(STOP))
        if found is not None:
            self._why_stopped = found["why"] if found.get("why") in STOPS else "cancel"

    def _read_resize(self) -> None:
        """Hand a wish on to the launcher; one that does not listen yet is asked again."""
        found = _read_json(self._path(RESIZE))
        if found is None or found == self._resized:
            return
        try:
            ask(self._run_dir, {"verb": "resize", "num_workers": int(found["num_workers"])})
        except UserError as error:
            if "cannot be asked" in error.message:
                return
            sys.stderr.write(error.render() + "\n")
        self._resized = found
        self._facts["num_workers"] = int(found["num_workers"])

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Nothing of the attempt is left when this returns."""
        if process.poll() is None:
            process.kill()
        process.wait()
        _kill_all(self._folder)

    def _end_former(self) -> None:
        """We have the lock, so former launchers are gone. What they started may still be on its way out."""
        job_folder = os.path.dirname(self._folder)
        for name in os.listdir(job_folder):
            if name.isdigit() and int(name) != self._orders.token:
                _kill_all(os.path.join(job_folder, name))

    def _verdict(self, code: int, cage_kills: int) -> dict[str, Any]:
        asked = _gib(self._orders.memory_bytes)
        if self._over or (cage_kills and code != 0):
            what = self._over or f"its workers took more than the {asked} each that job {self._orders.job} asked for"
            return {"cause": "oom", "exit_code": 137, "message": f"{what}; ask for more with `--memory`"}
        exit_code = code if code >= 0 else 128 - code
        if self._why_stopped and code != 0:
            return {"cause": STOPS[self._why_stopped], "exit_code": exit_code, "message": ""}
        if code == 0:
            return {"cause": "finished", "exit_code": 0, "message": ""}
        return {"cause": "failed", "exit_code": exit_code, "message": f"it ended with code {exit_code}"}

    def _path(self, name: str) -> str:
        return os.path.join(self._folder, name)


def command_of(orders: Orders, run_dir: str) -> list[str]:
    """The launcher's command line. A run that has a folder goes on in it; else it begins there. Pure but for a look."""
    is_elastic = orders.min_workers < orders.max_workers
    workers = f"{orders.min_workers}:{orders.max_workers}" if is_elastic else str(orders.num_workers)
    start = ["-o", f"engine.start={orders.num_workers}"] if is_elastic else []
    goes_on = orders.is_resumed and os.path.exists(os.path.join(run_dir, "run.json"))
    place = ["--resume", orders.run_name] if goes_on else ["--name", orders.run_name]
    return [sys.executable, "-m", "shoal", "run", "-n", workers, *start, *place, *orders.argv]


def _enter(join: Callable[[], None]) -> None:
    """The first thing a launcher does: into its limits, and to be told to end when its keeper does."""
    join()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _kill_all(folder: str, seconds: float = 10.0) -> None:
    """Kill every process of an attempt, and wait until none is left."""
    deadline = time.monotonic() + seconds
    while (pids := left_behind(f"{ATTEMPT}={folder}")) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _read_json(path: str) -> dict[str, Any] | None:
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
