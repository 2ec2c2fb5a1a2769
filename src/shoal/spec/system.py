"""What a machine and its workers were doing, as it is sampled once a second."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSample:
    """One worker's process since the sample before.

    cpu: cores it kept busy. rss: memory in use, in bytes. major_faults: pages read back from disk, a second.
    throttled: the part of the time in which a quota kept it from running, 0 to 1. run_delay: seconds a second that
    its threads were ready and waited for a core, added up over the threads.
    """

    pid: int
    cpu: float = 0.0
    rss: int = 0
    major_faults: float = 0.0
    throttled: float = 0.0
    run_delay: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemSample:
    """One machine since the sample before, with the workers on it by rank.

    `cpu` is how many of its `cores` were busy. Sizes are bytes, rates bytes a second. The disk whose room is told is
    that of the run folder; what is read and written is that of all disks together, and net that of all devices but
    loopback. Of long ago, `num_samples` are merged into one: rates are means, memory the most and room the least of
    them.
    """

    time: float
    node: str
    cores: int
    cpu: float = 0.0
    memory_used: int = 0
    memory_total: int = 0
    swap_in: float = 0.0
    swap_out: float = 0.0
    disk_free: int = 0
    disk_total: int = 0
    disk_read: float = 0.0
    disk_write: float = 0.0
    net_in: float = 0.0
    net_out: float = 0.0
    workers: Mapping[int, WorkerSample] = field(default_factory=dict)
    num_samples: int = 1


def throttled_seconds(text: str) -> float | None:
    """How long a quota kept a cgroup from running, from cpu.stat of version 1 or 2; None where it does not say."""
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == "throttled_usec":
            return int(value) / 1e6
        if name == "throttled_time":
            return int(value) / 1e9
    return None
