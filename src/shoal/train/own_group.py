"""A group of the workers of this run, for scripts that do something else than training: `shoal.group()`."""

from collections import Counter
from collections.abc import Sequence

import torch.distributed as dist

from shoal.comm.connect import connect_at
from shoal.comm.mpi import MpiGroup
from shoal.comm.rendezvous import Rendezvous, nobody_looks
from shoal.comm.shm import ShmGroup
from shoal.comm.tcp import TcpGroup
from shoal.engine.env import WorkerFacts, read_worker
from shoal.spec.errors import UserError
from shoal.train.setup import meeting
from shoal.train.waiting import Waiting

_num_groups: Counter[tuple[int, ...]] = Counter()


def group(
    ranks: Sequence[int] | None = None, *, transport: str = "auto", timeout_seconds: float = 300.0
) -> ShmGroup | TcpGroup | MpiGroup:
    """Meet the other workers of this run and form a group with them; a plain `python` is a group of one.

    `ranks` are those of the run that take part, in the order of their ranks in the group; None is all of them. They,
    and only they, call it, and make groups of the same ranks in the same order. `transport` is "shm", "tcp", "mpi"
    or "auto"; `timeout_seconds` is how long a silent rank is waited for, here and in every call. Close it in the end.
    """
    facts = read_worker()
    if facts.is_elastic:
        raise UserError(
            "shoal.group needs a run of fixed size.",
            why="in an elastic one a member may be lost, and only a Trainer knows how to go on without it",
            hint=f"start it with `-n {facts.world_size}`",
        )
    members = tuple(range(facts.world_size)) if ranks is None else tuple(ranks)
    _check(members, facts)
    number = _num_groups[members]
    _num_groups[members] += 1
    return connect_at(_meet(facts, members, number, timeout_seconds), transport)


def _check(members: tuple[int, ...], facts: WorkerFacts) -> None:
    is_known = all(isinstance(rank, int) and 0 <= rank < facts.world_size for rank in members)
    if not is_known or len(set(members)) != len(members) or facts.rank not in members:
        why = f"this is rank {facts.rank} of {facts.world_size}"
        hint = "name ranks of this run, each once, and call it only on those"
        raise UserError(f"A group of the ranks {list(members)} cannot be formed here.", why=why, hint=hint)


def _meet(facts: WorkerFacts, members: tuple[int, ...], number: int, timeout_seconds: float) -> Rendezvous:
    store = None
    if len(members) > 1:
        where = f"group-{'-'.join(map(str, members))}-{number}"
        store = dist.PrefixStore(where, meeting(facts.master_addr, facts.master_port, facts.rank, facts.world_size))
    waiting = Waiting(facts.control_fd) if facts.control_fd is not None else None

    def look(peers: Sequence[int], seconds: float) -> None:
        if waiting is not None:
            waiting.look([members[peer] for peer in peers], seconds)

    return Rendezvous(
        members.index(facts.rank),
        len(members),
        timeout_seconds,
        store=store,
        generation=facts.generation,
        look=look if waiting is not None else nobody_looks,
        interface=facts.interface,
    )
