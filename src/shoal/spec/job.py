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
class Seat:
    """Where a worker is to run, and who else of its run is there.

    `address` is where other machines reach this one, `interface` the network device that has it. Two ports are kept
    free for the worker there: `store_port` for a store that rank 0 hosts, `worker_port` for frameworks in which every
    worker listens. `local_rank` tells the workers of a machine apart, of which there are `num_local`. `gpus` are
    those that the worker is to see, where not all of the machine's: its own stands at its local rank.
    """

    node: str = ""
    address: str = "127.0.0.1"
    interface: str = "lo"
    store_port: int = 0
    worker_port: int = 0
    local_rank: int = 0
    num_local: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    cores: int = 1
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """One process an engine is to start. The entry point is text, so that engines know nothing of training.

    `env` is all that its environment has. With `defaults` it is laid over the environment that its machine has for
    such processes, and that over the defaults. `call` is what a worker reads that is to call a function.
    """

    rank: int
    command: tuple[str, ...]
    env: Mapping[str, str]
    working_dir: str
    log_path: str
    log_limit_bytes: int | None = None
    defaults: Mapping[str, str] | None = None
    call: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExit:
    """What became of a worker. `code` is its exit status; a death by signal N is -N, as in `subprocess`.

    `result` is what one that was to call a function wrote before it ended well. `machine` names the machine with
    which it was lost, if it was.
    """

    rank: int
    code: int
    time: float
    result: bytes | None = field(default=None, repr=False)
    machine: str = ""
