"""What holds a job to what it asked for: a control group where one can be made, limits of each process elsewhere.

In a group the kernel counts the job as a whole: when it takes too much, one of its own processes is killed, never one
of a neighbour. Where no group can be made, a process cannot have far more data than asked for, and the keeper looks
at what all of them have.
"""

import contextlib
import hashlib
import os
import resource
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from shoal.engine.cgroups import Parent, find_parent

LAUNCHER_BYTES = 512 << 20
"""What the launcher and the helpers of a job may take beside its workers."""
CONTROLLERS = ("memory", "cpu", "pids")
_PERIOD_MICROSECONDS = 100_000
_PROCESSES_A_WORKER = 2048
"""Threads count. A job that starts more is out of hand, and would keep others from starting any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What each worker may have, and how many there are. Zero is no limit."""

    memory_bytes: int = 0
    cores: float = 0.0
    num_workers: int = 1

    @property
    def job_bytes(self) -> int:
        return self.memory_bytes * self.num_workers + LAUNCHER_BYTES if self.memory_bytes else 0


def settings_of(controller: str, limits: Limits, version: int) -> dict[str, str]:
    """The files of a group and what is to be in them; nothing where there is no limit. Pure."""
    if controller == "memory" and limits.job_bytes:
        size = str(limits.job_bytes)
        if version == 1:
            return {"memory.limit_in_bytes": size, "memory.memsw.limit_in_bytes": size}
        return {"memory.max": size, "memory.swap.max": "0"}
    if controller == "cpu" and limits.cores:
        quota = str(max(1000, int(limits.cores * limits.num_workers * _PERIOD_MICROSECONDS)))
        if version == 1:
            return {"cpu.cfs_period_us": str(_PERIOD_MICROSECONDS), "cpu.cfs_quota_us": quota}
        return {"cpu.max": f"{quota} {_PERIOD_MICROSECONDS}"}
    if controller == "pids" and (limits.memory_bytes or limits.cores):
        return {"pids.max": str(_PROCESSES_A_WORKER * (limits.num_workers + 1))}
    return {}


@dataclass(slots=True)
class Cage:
    """The limits of one attempt that are in force."""

    limits: Limits
    groups: dict[str, Parent] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """What holds the job: controllers of the kernel, and `watchdog` where memory is only looked at."""
        is_watched = self.limits.memory_bytes and "memory" not in self.groups
        return (*self.groups, *(("watchdog",) if is_watched else ()))

    def join(self, pid: int = 0) -> None:
        """Put a process in, the calling one if no other is named: a new one, before it runs anything."""
        for path in {group.path for group in self.groups.values()}:
            with open(path / "cgroup.procs", "w", encoding="ascii") as file:
                file.write(str(pid))
        if self.limits.memory_bytes and "memory" not in self.groups:
            # Address space counts what is never used, such as stacks of threads: hence the room.
            most = 2 * self.limits.memory_bytes + (1 << 30)
            resource.prlimit(pid, resource.RLIMIT_DATA, (most, most))

    def fit(self, num_workers: int) -> bool:
        """Hold another number of workers; False where the job still has more memory than those may have."""
        limits = replace(self.limits, num_workers=num_workers)
        try:
            for controller, group in self.groups.items():
                is_more = limits.job_bytes > self.limits.job_bytes
                if controller == "memory" and not is_more and self.used_bytes() > limits.job_bytes:
                    return False
                _set(group, settings_of(controller, limits, group.version), is_more=is_more)
        except OSError:
            return False
        self.limits = limits
        return True

    def num_kills(self) -> int:
        """How many processes the kernel has killed here for lack of memory."""
        group = self.groups.get("memory")
        return (
            _field(group.path / ("memory.oom_control", "memory.events")[group.version - 1], "oom_kill")
            if group
            else 0
        )

    def used_bytes(self) -> int:
        return self._number("memory.usage_in_bytes", "memory.current")

    def peak_bytes(self) -> int:
        """The most that the job has had, caches of files included; 0 where the kernel does not count."""
        return self._number("memory.max_usage_in_bytes", "memory.peak")

    def _number(self, *names: str) -> int:
        group = self.groups.get("memory")
        if group is None:
            return 0
        with contextlib.suppress(OSError, ValueError):
            return int((group.path / names[group.version - 1]).read_text())
        return 0


@contextlib.contextmanager
def limit(folder: Path, limits: Limits) -> Iterator[Cage]:
    """Limits for the attempt of this folder, gone in the end with every process that they hold."""
    cage = Cage(limits)
    # Of the whole path: another service on this machine may count its jobs from 1 as well.
    name = f"shoal-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:24]}"
    try:
        for controller in CONTROLLERS:
            _add(cage, controller, name)
        yield cage
    finally:
        for group in cage.groups.values():
            _remove(group.path)


def _add(cage: Cage, controller: str, name: str) -> None:
    """Make a group where that is allowed; where it is not, the job does without."""
    parent = find_parent(controller) if settings_of(controller, cage.limits, 1) else None
    if parent is None:
        return
    group, others = Parent(parent.path / name, parent.version), list(cage.groups.values())
    # In version 2 a process is in one group, which has all controllers.
    if group.version == 2 and any(other.version == 2 and other != group for other in others):
        return
    try:
        group.path.mkdir(exist_ok=True)
        _set(group, settings_of(controller, cage.limits, group.version))
        cage.groups[controller] = group
    except OSError:
        if group not in others:
            _remove(group.path)


def _set(group: Parent, settings: dict[str, str], *, is_more: bool = False) -> None:
    """Memory with swap, the second, may never be less than memory alone: so it grows first."""
    for name in reversed(settings) if is_more else settings:
        if (group.path / name).exists():  # swap is counted only by some kernels
            (group.path / name).write_text(settings[name])


def _remove(path: Path, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while path.exists() and time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError):
            for pid in (path / "cgroup.procs").read_text().split():
                os.kill(int(pid), signal.SIGKILL)
        try:
            path.rmdir()
        except OSError:
            time.sleep(0.01)


def _field(path: Path, name: str) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            if line.split()[:1] == [name]:
                return int(line.split()[1])
    return 0
