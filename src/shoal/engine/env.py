"""Environment variables: the facts an engine gives its workers. Nothing else in shoal reads any."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.spec.errors import UserError
from shoal.spec.job import Job, Seat

AGENT = "SHOAL_AGENT"
"""Set where the process that started a worker is not the launcher, but its hand on a machine."""
LOCAL_ADDR = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What is the same for every worker of a run.

    Rank 0 hosts its store at `master_addr` and `master_port`. `worker_addresses` holds one `host:port` a worker, for
    frameworks in which every worker listens. `min_workers` is None for a run that ends with the first failure; of an
    elastic one `num_workers` is the largest number, and stays the same for the whole run.
    """

    name: str
    dir: str
    num_workers: int
    master_addr: str = LOCAL_ADDR
    master_port: int = 0
    worker_addresses: tuple[str, ...] = ()
    generation: int = 0
    min_workers: int | None = None
    is_resumed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """Who this process is in a run. The defaults are those of a lone process, a run of one.

    `run_dir` and `control_fd` are None without a launcher. `is_resumed`: continue from the newest valid checkpoint.
    `is_measured`: end after a few steps and say how fast they were. `faults`: what is to go wrong on purpose, as JSON
    or as `@` and the path of a file with it.

    `is_elastic`: the number of workers may change while it runs, and `world_fd` is where the launcher says so, in
    lines of JSON; an end of file there means that it is gone. `incarnation` counts the processes that had this rank
    before; `rank` and `world_size` are then the worker's number and the largest number of workers. `address` is where
    other machines of the run reach this one, through the device `interface`.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    group_rank: int = 0
    num_nodes: int = 1
    address: str = LOCAL_ADDR
    interface: str = ""
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
    has_agent: bool = False
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
        address=env.get("SHOAL_ADDRESS", LOCAL_ADDR),
        interface=env.get("GLOO_SOCKET_IFNAME", "").split(",")[0],
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
        has_agent=env.get(AGENT) == "1",
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


def worker_layers(
    job: Job, rank: int, run: RunFacts, seat: Seat, incarnation: int = 0
) -> tuple[dict[str, str], dict[str, str]]:
    """The environment of one worker: what lies under that of its machine, and what lies over it.

    What the user set there wins over our defaults, the facts of this run win over what an outer launcher left behind,
    and `--env` wins over everything.
    """
    threads = max(1, seat.cores // max(1, seat.num_local))
    defaults = _defaults(seat.interface, threads)
    env = thread_variables(job.threads_per_worker) if job.threads_per_worker else {}
    env |= _torchrun(rank, run, seat) | _shoal(job, run) | {"SHOAL_INCARNATION": str(incarnation)}
    if seat.gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(seat.gpus)
    if job.framework == "tensorflow":
        env["TF_CONFIG"] = tf_config(rank, run.worker_addresses)
    if job.framework == "jax":
        env |= _jax(rank, run, seat)
    return defaults, {**env, **job.env}


def worker_env(
    job: Job, rank: int, run: RunFacts, seat: Seat, inherited: Mapping[str, str], incarnation: int = 0
) -> dict[str, str]:
    """The whole environment of one worker, on a machine with that environment."""
    defaults, env = worker_layers(job, rank, run, seat, incarnation)
    return {**defaults, **inherited, **env}


def task_env(
    job: Job, worker: int, run: RunFacts, seat: Seat, inherited: Mapping[str, str], incarnation: int
) -> dict[str, str]:
    """The whole environment of a worker of `shoal.map`.

    It is on its own: nothing in it tells of a group that it could meet, and a Trainer in it is a run of one. Only
    SHOAL_WORKER says which worker it is.
    """
    env = worker_env(job, worker, run, seat, inherited, incarnation)
    told = {*_torchrun(worker, run, seat), *_shoal(job, run), *_jax(worker, run, seat), "TF_CONFIG"}
    for name in told - {*job.env}:
        env.pop(name, None)
    return {"SHOAL_WORKER": str(worker), **env}


def plain_env(num_threads: int, inherited: Mapping[str, str]) -> dict[str, str]:
    """What libraries find when they are loaded by a worker of this machine, as far as the run changes nothing."""
    return {**_defaults(Seat().interface, num_threads), **inherited}


def _defaults(interface: str, num_threads: int) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": str(num_threads),
        "PYTHONUNBUFFERED": "1",
        # The device towards the other workers. Without it gloo resolves the host's name, which may lead nowhere.
        "GLOO_SOCKET_IFNAME": interface,
        "TP_SOCKET_IFNAME": interface,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        # Activations are freed and taken again in every step. Left alone, glibc gives their pages back to the system
        # each time, and taking them again cost a CNN a tenth of its step in page faults. 32 MiB is glibc's limit.
        "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
        "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    }


def thread_variables(num_threads: int) -> dict[str, str]:
    """What `--threads` sets."""
    return {"OMP_NUM_THREADS": str(num_threads), "MKL_NUM_THREADS": str(num_threads)}


def rank_variables(rank: int, size: int, seat: Seat, master_addr: str, master_port: int) -> dict[str, str]:
    """The variables in which torchrun says who a process is, and our own for where it is."""
    facts: dict[str, Any] = {
        "RANK": rank,
        "LOCAL_RANK": seat.local_rank,
        "GROUP_RANK": seat.node_rank,
        "ROLE_RANK": rank,
        "ROLE_NAME": "default",
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": seat.num_local,
        "GROUP_WORLD_SIZE": seat.num_nodes,
        "ROLE_WORLD_SIZE": size,
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": master_port,
        "SHOAL_ADDRESS": seat.address,
    }
    return {name: str(value) for name, value in facts.items()}


def _torchrun(rank: int, run: RunFacts, seat: Seat) -> dict[str, str]:
    facts: dict[str, Any] = {
        "TORCHELASTIC_RUN_ID": run.name,
        "TORCHELASTIC_RESTART_COUNT": run.generation,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        # Rank 0 hosts the store, as it does under plain `torch.distributed`.
        "TORCHELASTIC_USE_AGENT_STORE": False,
        "TORCHELASTIC_ERROR_FILE": os.path.join(run.dir, "logs", f"{rank}.error.json"),
    }
    known = rank_variables(rank, run.num_workers, seat, run.master_addr, run.master_port)
    return known | {name: str(value) for name, value in facts.items()}


def _shoal(job: Job, run: RunFacts) -> dict[str, str]:
    return {
        "SHOAL_RUN_NAME": run.name,
        "SHOAL_RUN_DIR": run.dir,
        "SHOAL_GENERATION": str(run.generation),
        "SHOAL_OPTIONS": json.dumps(dict(job.options)),
        "SHOAL_RESUME": "1" if run.is_resumed else "0",
    }


def tf_config(rank: int, addresses: tuple[str, ...]) -> str:
    """The value of TF_CONFIG: every worker's address, and which of them this one is."""
    return json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}})


def _jax(rank: int, run: RunFacts, seat: Seat) -> dict[str, str]:
    """What `jax.distributed.initialize()` looks for, and what scripts that call it with arguments read.

    JAX has a variable for the address of process 0 only. The rest it takes from Slurm or from Open MPI, which it
    asks first: so it is told by the names of the latter. Of `orte_hnp_uri` it only matters that it is there.
    """
    address = run.worker_addresses[0] if run.worker_addresses else ""
    facts: dict[str, Any] = {
        "JAX_COORDINATOR_ADDRESS": address,
        # Left alone, process 0 listens on all networks of its machine.
        "JAX_COORDINATOR_BIND_ADDRESS": address,
        "JAX_NUM_PROCESSES": run.num_workers,
        "JAX_PROCESS_ID": rank,
        "OMPI_MCA_orte_hnp_uri": address,
        "OMPI_COMM_WORLD_SIZE": run.num_workers,
        "OMPI_COMM_WORLD_RANK": rank,
        "OMPI_COMM_WORLD_LOCAL_RANK": seat.local_rank,
    }
    return {name: str(value) for name, value in facts.items()}


def given_gpus() -> tuple[str, ...]:
    """The GPUs that whoever started this process has given to it; empty where nothing was said."""
    return tuple(part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip())


def give_gpus(numbers: Sequence[int]) -> None:
    """Have workers that are started from here on see these GPUs, each its own at its local rank.

    Those that run saw the first of them when they began.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, numbers))


def leave_ray() -> None:
    """Forget that Ray started this process: a `breakpoint()` of a worker would wait for Ray's own debugger."""
    if os.environ.get("PYTHONBREAKPOINT", "").startswith("ray."):
        del os.environ["PYTHONBREAKPOINT"]


def leave_mpirun() -> None:
    """Forget that mpirun started this process: workers would all take its rank for theirs, and MPI would end them."""
    for name in [name for name in os.environ if name.startswith(("OMPI_", "PMIX_"))]:
        del os.environ[name]


def set_defaults(values: Mapping[str, str]) -> None:
    """Set variables of this process that nobody has set: for libraries that read them when they are imported."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


def set_all(values: Mapping[str, str]) -> None:
    """Set variables of this process, whatever they were."""
    os.environ.update(values)


def replace_all(values: Mapping[str, str]) -> None:
    """Give this process these variables and no others."""
    os.environ.clear()
    os.environ.update(values)


def has_ray_token() -> bool:
    """Whether there is a secret that Ray's clusters may want, where Ray looks for it."""
    path = os.environ.get("RAY_AUTH_TOKEN_PATH") or os.path.join(os.path.expanduser("~"), ".ray", "auth_token")
    return bool(os.environ.get("RAY_AUTH_TOKEN")) or os.path.isfile(path)


def has_ray_tls() -> bool:
    """Whether Ray is to speak TLS, as it reads that itself."""
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")


def has_ray_address() -> bool:
    """Whether a Ray cluster is named where Ray looks for one."""
    return bool(os.environ.get("RAY_ADDRESS"))


def inherited_env() -> dict[str, str]:
    """The environment of this process, for workers to build on."""
    return dict(os.environ)


def terminal() -> tuple[str, bool]:
    """What kind of terminal there is, as TERM names it, and whether it may show colours (https://no-color.org)."""
    return os.environ.get("TERM", ""), not os.environ.get("NO_COLOR")


def shoal_home() -> str:
    """The folder for runs and settings: SHOAL_HOME, or `~/.shoal`."""
    return os.path.abspath(os.environ.get("SHOAL_HOME") or os.path.join(os.path.expanduser("~"), ".shoal"))


def has_display() -> bool:
    """Whether a browser would open a window here; over ssh it would open nothing, or take the terminal."""
    return any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def is_loading_call() -> bool:
    """Whether this process is a worker of `shoal.launch` that has not reached its function yet."""
    return os.environ.get("SHOAL_LOADING_CALL") == str(os.getpid())
