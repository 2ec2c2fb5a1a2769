"""What this machine lets us use: cores and memory, as limited by affinity and by cgroups (v1 and v2)."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shoal.spec.errors import UserError

_UNLIMITED = 1 << 60
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemoryKills:
    """How often the kernel killed a process for lack of memory: in this cgroup, and on the whole machine."""

    cgroup: int = 0
    machine: int = 0


def interfaces() -> dict[str, str]:
    """The IPv4 addresses of this machine but loopback, each with its network device."""
    import fcntl
    import socket
    import struct

    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # a device without an address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[socket.inet_ntoa(answer[20:24])] = name
    return {address: name for address, name in found.items() if not address.startswith("127.")}


def route_to(host: str) -> str:
    """The address at which `host` sees this machine. Nothing is sent: connecting a datagram socket is enough."""
    import socket

    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UserError(
            f"There is no way to the host {host!r}.", why=error.strerror or str(error), hint="check its name"
        ) from error


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


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeMemory:
    """How much more can be used before something is killed or refused, and what says so.

    `limited_by` is "machine" where that is only the memory there is, else "cgroup" or "ulimit": a limit that
    somebody has set.
    """

    num_bytes: int
    limited_by: str


def available_memory_bytes(root: str = "/") -> int | None:
    """Memory that can still be used before something is killed, or None where nobody says."""
    free = _free_memory(root)
    return min(each.num_bytes for each in free) if free else None


def free_memory(
    num_sharing: int, root: str = "/", rlimits: Sequence[tuple[str, int]] | None = None
) -> FreeMemory | None:
    """What this process may still take, as one of so many on this machine that take equally much.

    None where nobody says. `rlimits` are measured where they are not given: fields of /proc/self/status with the most
    that they may be.
    """
    free = [
        FreeMemory(num_bytes=each.num_bytes // num_sharing, limited_by=each.limited_by) for each in _free_memory(root)
    ]
    used = _fields(f"{root}/proc/self/status")
    for name, limit in _rlimits() if rlimits is None else rlimits:
        if name in used:
            free.append(FreeMemory(num_bytes=max(0, limit - used[name] * 1024), limited_by="ulimit"))
    return min(free, key=lambda each: each.num_bytes) if free else None


def _rlimits() -> list[tuple[str, int]]:
    import resource

    kinds = (("VmSize:", resource.RLIMIT_AS), ("VmData:", resource.RLIMIT_DATA))
    limits = [(name, resource.getrlimit(kind)[0]) for name, kind in kinds]
    return [(name, limit) for name, limit in limits if limit != resource.RLIM_INFINITY]


def _free_memory(root: str) -> list[FreeMemory]:
    free = [("machine", _mem_available(root))]
    for folder in _cgroups(root, "memory"):
        free.append(("cgroup", _free_in(folder, "memory.max", "memory.current", "inactive_file")))
        usage = "memory.usage_in_bytes"
        free.append(("cgroup", _free_in(folder, "memory.limit_in_bytes", usage, "total_inactive_file")))
    return [FreeMemory(num_bytes=max(0, value), limited_by=name) for name, value in free if value is not None]


def used_memory_bytes(root: str = "/") -> int:
    """The memory that this process has in use (resident), what it shares with others included; 0 where unknown."""
    return _fields(f"{root}/proc/self/status").get("VmRSS:", 0) * 1024


def peak_memory_bytes(root: str = "/") -> int:
    """The most that this process had in use since `forget_peak`, or since it began where that is not allowed."""
    return _fields(f"{root}/proc/self/status").get("VmHWM:", 0) * 1024


def forget_peak() -> None:
    """Let `peak_memory_bytes` begin anew. About 20 µs."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


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


def free_memory_of(root: str = "/") -> tuple[int, int] | None:
    """The tightest limit of memory that somebody has set for this process, and what is free of it."""
    found = []
    for folder in _cgroups(root, "memory"):
        for limit, *rest in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            free = _free_in(folder, limit, *rest)
            if free is not None:
                found.append((int(_read(f"{folder}/{limit}")), max(0, free)))
    return min(found, default=None)


def out_of_memory_kills(root: str = "/") -> OutOfMemoryKills:
    """Counters to compare before and after a worker was killed."""
    counts = [0]
    for folder in _cgroups(root, "memory"):
        counts.append(_fields(f"{folder}/memory.events").get("oom_kill", 0))
        counts.append(_fields(f"{folder}/memory.oom_control").get("oom_kill", 0))
    return OutOfMemoryKills(cgroup=max(counts), machine=_fields(f"{root}/proc/vmstat").get("oom_kill", 0))


def _cgroups(root: str, controller: str) -> Iterator[str]:
    return cgroups_of(root, "self", controller)


def cgroups_of(root: str, pid: int | str, controller: str) -> Iterator[str]:
    """Folders of the cgroups a process is in, innermost first, then their parents: any of them may set a limit.

    Inside a container the path in /proc may name folders of the host that are not visible; those read as empty.
    """
    for line in _read(f"{root}/proc/{pid}/cgroup").splitlines():
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
