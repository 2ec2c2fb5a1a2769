"""What this machine lets us use: cores and memory, as limited by affinity and by cgroups (v1 and v2)."""

import os
from collections.abc import Iterator
from dataclasses import dataclass

_UNLIMITED = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemoryKills:
    """How often the kernel killed a process for lack of memory: in this cgroup, and on the whole machine."""

    cgroup: int = 0
    machine: int = 0


def available_cores(root: str = "/", affinity: int | None = None) -> int:
    """Cores that this process may keep busy, at least 1; a quota of 2.5 cores counts as 2."""
    cores = float(affinity or _affinity())
    for folder in _cgroups(root, "cpu"):
        cores = min(cores, _quota_v2(folder), _quota_v1(folder))
    return max(1, int(cores))


def _affinity() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _quota_v2(folder: str) -> float:
    quota, _, period = _read(f"{folder}/cpu.max").partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else _UNLIMITED


def _quota_v1(folder: str) -> float:
    quota, period = _read(f"{folder}/cpu.cfs_quota_us"), _read(f"{folder}/cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else _UNLIMITED


def available_memory_bytes(root: str = "/") -> int | None:
    """Memory that can still be used before something is killed, or None where nobody says."""
    free = [_mem_available(root)]
    for folder in _cgroups(root, "memory"):
        free.append(_free_in(folder, "memory.max", "memory.current", "inactive_file"))
        free.append(_free_in(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"))
    known = [value for value in free if value is not None]
    return max(0, min(known)) if known else None


def _mem_available(root: str) -> int | None:
    kib = _fields(f"{root}/proc/meminfo").get("MemAvailable:")
    return kib * 1024 if kib is not None else None


def _free_in(folder: str, limit_name: str, usage_name: str, cache_name: str) -> int | None:
    limit, usage = _read(f"{folder}/{limit_name}"), _read(f"{folder}/{usage_name}")
    if not limit.isdigit() or not usage.isdigit() or int(limit) >= _UNLIMITED:
        return None
    # File cache that nobody touched lately is given back before anything is killed.
    cache = _fields(f"{folder}/memory.stat").get(cache_name, 0)
    return int(limit) - int(usage) + cache


def out_of_memory_kills(root: str = "/") -> OutOfMemoryKills:
    """Counters to compare before and after a worker was killed."""
    counts = [0]
    for folder in _cgroups(root, "memory"):
        counts.append(_fields(f"{folder}/memory.events").get("oom_kill", 0))
        counts.append(_fields(f"{folder}/memory.oom_control").get("oom_kill", 0))
    return OutOfMemoryKills(cgroup=max(counts), machine=_fields(f"{root}/proc/vmstat").get("oom_kill", 0))


def _cgroups(root: str, controller: str) -> Iterator[str]:
    """Folders of the cgroups this process is in, innermost first, then their parents: any of them may set a limit.

    Inside a container the path in /proc may name folders of the host that are not visible; those read as empty.
    """
    for line in _read(f"{root}/proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        mounts = (controllers, controller) if controllers else ("", "unified")
        for mount in dict.fromkeys(mounts):
            base = os.path.join(root, "sys/fs/cgroup", mount)
            if os.path.isdir(base):
                yield from _upwards(base, path.strip("/"))


def _upwards(base: str, path: str) -> Iterator[str]:
    while path:
        yield os.path.join(base, path)
        path = os.path.dirname(path)
    yield base


def _fields(path: str) -> dict[str, int]:
    rows = (line.split() for line in _read(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdigit()}


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""
