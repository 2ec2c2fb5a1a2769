"""Slow networks, full disks, power loss, little memory: made on one Linux machine, and removed with the block.

Each is a context manager and raises RigMissing where the machine lacks what it needs. Most need root.
"""

from shoal.testing.rigs.clocks import clock_jump
from shoal.testing.rigs.disks import PowerLossDisk, SmallDisk, power_loss_disk, small_disk
from shoal.testing.rigs.groups import ProcessGroup, cpu_limit, freezer, memory_limit
from shoal.testing.rigs.hosts import Hosts, hosts
from shoal.testing.rigs.leftovers import sweep
from shoal.testing.rigs.machine import RigMissing, needs, require
from shoal.testing.rigs.processes import failing_syscalls, freeze

__all__ = [
    "Hosts",
    "PowerLossDisk",
    "ProcessGroup",
    "RigMissing",
    "SmallDisk",
    "clock_jump",
    "cpu_limit",
    "failing_syscalls",
    "freeze",
    "freezer",
    "hosts",
    "memory_limit",
    "needs",
    "power_loss_disk",
    "require",
    "small_disk",
    "sweep",
]
