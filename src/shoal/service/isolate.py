"""What a job may use: a control group where one can be made (version 1 or 2), and a look at its processes everywhere.

The kernel holds the job as a whole to its memory, so that whoever takes too much is killed and not a neighbour. The
look, twice a second, says which rank it was and by how much; where no control group can be made it is all there is.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shoal.engine.cgroups import Parent, find_parent

LAUNCHER_BYTES = 512 << 20
"""What a launcher and the helpers of a job may take beside its workers."""
_PERIOD_MICROSECONDS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """For each worker; zero is no limit."""

    memory_bytes: int = 0
    cores: float = 0.0
    num_workers: int = 1

    @property
    def job_bytes(self) -> int:
        return self.memory_bytes * self.num_workers + LAUNCHER_BYTES if self.memory_bytes else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a job has in use, had at most, and which worker is over its limit, in words."""

    memory_bytes: int = 0
    peak_bytes: int = 0
    over: str = ""


@dataclass(slots=True)
class Cage:
    """The control groups of one attempt, by controller; none where they cannot be made."""

    limits: Limits
    groups: dict[str, Parent] = field(default_factory=dict)

    def join(self) -> None:
        """Put the calling process into the groups: for a new process, before it runs anything."""
        for group in self.groups.values():
            with open(group.path / "cgroup.procs", "w", encoding="ascii") as file:
                file.write("0")

    def num_kills(self) -> int:
        """How many processes the kernel has killed here for lack of memory."""
        group = self.groups.get("memory")
        if group is None:
            return 0
        name = "memory.oom_control" if group.version == 1 else "memory.events"
        return _field(group.path / name, "oom_kill")

    def use(self, launcher: int, before: Usage) -> Usage:
        """Look at the launcher's processes. Memory that several share counts for each of them in part (PSS)."""
        sizes = {pid: _own_bytes(pid) for pid in descendants(launcher)}
        total = sum(sizes.values())
        over = before.over or self._over(sizes)
        return Usage(memory_bytes=total, peak_bytes=max(before.peak_bytes, total), over=over)

    def _over(self, sizes: Mapping[int, int]) -> str:
        allowed = self.limits.memory_bytes
        for pid, size in sizes.items():
            if allowed and size > allowed:
                rank = _rank_of(pid)
                who = "its launcher" if rank is None else f"rank {rank}"
                return f"{who} had {size / 2**30:.3g} GiB of memory, and {allowed / 2**30:.3g} GiB were asked for"
        return ""


@contextlib.contextmanager
def limit(name: str, limits: Limits) -> Iterator[Cage]:
    """Groups for one attempt, removed in the end with whatever is still in them."""
    cage = Cage(limits)
    try:
        for controller, settings in _settings(limits).items():
            group = _make(controller, name, settings)
            if group is not None:
                cage.groups[controller] = group
        yield cage
    finally:
        for group in cage.groups.values():
            _remove(group.path)


def _settings(limits: Limits) -> dict[str, Callable[[int], Mapping[str, str]]]:
    """Controller -> the files to write, given the version of control groups."""
    found: dict[str, Callable[[int], Mapping[str, str]]] = {}
    if limits.job_bytes:
        size = str(limits.job_bytes)
        first = {"memory.limit_in_bytes": size, "memory.memsw.limit_in_bytes": size}
        second = {"memory.max": size, "memory.swap.max": "0"}
        found["memory"] = lambda version: first if version == 1 else second
    if limits.cores:
        quota = str(max(1000, int(limits.cores * limits.num_workers * _PERIOD_MICROSECONDS)))
        period = str(_PERIOD_MICROSECONDS)
        old = {"cpu.cfs_period_us": period, "cpu.cfs_quota_us": quota}
        found["cpu"] = lambda version: old if version == 1 else {"cpu.max": f"{quota} {period}"}
    return found


def _make(controller: str, name: str, settings: Callable[[int], Mapping[str, str]]) -> Parent | None:
    parent = find_parent(controller)
    if parent is None:
        return None
    path = parent.path / name
    try:
        if path.exists():
            _remove(path)
        path.mkdir()
        for file, value in settings(parent.version).items():
            if (path / file).exists():  # swap is counted only by some kernels
                (path / file).write_text(value)
    except OSError:
        _remove(path)
        return None
    return Parent(path, parent.version)


def _remove(path: Path, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while path.exists() and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            for pid in (path / "cgroup.procs").read_text().split():
                os.kill(int(pid), signal.SIGKILL)
        try:
            path.rmdir()
        except OSError:
            time.sleep(0.01)


def descendants(root: int) -> list[int]:
    """A process and all that come from it, as /proc shows them now."""
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                stat = Path("/proc", name, "stat").read_bytes()
                parents.setdefault(int(stat.rpartition(b")")[2].split()[1]), []).append(int(name))
    found = [root]
    for pid in found:
        found += parents.get(pid, [])
    return found


def left_behind(mark: str) -> list[int]:
    """Processes with this variable in their environment, but for our own. Zombies have none."""
    wanted, found = mark.encode() + b"\0", []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError):
                environment = Path("/proc", name, "environ").read_bytes()
                if environment.startswith(wanted) or b"\0" + wanted in environment:
                    found.append(int(name))
    return found


def _own_bytes(pid: int) -> int:
    return 1024 * _field(Path("/proc", str(pid), "smaps_rollup"), "Pss:")


def _rank_of(pid: int) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for part in Path("/proc", str(pid), "environ").read_bytes().split(b"\0"):
            if part.startswith(b"RANK="):
                return int(part[5:])
    return None


def _field(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), 0)
