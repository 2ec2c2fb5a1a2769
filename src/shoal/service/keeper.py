"""Sees one attempt at a job through: `python -m shoal.service.keeper FOLDER`, a process that outlives the service.

It takes the lock of the attempt and that of the job, claims the attempt for good, ends what is left of earlier ones,
starts `shoal run` within the limits of the job, and does what it is asked by files until that has ended. The launcher
holds both locks as well, and is told by the kernel to end if we are killed: the next attempt begins when
both are gone.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shoal.engine.clusters import boot_id
from shoal.engine.env import inherited_env, shoal_home
from shoal.engine.processes import open_pid_fd
from shoal.engine.requests import ask
from shoal.engine.seeds import Seed
from shoal.observe.lines import last_lines
from shoal.observe.ps import newest_failure
from shoal.service.cage import Cage, Limits, limit
from shoal.service.clock import mark_now
from shoal.service.folders import newest_token, read, take_lock, write, write_reserved
from shoal.service.launching import Launcher, adopt_orphans, bury_orphans, command_of, launch
from shoal.service.orders import CAUSE_OF, Orders, gpus_here, orders_of
from shoal.service.processes import MARK, children_of_all, descendants, kill_marked, memory_of, workers_of
from shoal.service.verdict import Facts, judge
from shoal.spec.amounts import gib
from shoal.spec.errors import UserError

LOOK_SECONDS = 0.05
WATCH_SECONDS = 0.5
"""How often the memory of the job is looked at."""
LATE_SECONDS = 5.0
"""What the processes of an earlier attempt get beyond their grace before they are killed."""


def main(folder: Path, seed: Seed | None = None) -> int:
    """See the attempt of a folder through, if it is ours. A `seed` becomes the launcher, else one is started."""
    value = read(folder / "orders.json")
    own = take_lock(folder) if value else None
    if own is None or (folder / "claimed.json").exists() or (folder / "ended.json").exists():
        return 0
    orders = orders_of(value)
    job = _take_job(folder, orders)
    if isinstance(job, str):
        _end(folder, {"cause": job, "message": "It was stopped before it began."})
        return 0
    write_reserved(folder / "claimed.json", {"pid": os.getpid()})
    _end(folder, Keeper(folder, orders, (own, job), seed).see_through())
    return 0


def _end(folder: Path, ended: dict[str, Any]) -> None:
    write_reserved(folder / "ended.json", ended | {"mark": asdict(mark_now(boot_id()))})


def _take_job(folder: Path, orders: Orders) -> int | str:
    """The lock of the job, or why this attempt never begins. Earlier ones end first, by force if they must."""
    patience = time.monotonic() + orders.grace_seconds + LATE_SECONDS
    while True:
        if newest_token(folder.parent) > orders.token:
            return "lost"
        if why := _asked(folder):
            return CAUSE_OF[why]
        lock = take_lock(folder.parent)
        if lock is not None:
            return lock
        if time.monotonic() > patience:
            kill_marked(_earlier(folder))
        time.sleep(LOOK_SECONDS)


def _asked(folder: Path) -> str:
    why = read(folder / "asked.json").get("why")
    return why if why in CAUSE_OF else ""


def _earlier(folder: Path) -> list[Path]:
    names = [name for name in os.listdir(folder.parent) if name.isdecimal() and name.isascii()]
    return [folder.parent / name for name in names if int(name) < int(folder.name)]


class Keeper:
    """One attempt that is ours."""

    def __init__(self, folder: Path, orders: Orders, locks: tuple[int, ...], seed: Seed | None = None) -> None:
        self._folder, self._orders, self._locks, self._seed = folder, orders, locks, seed
        self._env = {**inherited_env(), **orders.env, **_devices(orders), MARK: str(folder)}
        self._run_dir = Path(self._env.get("SHOAL_HOME") or shoal_home(), "runs", orders.run_name)
        self._status: dict[str, Any] = {"run_dir": str(self._run_dir), "num_workers": orders.num_workers}
        self._why = self._over = ""
        self._was_killed = False
        self._resized: dict[str, Any] = {"num_workers": orders.num_workers}
        self._peak_bytes = self._worker_peak_bytes = 0
        self._kills = 0
        self._boot = boot_id()

    def see_through(self) -> dict[str, Any]:
        """Returns what became of it, when nothing of it is left."""
        adopt_orphans()
        earlier = _earlier(self._folder)
        kill_marked(earlier)
        if why := _asked(self._folder):
            return {"cause": CAUSE_OF[why], "message": "It was stopped before it began."}
        has_begun = any((each / "claimed.json").exists() for each in earlier)
        goes_on = (self._orders.is_resumed or has_begun) and (self._run_dir / "run.json").exists()
        command = command_of(self._orders, self._run_dir, goes_on=goes_on)
        with limit(self._folder, self._limits()) as cage:
            self._status |= {"limits": cage.names, "started_at": time.time()}
            try:
                log = self._folder / "output.log"
                process = launch(command, self._orders, self._env, log, self._locks, cage.join, self._seed)
            except (OSError, subprocess.SubprocessError) as error:
                return self._status | {
                    "cause": "failed",
                    "exit_code": 1,
                    "message": f"It cannot be started: {error}.",
                }
            try:
                self._follow(process, cage)
            finally:
                self._finish(process, cage)
            return self._status | self._judge(process.returncode, cage)

    def _limits(self) -> Limits:
        orders = self._orders
        return Limits(memory_bytes=orders.memory_bytes, cores=orders.cores, num_workers=orders.num_workers)

    def _follow(self, process: Launcher, cage: Cage) -> None:
        """Do what is asked until the launcher has ended, or was told to and has had its time."""
        began = time.monotonic()
        watch_at, deadline = began, float("inf")
        self._status["pid"] = process.pid
        self._tell()
        with _ending(process.pid) as wait:
            while process.poll() is None and time.monotonic() < deadline:
                now = time.monotonic()
                if now >= watch_at:
                    watch_at = now + WATCH_SECONDS
                    self._watch(process.pid, cage)
                if self._over:
                    return
                if not self._why:
                    self._resize(cage)
                    self._why = self._reason(now - began)
                    if self._why:
                        process.send_signal(signal.SIGTERM)
                        deadline = now + self._orders.grace_seconds
                wait(LOOK_SECONDS)
        self._was_killed = process.poll() is None

    def _reason(self, seconds: float) -> str:
        """Why it should be stopped now, if it should."""
        most = self._orders.time_limit_seconds
        if most is not None and seconds > most:
            return "time"
        # A later attempt was ordered, so this one is over.
        return _asked(self._folder) or ("preempt" if newest_token(self._folder.parent) > self._orders.token else "")

    def _watch(self, launcher: int, cage: Cage) -> None:
        """See what memory the job has, and say how it goes."""
        bury_orphans(launcher)
        self._kills = cage.num_kills()
        children = children_of_all()
        sizes = {pid: memory_of(pid) for pid in descendants(os.getpid(), children) if pid != os.getpid()}
        workers = workers_of(launcher, children)
        self._over = self._over or self._find_over(sizes, workers, cage)
        used = sum(sizes.values())
        self._peak_bytes = max(self._peak_bytes, used)
        self._status |= {"memory_bytes": used, "peak_memory_bytes": self._peak_bytes}
        if len(workers) >= self._resized["num_workers"]:  # of workers on other machines nothing is known
            largest = max((sum(sizes.get(pid, 0) for pid in pids) for pids in workers.values()), default=0)
            self._worker_peak_bytes = max(self._worker_peak_bytes, largest)
            self._status["worker_peak_bytes"] = self._worker_peak_bytes
        self._tell()

    def _find_over(self, sizes: dict[int, int], workers: dict[int, list[int]], cage: Cage) -> str:
        most = cage.limits.memory_bytes
        if not most:
            return ""
        if self._kills:
            return f"its processes had {gib(cage.peak_bytes())}"
        for rank, pids in workers.items():
            if (used := sum(sizes.get(pid, 0) for pid in pids)) > most:
                return f"rank {rank} had {gib(used)}"
        total = sum(sizes.values())
        return f"its processes had {gib(total)}" if total > cage.limits.job_bytes else ""

    def _tell(self) -> None:
        with contextlib.suppress(OSError):  # nothing that was promised: the next may succeed
            write(self._folder / "status.json", self._status | {"mark": asdict(mark_now(self._boot))})

    def _resize(self, cage: Cage) -> None:
        """Hand a wish on to the launcher. One that does not listen yet is asked again; memory that is given back is
        taken away when the workers have gone."""
        wish = read(self._folder / "resize.json") or self._resized
        wanted = wish.get("num_workers")
        if not isinstance(wanted, int):
            return
        if wanted > cage.limits.num_workers:
            cage.fit(wanted)
        if wish != self._resized:
            try:
                ask(str(self._run_dir), {"verb": "resize", **wish})
            except UserError:
                return
            self._resized, self._status["num_workers"] = wish, wanted
        if wanted < cage.limits.num_workers and read(self._run_dir / "run.json").get("num_workers") == wanted:
            cage.fit(wanted)

    def _finish(self, process: Launcher, cage: Cage) -> None:
        """Nothing of the attempt is left when this returns."""
        if process.poll() is None:
            process.kill()
        process.wait()
        kill_marked([self._folder])
        self._kills = cage.num_kills()
        self._peak_bytes = max(self._peak_bytes, cage.peak_bytes() if self._kills else 0)
        self._status["peak_memory_bytes"] = self._peak_bytes

    def _judge(self, code: int, cage: Cage) -> dict[str, Any]:
        return judge(
            self._orders,
            Facts(
                code=code,
                why=self._why,
                was_killed=self._was_killed,
                over=self._over,
                num_kills=self._kills,
                peak_bytes=self._peak_bytes,
                is_watched="watchdog" in cage.names,
                failure=self._failure(),
            ),
        )

    def _failure(self) -> dict[str, Any]:
        """What the run says, or where it never was one, what the launcher said."""
        found = newest_failure(str(self._run_dir), since=self._status["started_at"])
        said = last_lines(str(self._folder / "output.log"), 5)[0].decode("utf-8", "replace").strip()
        return found or ({"message": said[-500:]} if said else {})


def _devices(orders: Orders) -> dict[str, str]:
    numbers = gpus_here(orders.devices)
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, numbers))} if numbers else {}


@contextlib.contextmanager
def _ending(pid: int) -> Iterator[Callable[[float], object]]:
    """A wait of so many seconds, cut short when the process ends."""
    fd = open_pid_fd(pid)
    try:
        yield time.sleep if fd < 0 else lambda seconds: select.select([fd], [], [], seconds)
    finally:
        if fd >= 0:
            os.close(fd)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
