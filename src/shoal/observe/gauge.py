"""What the kernel knows about this process: how much it computed, what kept it from that, how fast its links are.

Read where the worker runs, a few times a second, from files that cost some ten microseconds each.
"""

import functools
import os
import resource
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from shoal.spec.system import throttled_seconds

LINKS_SECONDS = 0.5
MIN_LINK_BYTES = 1 << 16
"""Connections that have moved less say nothing about a link: they are for meeting, not for gradients."""
_TCP_INFO_BYTES = 232
_SMALL_BYTES = 1 << 14
_ESTABLISHED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What was sent to one address. `busy_seconds` is how long something was on its way and the peer had room."""

    to: str
    num_bytes: int
    busy_seconds: float
    rtt_seconds: float
    num_resent: int = 0

    @property
    def rate(self) -> float:
        """Bytes a second while there was something to send."""
        return self.num_bytes / max(self.busy_seconds, 1e-6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Strain:
    """One worker over some seconds: `cpu` that all its threads computed, `run_delay` that its training thread waited
    for a core, `throttled` that its control group was held back for its quota. Links are those that moved much.
    """

    seconds: float = 0.0
    cpu: float = 0.0
    run_delay: float = 0.0
    throttled: float = 0.0
    major_faults: int = 0
    links: tuple[Link, ...] = ()


@dataclass(slots=True)
class _Counts:
    time: float
    cpu: float
    run_delay: float
    throttled: float
    major_faults: int


@dataclass(slots=True)
class Gauge:
    """Reads what has passed since it last did. Where the kernel does not say something, that is 0."""

    _last: _Counts | None = None
    _links: dict[int, Link] = field(default_factory=dict)
    _links_at: float = float("-inf")

    def read(self, now: float) -> dict[str, Any]:
        """What a `progress` event says of it; `read_strain` reads that."""
        counts = _count(now)
        before, self._last = self._last or counts, counts
        told: dict[str, Any] = {
            "seconds": round(counts.time - before.time, 4),
            "cpu": round(counts.cpu - before.cpu, 4),
            "run_delay": round(counts.run_delay - before.run_delay, 4),
            "throttled": round(max(0.0, counts.throttled - before.throttled), 4),
            "major_faults": counts.major_faults - before.major_faults,
        }
        if now - self._links_at >= LINKS_SECONDS:
            self._links_at = now
            told["links"] = self._read_links()
        return told

    def _read_links(self) -> list[list[Any]]:
        found: dict[str, list[float]] = {}
        known, self._links = self._links, {}
        for inode, info in _connections():
            before, self._links[inode] = known.get(inode), info
            if before is None:
                continue
            sums = found.setdefault(info.to, [0.0, 0.0, 0.0, 0.0])
            sums[0] += info.num_bytes - before.num_bytes
            sums[1] += info.busy_seconds - before.busy_seconds
            sums[2] = max(sums[2], info.rtt_seconds)
            sums[3] += info.num_resent - before.num_resent
        return [
            [to, int(moved), round(busy, 6), round(rtt, 6), int(resent)]
            for to, (moved, busy, rtt, resent) in sorted(found.items())
            if moved >= MIN_LINK_BYTES
        ]


def read_strain(told: Any) -> Strain:
    """The strain that a worker told; of nothing, where it is something else."""
    if not isinstance(told, dict):
        return Strain()
    names = ("seconds", "cpu", "run_delay", "throttled", "major_faults")
    facts: dict[str, Any] = {name: told[name] for name in names if isinstance(told.get(name), int | float)}
    links = [row for row in told.get("links") or () if isinstance(row, list) and len(row) == 5]
    return Strain(
        **facts,
        links=tuple(
            Link(
                to=str(to),
                num_bytes=int(moved),
                busy_seconds=float(busy),
                rtt_seconds=float(rtt),
                num_resent=int(resent),
            )
            for to, moved, busy, rtt, resent in links
        ),
    )


def _count(now: float) -> _Counts:
    used = resource.getrusage(resource.RUSAGE_SELF)
    waited = _read("/proc/thread-self/schedstat").split()
    return _Counts(
        now,
        cpu=used.ru_utime + used.ru_stime,
        run_delay=int(waited[1]) / 1e9 if len(waited) > 1 else 0.0,
        throttled=_throttled(),
        major_faults=used.ru_majflt,
    )


def _throttled() -> float:
    """Of the innermost group that counts it: seconds that any of its threads was held back."""
    for folder in _cpu_groups(_read("/proc/self/cgroup")):
        if (seconds := throttled_seconds(_read(f"{folder}/cpu.stat"))) is not None:
            return seconds
    return 0.0


@functools.lru_cache(maxsize=4)
def _cpu_groups(text: str) -> tuple[str, ...]:
    """Where the groups of /proc/self/cgroup are. A process seldom changes them."""
    found: list[str] = []
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if "cpu" in names.split(","):
            found += (f"/sys/fs/cgroup/{mount}{path.rstrip('/')}" for mount in dict.fromkeys((names, "cpu")))
        elif not names:
            found += (f"/sys/fs/cgroup/{mount}{path.rstrip('/')}" for mount in ("", "unified"))
    return tuple(found)


def _connections() -> Iterator[tuple[int, Link]]:
    """Every TCP connection of this process by its number, and what it has moved since it began."""
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return
    for name in names:
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
            if not target.startswith("socket:["):
                continue
            with socket.socket(fileno=os.dup(int(name))) as other:
                if other.family not in (socket.AF_INET, socket.AF_INET6) or other.type != socket.SOCK_STREAM:
                    continue
                info = other.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
                to = str(other.getpeername()[0])
        except (OSError, ValueError):
            continue  # it was closed meanwhile, or is not connected
        if (link := _read_info(to, info)) is not None:
            yield int(target[8:-1]), link


def _read_info(to: str, info: bytes) -> Link | None:
    """From `struct tcp_info` of linux/tcp.h, as kernels since 4.10 fill it."""
    if len(info) < 192 or info[0] != _ESTABLISHED:
        return None
    (rtt,) = struct.unpack_from("I", info, 68)
    (resent,) = struct.unpack_from("I", info, 100)
    (acked,) = struct.unpack_from("Q", info, 120)
    busy, no_room, _ = struct.unpack_from("QQQ", info, 168)
    moving = max(0, busy - no_room) / 1e6
    return Link(to=to, num_bytes=acked, busy_seconds=moving, rtt_seconds=rtt / 1e6, num_resent=resent)


def _read(path: str) -> str:
    """A small file, without what `open` does for large ones: that takes longer than the kernel."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(fd, _SMALL_BYTES).decode("ascii", "replace")
    except OSError:
        return ""
    finally:
        os.close(fd)
