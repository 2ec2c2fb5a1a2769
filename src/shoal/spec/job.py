"""What a user asked for, and what an engine is told to start."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One piece of work as it was asked for. Exactly one of `script` and `module` is set.

    `num_workers` None means auto: measure, then choose. `threads_per_worker` None means: what fits the cores.
    `min_workers` None means: any failure ends the run. With a number the run is elastic: it starts `num_workers`,
    workers that are lost are replaced, and it goes on while at least `min_workers` are there.
    """

    script: str | None = None
    module: str | None = None
    args: tuple[str, ...] = ()
    num_workers: int | None = 1
    min_workers: int | None = None
    threads_per_worker: int | None = None
    python: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    framework: str = "torch"
    options: Mapping[str, str] = field(default_factory=dict)
    working_dir: str = "."


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """One process an engine is to start. The entry point is text, so that engines know nothing of training."""

    rank: int
    command: tuple[str, ...]
    env: Mapping[str, str]
    working_dir: str
    log_path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExit:
    """What became of a worker. `code` is its exit status; a death by signal N is -N, as in `subprocess`."""

    rank: int
    code: int
    time: float
