"""Who a process is, so that another on the same host can find it and notice its end."""

import os
import platform
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shoal.comm import futex


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One worker as its peers see it. `started` tells it from a later process with the same pid.

    `boot` and `pid_namespace` are equal for two processes exactly when each can name the other by its pid.
    `device` is where its tensors are: "cpu" or "cuda".
    """

    pid: int
    started: int
    boot: str
    pid_namespace: int
    net_namespace: int
    host: str
    user: int
    device: str = "cpu"


def describe_self(device: str = "cpu") -> Process:
    """The facts of the calling process. Outside Linux there is no boot id, and nobody shares memory with it."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return Process(
        pid=os.getpid(),
        started=_read_stat(os.getpid())[1],
        boot=boot.read_text().strip() if boot.exists() else "",
        pid_namespace=_namespace("pid"),
        net_namespace=_namespace("net"),
        host=socket.gethostname(),
        user=os.getuid(),
        device=device,
    )


def _namespace(kind: str) -> int:
    path = Path(f"/proc/self/ns/{kind}")
    return path.stat().st_ino if path.exists() else 0


def is_running(process: Process) -> bool:
    """Whether a process of this host still runs. One that ended but was not yet reaped counts as ended."""
    state, started = _read_stat(process.pid)
    return state not in "ZX" and started == process.started


def _read_stat(pid: int) -> tuple[str, int]:
    """State and start time from `/proc/PID/stat`; ("X", 0) when there is no such process. About 20 µs."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name stands in brackets and may hold anything, brackets too; the facts follow the last one.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return "X", 0
    return fields[0].decode(), int(fields[19])


def on_one_host(processes: Sequence[Process]) -> bool:
    """Whether all of them run under one kernel and can name each other by pid."""
    first = processes[0]
    return bool(first.boot) and all((p.boot, p.pid_namespace) == (first.boot, first.pid_namespace) for p in processes)


def on_one_loopback(processes: Sequence[Process]) -> bool:
    """Whether all of them reach each other at 127.0.0.1."""
    first = processes[0]
    return bool(first.boot) and all((p.boot, p.net_namespace) == (first.boot, first.net_namespace) for p in processes)


def can_share(processes: Sequence[Process]) -> tuple[bool, str]:
    """Whether these processes can try to share memory; if not, why not."""
    first = processes[0]
    if not hasattr(os, "memfd_create") or not futex.is_available():
        return False, f"no shared memory for {platform.system()} on {platform.machine()}"
    for rank, process in enumerate(processes):
        if process.boot != first.boot or not process.boot:
            return False, f"rank {rank} runs on another host ({process.host}) than rank 0 ({first.host})"
        if process.pid_namespace != first.pid_namespace:
            return False, f"rank {rank} runs in another container than rank 0 (pid namespaces differ)"
    return True, ""


def encode(process: Process) -> str:
    return msgspec.json.encode(process).decode()


def decode(text: str) -> Process:
    return msgspec.json.decode(text, type=Process)
