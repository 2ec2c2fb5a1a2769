"""The processes of an attempt, as /proc shows them: who they are, what memory they have, and how to end them.

Each carries a variable that names its attempt, so that it is found wherever it has gone: out of its group, its
session, or from under its parent.
"""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

MARK = "SHOAL_ATTEMPT"
"""The variable by which processes of an attempt are found. Its value is the attempt's folder."""


def marked(folders: Iterable[Path]) -> list[int]:
    """Processes of these attempts, but for our own. One look at all of /proc; zombies are not among them."""
    wanted = {f"{MARK}={folder}".encode() for folder in folders}
    found = []
    for name in os.listdir("/proc") if wanted else ():
        if name.isdecimal() and int(name) != os.getpid():
            with contextlib.suppress(OSError):  # it has just ended, or is not ours to look at
                if wanted & set(Path("/proc", name, "environ").read_bytes().split(b"\0")):
                    found.append(int(name))
    return found


def kill_marked(folders: Iterable[Path], seconds: float = 10.0) -> int:
    """Kill the processes of these attempts; returns how many are left, which is none unless the kernel keeps them."""
    folders, deadline = list(folders), time.monotonic() + seconds
    while pids := marked(folders):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return len(pids)
        time.sleep(0.01)
    return 0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a variable stands in what this process began with, which is what /proc shows of it for ever."""

    address: int
    num_bytes: int


def find_variable(name: str) -> Place | None:
    """Where a variable of this process stands; None where the system does not tell."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        start = int(Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[47])
        block = b"\0" + Path("/proc/self/environ").read_bytes()
        at = block.index(f"\0{name}=".encode())
        return Place(start + at, block.index(b"\0", at + 1) - at - 1) if start else None
    return None


def show_variables(place: Place, values: Mapping[str, str]) -> None:
    """Have /proc show these in this place, for who was forked and not started. They must have room there."""
    data = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in values.items())
    if len(data) > place.num_bytes:
        raise ValueError(f"no room for {len(data)} bytes in {place.num_bytes}")
    ctypes.memmove(place.address, data.ljust(place.num_bytes, b"\0"), place.num_bytes)


def children_of_all() -> dict[int, list[int]]:
    """Who has started whom, for all processes that there are."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError, IndexError, ValueError):
                # The name before the last parenthesis may contain anything.
                fields = Path("/proc", name, "stat").read_bytes().rpartition(b")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(name))
    return children


def descendants(root: int, children: Mapping[int, list[int]]) -> list[int]:
    """A process and all that come from it."""
    found = [root]
    for pid in found:
        found += children.get(pid, ())
    return found


def workers_of(launcher: int, children: Mapping[int, list[int]]) -> dict[int, list[int]]:
    """Rank -> the worker's process and what it has started."""
    found: dict[int, list[int]] = {}
    for pid in children.get(launcher, ()):
        rank = _rank_of(pid)
        if rank is not None:
            found.setdefault(rank, []).extend(descendants(pid, children))
    return found


def memory_of(pid: int) -> int:
    """The memory of a process in bytes. What it shares with others counts in part (PSS), so that sums are true."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc", str(pid), "smaps_rollup").read_bytes().splitlines():
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def _rank_of(pid: int) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for part in Path("/proc", str(pid), "environ").read_bytes().split(b"\0"):
            if part.startswith(b"RANK="):
                return int(part[5:])
    return None
