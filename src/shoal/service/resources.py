"""What this machine has, as placement sees it."""

import os
import re

from shoal.engine.machine import available_cores, free_memory_of
from shoal.place.cluster import Node


def here(folder: str = ".", root: str = "/") -> Node:
    """This machine: cores and memory as far as we may use them, GPUs that the driver lists, room on the disk."""
    gpus, kind = _gpus(root)
    try:
        room = os.statvfs(folder)
        disk_bytes = room.f_bavail * room.f_frsize
    except OSError:
        disk_bytes = 0
    limit = free_memory_of(root)
    memory_bytes = min(_memory_bytes(root), limit[0]) if limit else _memory_bytes(root)
    return Node(
        name=os.uname().nodename,
        kind=kind,
        cores=float(available_cores(root)),
        memory_bytes=memory_bytes,
        gpus=gpus,
        disk_bytes=disk_bytes,
    )


def _memory_bytes(root: str) -> int:
    try:
        with open(f"{root}/proc/meminfo", encoding="ascii") as file:
            found = re.search(r"MemTotal:\s+(\d+)", file.read())
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


def _gpus(root: str) -> tuple[int, str]:
    """How many GPUs there are, and what they are called. The driver's own list: asking its library takes a second."""
    folder = f"{root}/proc/driver/nvidia/gpus"
    try:
        names = sorted(os.listdir(folder))
        with open(f"{folder}/{names[0]}/information", encoding="utf-8", errors="replace") as file:
            found = re.search(r"Model:\s*(.+)", file.read())
    except (OSError, IndexError):
        return 0, "cpu"
    return len(names), re.sub(r"[^a-z0-9]+", "-", found[1].lower()).strip("-") if found else "gpu"
