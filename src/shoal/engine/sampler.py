"""What this machine and its workers are doing, from the files in which the kernel tells it."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.engine.machine import cgroups_of, free_memory_of
from shoal.spec.system import SystemSample, WorkerSample, throttled_seconds

SAMPLE_SECONDS = 1.0
MAX_THREADS = 64
"""Of a worker with more threads, only so many are asked how long they waited for a core."""
_DISK = re.compile(r"(sd[a-z]+|[vx]?vd[a-z]+|hd[a-z]+|nvme\d+n\d+|mmcblk\d+)")
_SECTOR_BYTES = 512
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCounts:
    """What has been counted on a machine since it was started. Times are seconds, the rest bytes."""

    cpu: float = 0.0
    swap_in: int = 0
    swap_out: int = 0
    disk_read: int = 0
    disk_write: int = 0
    net_in: int = 0
    net_out: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCounts:
    """What has been counted of one process since it began. `run_delay` is by thread: threads come and go."""

    pid: int
    cpu: float = 0.0
    rss: int = 0
    major_faults: int = 0
    throttled: float = 0.0
    run_delay: Mapping[str, float] = field(default_factory=dict)


class Sampler:
    """Samples this machine; each sample is about the time since the one before. About a millisecond each."""

    def __init__(self, node: str, root: str = "/") -> None:
        self._node, self._root = node, root
        self._at = 0.0
        self._machine = MachineCounts()
        self._workers: dict[int, WorkerCounts] = {}
        self._throttle_files: dict[int, list[str]] = {}

    def sample(self, pids: Mapping[int, int], folder: str, now: float, clock: float) -> SystemSample | None:
        """A sample at the time `now`, where `clock` is a clock that never jumps; None for the first, to compare with.

        `folder` is on the disk whose room counts.
        """
        machine = count_machine(self._root)
        workers = {rank: self._count(pid) for rank, pid in pids.items()}
        before, before_workers, seconds = self._machine, self._workers, clock - self._at
        is_first, self._at = self._at == 0.0, clock
        self._machine = machine
        self._workers = {rank: counts for rank, counts in workers.items() if counts is not None}
        self._throttle_files = {pid: files for pid, files in self._throttle_files.items() if pid in pids.values()}
        if is_first or seconds <= 0:
            return None
        total, free = _memory(self._root)
        disk_free, disk_total = _disk_room(folder)
        rates: dict[str, Any] = {
            name: _rate(getattr(before, name), getattr(machine, name), seconds) for name in _RATES
        }
        cores = os.cpu_count() or 1
        # Others may have had the core between a look at the clock and one at the counts.
        rates["cpu"] = min(rates["cpu"], cores)
        return SystemSample(
            time=now,
            node=self._node,
            cores=cores,
            **rates,
            memory_used=max(0, total - free),
            memory_total=total,
            disk_free=disk_free,
            disk_total=disk_total,
            workers={
                rank: compare(before_workers.get(rank), counts, seconds) for rank, counts in self._workers.items()
            },
        )

    def _count(self, pid: int) -> WorkerCounts | None:
        if pid not in self._throttle_files:
            self._throttle_files[pid] = [f"{folder}/cpu.stat" for folder in cgroups_of(self._root, pid, "cpu")]
        return count_worker(self._root, pid, self._throttle_files[pid])


_RATES = ("cpu", "swap_in", "swap_out", "disk_read", "disk_write", "net_in", "net_out")


def compare(before: WorkerCounts | None, now: WorkerCounts, seconds: float) -> WorkerSample:
    """What a worker did in so many seconds; of one that is new only its size is known."""
    if before is None or before.pid != now.pid:
        return WorkerSample(pid=now.pid, rss=now.rss)
    delay = sum(_rate(before.run_delay.get(thread, 0.0), value, seconds) for thread, value in now.run_delay.items())
    return WorkerSample(
        pid=now.pid,
        cpu=_rate(before.cpu, now.cpu, seconds),
        rss=now.rss,
        major_faults=_rate(before.major_faults, now.major_faults, seconds),
        throttled=min(1.0, _rate(before.throttled, now.throttled, seconds)),
        run_delay=round(delay, 4),
    )


def _rate(before: float, now: float, seconds: float) -> float:
    """By how much a counter grew in a second; a device that went away takes its counts with it."""
    return round(max(0.0, now - before) / seconds, 4)


def count_machine(root: str = "/") -> MachineCounts:
    """The machine's counters; what this kernel does not tell is zero."""
    swap = dict.fromkeys(("pswpin", "pswpout"), 0)
    for line in _read(f"{root}/proc/vmstat").splitlines():
        if line.startswith("pswp"):
            name, _, value = line.partition(" ")
            swap[name] = int(value)
    disk_read, disk_write = count_disks(_read(f"{root}/proc/diskstats"))
    text = _read(f"{root}/proc/net/dev")
    real = {name for name in _device_names(text) if os.path.exists(f"{root}/sys/class/net/{name}/device")}
    net_in, net_out = count_network(text, real)
    return MachineCounts(
        cpu=count_cpu(_read(f"{root}/proc/stat")),
        swap_in=swap["pswpin"] * _PAGE,
        swap_out=swap["pswpout"] * _PAGE,
        disk_read=disk_read,
        disk_write=disk_write,
        net_in=net_in,
        net_out=net_out,
    )


def count_cpu(text: str) -> float:
    """Seconds that cores were busy, from /proc/stat: all but idling and waiting for disks."""
    words = text.partition("\n")[0].split()
    ticks = [int(word) for word in words[1:9] if word.isdigit()]
    return (sum(ticks) - sum(ticks[3:5])) / _TICKS if words[:1] == ["cpu"] else 0.0


def count_disks(text: str) -> tuple[int, int]:
    """Bytes read and written, from /proc/diskstats: whole disks, not what is made of them."""
    rows = [line.split() for line in text.splitlines()]
    disks = [row for row in rows if len(row) > 9 and _DISK.fullmatch(row[2])]
    return sum(int(row[5]) for row in disks) * _SECTOR_BYTES, sum(int(row[9]) for row in disks) * _SECTOR_BYTES


def count_network(text: str, real: Iterable[str]) -> tuple[int, int]:
    """Bytes that came in and went out, from /proc/net/dev: of real devices, or, in a container, of what there is."""
    real = set(real)
    received = sent = 0
    for line in text.splitlines():
        name, colon, rest = line.partition(":")
        row = rest.split()
        if colon and len(row) > 8 and name.strip() != "lo" and (not real or name.strip() in real):
            received += int(row[0])
            sent += int(row[8])
    return received, sent


def _device_names(text: str) -> list[str]:
    return [line.partition(":")[0].strip() for line in text.splitlines() if ":" in line]


def count_worker(root: str, pid: int, throttle_files: Sequence[str] = ()) -> WorkerCounts | None:
    """The counters of one process, all its threads together; None where it is gone."""
    # The name of a process may hold spaces and brackets: what follows the last one is plain.
    words = _read(f"{root}/proc/{pid}/stat").rpartition(")")[2].split()
    if len(words) < 22:
        return None
    return WorkerCounts(
        pid=pid,
        cpu=(int(words[11]) + int(words[12])) / _TICKS,
        rss=int(words[21]) * _PAGE,
        major_faults=int(words[9]),
        throttled=max(((throttled_seconds(_read(path)) or 0.0) for path in throttle_files), default=0.0),
        run_delay=_run_delays(f"{root}/proc/{pid}/task"),
    )


def _run_delays(folder: str) -> dict[str, float]:
    """Seconds that each thread waited for a core, by its number."""
    try:
        threads = os.listdir(folder)[:MAX_THREADS]
    except OSError:
        return {}
    rows = {thread: _read(f"{folder}/{thread}/schedstat").split() for thread in threads}
    return {thread: int(row[1]) / 1e9 for thread, row in rows.items() if len(row) > 1}


def _memory(root: str) -> tuple[int, int]:
    """What there is and what is free of it: of the machine, or of the limit that somebody has set below that."""
    rows = dict(line.split(":", 1) for line in _read(f"{root}/proc/meminfo").splitlines() if ":" in line)
    total = int(rows.get("MemTotal", "0").split()[0]) * 1024
    free = int(rows.get("MemAvailable", "0").split()[0]) * 1024
    limit = free_memory_of(root)
    return limit if limit is not None and limit[0] < total else (total, free)


def _disk_room(folder: str) -> tuple[int, int]:
    try:
        facts = os.statvfs(folder)
    except OSError:
        return 0, 0
    return facts.f_bavail * facts.f_frsize, facts.f_blocks * facts.f_frsize


def _read(path: str) -> str:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read().decode("ascii", "replace")
    except OSError:
        return ""
