"""What a keeper is told to run, and what is seen of it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from shoal.place.cluster import Allocation, Devices
from shoal.service.clock import Mark

CAUSES = ("finished", "failed", "out_of_memory", "cancelled", "preempted", "time_limit", "lost")
"""Why an attempt ended."""

CAUSE_OF = {"cancel": "cancelled", "preempt": "preempted", "time": "time_limit"}
"""What becomes of an attempt that was stopped for a reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """One attempt at a job. Of two attempts the one with the larger `token` is the later one, and the former is over.

    `argv` are arguments of `shoal run`, with the script, and without `-n`. `env` lies over the environment of the
    service. With `is_resumed` the run goes on from its newest checkpoint, if there is one. `allocation` says how many
    workers are on which node, `devices` which GPUs they have there. `memory_bytes` and `cores` are those of each
    worker; 0 is no limit. `grace_seconds` is what the run gets to save and end in.
    """

    job: str
    token: int
    argv: tuple[str, ...]
    cwd: str
    env: Mapping[str, str] = field(default_factory=dict)
    run_name: str
    is_resumed: bool = False
    min_workers: int = 1
    max_workers: int = 1
    num_workers: int = 1
    allocation: Allocation = field(default_factory=dict)
    devices: Devices = field(default_factory=dict)
    memory_bytes: int = 0
    cores: float = 0.0
    time_limit_seconds: float | None = None
    grace_seconds: float = 10.0


def gpus_here(devices: Devices) -> tuple[int, ...]:
    """Those on this machine, in the order of the workers that have them."""
    return tuple(devices.get(os.uname().nodename, ()))


def orders_of(value: Mapping[str, Any]) -> Orders:
    """Orders that were kept as JSON. Raises KeyError or TypeError where that is not what it is."""
    known = {each.name: value[each.name] for each in fields(Orders)}
    devices = {str(node): tuple(numbers) for node, numbers in known["devices"].items()}
    return Orders(**known | {"argv": tuple(known["argv"]), "devices": devices})


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What an elastic attempt is to have from now on.

    On a cluster `nodes` says how many workers are to be at which address. `gpus` are those of its workers on this
    machine, in their order; empty where it has none.
    """

    num_workers: int
    nodes: Mapping[str, int] = field(default_factory=dict)
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """An attempt as its folder and its lock tell.

    `state` is absent, starting, running or ended. `is_alive`: its keeper runs, or its launcher still does. One whose
    keeper was killed before it began is absent again: order it once more. `cause` is one of CAUSES once it has ended,
    `machine` what it was lost with.
    `memory_bytes` is what its processes use now on this machine, `peak_memory_bytes` the most that was seen, and
    `worker_peak_bytes` the most that one worker had, where all are on this machine. `limits` names what holds its
    processes: `memory`, `cpu`, `pids` by the kernel, `watchdog` by looks at them. `mark` is when its keeper said so:
    when the attempt ended, or where its keeper was killed, when that last gave a sign.
    """

    state: str = "absent"
    is_alive: bool = False
    pid: int | None = None
    run_dir: str = ""
    exit_code: int | None = None
    cause: str = ""
    message: str = ""
    hint: str = ""
    machine: str = ""
    num_workers: int = 0
    step: int | None = None
    loss: float | None = None
    memory_bytes: int = 0
    peak_memory_bytes: int = 0
    worker_peak_bytes: int = 0
    started_at: float | None = None
    mark: Mark | None = None
    limits: tuple[str, ...] = ()
