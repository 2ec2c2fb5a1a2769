"""Environment variables: the facts an engine gives its workers. Nothing else in shoal reads any."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.spec.errors import UserError
from shoal.spec.job import Job

LOCAL_ADDR = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What is the same for every worker of a run on this machine.

    `worker_ports` holds one port a worker, for frameworks in which every worker listens; else it is empty.
    `cores` is what all workers share. `min_workers` is None for a run that ends with the first failure; of an elastic
    one `num_workers` is the largest number, and stays the same for the whole run.
    """

    name: str
    dir: str
    num_workers: int
    master_port: int
    cores: int
    worker_ports: tuple[int, ...] = ()
    generation: int = 0
    min_workers: int | None = None
    is_resumed: bool = False
    has_tensorboard: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """Who this process is in a run. The defaults are those of a lone process, a run of one.

    `run_dir` and `control_fd` are None without a launcher. `is_resumed`: continue from the newest valid checkpoint.
    `is_measured`: end after a few steps and say how fast they were. `faults`: what is to go wrong on purpose, as JSON
    or as `@` and the path of a file with it.

    `is_elastic`: the number of workers may change while it runs, and `world_fd` is where the launcher says so, in
    lines of JSON; an end of file there means that it is gone. `incarnation` counts the processes that had this rank
    before; `rank` and `world_size` are then the worker's number and the largest number of workers.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    group_rank: int = 0
    num_nodes: int = 1
    master_addr: str = LOCAL_ADDR
    master_port: int = 0
    run_name: str | None = None
    run_dir: str | None = None
    control_fd: int | None = None
    world_fd: int | None = None
    generation: int = 0
    options: dict[str, str] = field(default_factory=dict)
    incarnation: int = 0
    is_elastic: bool = False
    is_resumed: bool = False
    is_measured: bool = False
    faults: str = ""


def read_worker(env: Mapping[str, str] | None = None) -> WorkerFacts:
    """Who this process is: from `shoal run`, from torchrun or anything that sets its variables, or alone.

    The channels to and from the launcher belong to the worker itself, never to processes it starts: they inherit the
    variables but not the descriptors, whose numbers may mean something else there.
    """
    env = os.environ if env is None else env
    has_channels = env.get("SHOAL_CONTROL_PID") == str(os.getpid())
    world_fd = _int(env, "SHOAL_WORLD_FD", -1) if has_channels and env.get("SHOAL_WORLD_FD") else None
    world_size = _int(env, "WORLD_SIZE", 1)
    local_world_size = _int(env, "LOCAL_WORLD_SIZE", world_size)
    return WorkerFacts(
        rank=_int(env, "RANK", 0),
        world_size=world_size,
        local_rank=_int(env, "LOCAL_RANK", _int(env, "RANK", 0) % max(1, local_world_size)),
        local_world_size=local_world_size,
        group_rank=_int(env, "GROUP_RANK", 0),
        num_nodes=_int(env, "GROUP_WORLD_SIZE", max(1, world_size // max(1, local_world_size))),
        master_addr=env.get("MASTER_ADDR", LOCAL_ADDR),
        master_port=_int(env, "MASTER_PORT", 0),
        run_name=env.get("SHOAL_RUN_NAME"),
        run_dir=env.get("SHOAL_RUN_DIR"),
        control_fd=_int(env, "SHOAL_CONTROL_FD", -1) if has_channels else None,
        world_fd=world_fd,
        generation=_int(env, "SHOAL_GENERATION", 0),
        options=_options(env.get("SHOAL_OPTIONS", "{}")),
        incarnation=_int(env, "SHOAL_INCARNATION", 0),
        is_elastic=world_fd is not None,
        is_resumed=env.get("SHOAL_RESUME") == "1",
        is_measured=env.get("SHOAL_MEASURE") == "1",
        faults=env.get("SHOAL_FAULTS", ""),
    )


def _int(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise UserError(
            f"The environment variable {name} is {text!r}, which is not a number.",
            why="a launcher sets it to say which worker this process is",
            hint=f"unset {name}, or start the script with `shoal run`",
        ) from None


def _options(text: str) -> dict[str, str]:
    try:
        options = json.loads(text)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise UserError(f"The environment variable SHOAL_OPTIONS is not a JSON object: {text[:80]!r}.")
    return {str(key): str(value) for key, value in options.items()}


def worker_env(
    job: Job, rank: int, run: RunFacts, inherited: Mapping[str, str], incarnation: int = 0
) -> dict[str, str]:
    """The whole environment of one worker.

    What the user set wins over our defaults, the facts of this run win over what an outer launcher left behind, and
    `--env` wins over everything.
    """
    env = {**inherited}
    for name, value in {**_defaults(), **_threads(job, run, {**inherited, **job.env})}.items():
        env.setdefault(name, value)
    if job.threads_per_worker:
        env |= _thread_variables(job.threads_per_worker)
    env |= _torchrun(rank, run) | _shoal(job, run) | {"SHOAL_INCARNATION": str(incarnation)}
    if job.framework == "tensorflow":
        env["TF_CONFIG"] = tf_config(rank, run.worker_ports)
    return {**env, **job.env}


def task_env(job: Job, worker: int, run: RunFacts, inherited: Mapping[str, str], incarnation: int) -> dict[str, str]:
    """The whole environment of a worker of `shoal.map`.

    It is on its own: nothing in it tells of a group that it could meet, and a Trainer in it is a run of one. Only
    SHOAL_WORKER says which worker it is.
    """
    env = worker_env(job, worker, run, inherited, incarnation)
    for name in {*_torchrun(worker, run), *_shoal(job, run), "TF_CONFIG"} - {*job.env}:
        env.pop(name, None)
    return {"SHOAL_WORKER": str(worker), **env}


def _defaults() -> dict[str, str]:
    return {
        "PYTHONUNBUFFERED": "1",
        # All workers are on this host. Without it gloo resolves the host's name, which may lead nowhere.
        "GLOO_SOCKET_IFNAME": "lo",
        "TP_SOCKET_IFNAME": "lo",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        # Activations are freed and taken again in every step. Left alone, glibc gives their pages back to the system
        # each time, and taking them again cost a CNN a tenth of its step in page faults. 32 MiB is glibc's limit.
        "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
        "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    }


def _threads(job: Job, run: RunFacts, set_by_user: Mapping[str, str]) -> dict[str, str]:
    # A user who set OMP_NUM_THREADS has MKL follow it, as without a launcher.
    if "OMP_NUM_THREADS" in set_by_user:
        return {}
    return _thread_variables(max(1, run.cores // run.num_workers))


def _thread_variables(num_threads: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(num_threads), "MKL_NUM_THREADS": str(num_threads)}


def _torchrun(rank: int, run: RunFacts) -> dict[str, str]:
    facts: dict[str, Any] = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GROUP_RANK": 0,
        "ROLE_RANK": rank,
        "ROLE_NAME": "default",
        "WORLD_SIZE": run.num_workers,
        "LOCAL_WORLD_SIZE": run.num_workers,
        "GROUP_WORLD_SIZE": 1,
        "ROLE_WORLD_SIZE": run.num_workers,
        "MASTER_ADDR": LOCAL_ADDR,
        "MASTER_PORT": run.master_port,
        "TORCHELASTIC_RUN_ID": run.name,
        "TORCHELASTIC_RESTART_COUNT": run.generation,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        # Rank 0 hosts the store, as it does under plain `torch.distributed`.
        "TORCHELASTIC_USE_AGENT_STORE": False,
        "TORCHELASTIC_ERROR_FILE": os.path.join(run.dir, "logs", f"{rank}.error.json"),
    }
    return {name: str(value) for name, value in facts.items()}


def _shoal(job: Job, run: RunFacts) -> dict[str, str]:
    return {
        "SHOAL_RUN_NAME": run.name,
        "SHOAL_RUN_DIR": run.dir,
        "SHOAL_GENERATION": str(run.generation),
        "SHOAL_OPTIONS": json.dumps(dict(job.options)),
        "SHOAL_RESUME": "1" if run.is_resumed else "0",
    }


def tf_config(rank: int, worker_ports: tuple[int, ...]) -> str:
    """The value of TF_CONFIG: every worker's address, and which of them this one is."""
    addresses = [f"{LOCAL_ADDR}:{port}" for port in worker_ports]
    return json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}})


def inherited_env() -> dict[str, str]:
    """The environment of this process, for workers to build on."""
    return dict(os.environ)


def shoal_home() -> str:
    """The folder for runs and settings: SHOAL_HOME, or `~/.shoal`."""
    return os.path.abspath(os.environ.get("SHOAL_HOME") or os.path.join(os.path.expanduser("~"), ".shoal"))


def is_loading_call() -> bool:
    """Whether this process is a worker of `shoal.launch` that has not reached its function yet."""
    return os.environ.get("SHOAL_LOADING_CALL") == str(os.getpid())
