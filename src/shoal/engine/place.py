"""Which rank this process is, from what its launcher says: mpirun, srun of Slurm, torchrun, or nobody."""

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shoal.spec.errors import UserError

_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Steps with such numbers hold a batch script, or the shell of `salloc`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One process among those of a job that somebody else has started. The defaults are those of a lone process.

    `launcher` is "mpi", "slurm", "torchrun" or "". mpirun does not tell nodes apart: `node` and `num_nodes` are then
    a guess, ranks side by side on equal nodes. `first_host` is where rank 0 is, `job` the numbers of job and step,
    where that is known. `is_bound`: the cores that this process may use are its own; `num_cores` is how many were
    asked for, or 0.
    """

    launcher: str = ""
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    num_nodes: int = 1
    first_host: str = ""
    job: tuple[int, int] = (0, 0)
    is_bound: bool = False
    num_cores: int = 0


def find_place(env: Mapping[str, str]) -> Place:
    """What the innermost launcher says. Raises UserError where it cannot be true."""
    finders: tuple[Callable[[Mapping[str, str]], Place | None], ...] = (_torchrun, _open_mpi, _hydra, _slurm)
    place = next((place for find in finders if (place := find(env)) is not None), Place())
    if not 0 <= place.rank < place.size or not 0 <= place.local_rank < place.local_size:
        raise UserError(
            f"This process is said to be rank {place.rank} of {place.size}, and {place.local_rank} of "
            f"{place.local_size} on its machine.",
            why=f"that is what environment variables of {place.launcher} say",
            hint="start it by mpirun, srun or torchrun, or unset the variables that another left behind",
        )
    return place


def _torchrun(env: Mapping[str, str]) -> Place | None:
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= set(env):
        return None
    rank, size = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    local_size = _number(env, "LOCAL_WORLD_SIZE", size)
    return Place(
        launcher="torchrun",
        rank=rank,
        size=size,
        local_rank=_number(env, "LOCAL_RANK", rank % max(1, local_size)),
        local_size=local_size,
        node=_number(env, "GROUP_RANK", 0),
        num_nodes=_number(env, "GROUP_WORLD_SIZE", 1),
    )


def _open_mpi(env: Mapping[str, str]) -> Place | None:
    return _mpi(env, "OMPI_COMM_WORLD_") if "OMPI_COMM_WORLD_RANK" in env else None


def _hydra(env: Mapping[str, str]) -> Place | None:
    """MPICH and Intel MPI. Slurm sets the first two as well, for programs it starts itself."""
    if not {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"} <= set(env):
        return None
    local = {"PMI_LOCAL_RANK": env["MPI_LOCALRANKID"], "PMI_LOCAL_SIZE": env.get("MPI_LOCALNRANKS", "")}
    return _mpi({**env, **local}, "PMI_")


def _mpi(env: Mapping[str, str], prefix: str) -> Place:
    rank, size = _number(env, f"{prefix}RANK"), _number(env, f"{prefix}SIZE")
    local_size = _number(env, f"{prefix}LOCAL_SIZE", size)
    return Place(
        launcher="mpi",
        rank=rank,
        size=size,
        local_rank=_number(env, f"{prefix}LOCAL_RANK"),
        local_size=local_size,
        node=rank // max(1, local_size),
        num_nodes=-(-size // max(1, local_size)),
        is_bound=env.get("OMPI_MCA_orte_bound_at_launch") == "1",
    )


def _slurm(env: Mapping[str, str]) -> Place | None:
    """A task of a job step. A batch script itself is none: it has numbers, too, but nobody else runs it."""
    if not {"SLURM_PROCID", "SLURM_STEP_ID"} <= set(env) or _number(env, "SLURM_STEP_ID") >= _FIRST_SPECIAL_STEP:
        return None
    node, size = (
        _number(env, "SLURM_NODEID", 0),
        _number(env, "SLURM_STEP_NUM_TASKS", _number(env, "SLURM_NTASKS", 1)),
    )
    per_node = tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_NTASKS_PER_NODE") or str(size))
    return Place(
        launcher="slurm",
        rank=_number(env, "SLURM_PROCID"),
        size=size,
        local_rank=_number(env, "SLURM_LOCALID", 0),
        local_size=per_node[node] if node < len(per_node) else per_node[-1],
        node=node,
        num_nodes=_number(env, "SLURM_STEP_NUM_NODES", _number(env, "SLURM_NNODES", 1)),
        first_host=next(iter(host_names(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "")), ""),
        job=(_number(env, "SLURM_JOB_ID", 0), _number(env, "SLURM_STEP_ID", 0)),
        is_bound=re.search(r"(mask|map)_cpu", env.get("SLURM_CPU_BIND", "")) is not None,
        num_cores=_number(env, "SLURM_CPUS_PER_TASK", 0),
    )


def tasks_per_node(text: str) -> list[int]:
    """How many tasks each node has, as Slurm says it: `2(x3),1` is 2, 2, 2, 1."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if found is None:
            raise UserError(
                f"Slurm says {text!r} of the number of tasks on each node.",
                why="something like 4 or 2(x3),1 is expected",
                hint="start it with `srun`, and leave SLURM_ variables alone",
            )
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def host_names(node_list: str) -> list[str]:
    """The names in a list of Slurm's such as `a[1-3,5],b`: a1, a2, a3, a5, b. Widths with zeros are kept."""
    names = []
    for part in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", node_list):
        words = re.split(r"\[([^\]]*)\]", part)  # text and brackets in turns
        choices = [_numbers(word, node_list) if number % 2 else [word] for number, word in enumerate(words)]
        names += ["".join(chosen) for chosen in itertools.product(*choices)]
    return names


def _numbers(ranges: str, node_list: str) -> list[str]:
    """What stands in brackets: `07-09,12` is 07, 08, 09, 12."""
    found: list[str] = []
    for part in ranges.split(","):
        ends = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if ends is None:
            raise UserError(
                f"Slurm says {node_list!r} of the names of nodes.",
                why=f"{part!r} is neither a number nor a range such as 1-3",
                hint="leave SLURM_ variables alone, or name the hosts yourself: `--hosts a:4,b:4`",
            )
        first, last = ends[1], ends[2] or ends[1]
        found += [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
    return found


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name, "")
    if text == "" and default is not None:
        return default
    try:
        return int(text)
    except ValueError:
        raise UserError(
            f"The environment variable {name} is {text!r}, which is not a number.",
            why="a launcher sets it to say which rank this process is",
            hint=f"unset {name}, or start the script by mpirun, srun or torchrun",
        ) from None
