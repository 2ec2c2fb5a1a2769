"""Which worker goes to which machine. Pure: agents and who is there in, a seat for each worker out."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shoal.engine.fit import TORCH_WORKER_BYTES
from shoal.spec.errors import UserError
from shoal.spec.job import Seat


@dataclass(frozen=True, slots=True, kw_only=True)
class Berth:
    """One agent: `num_slots` workers can be with it. Several agents may be on one node, and then share its cores.

    `order` is the place of its node among those of the run. `ports` holds two for each slot. `gpus` are those that
    were given to this agent alone. At `bell` others can try whether they reach its machine.
    """

    agent: str
    node: str
    order: int
    address: str
    interface: str
    num_slots: int
    ports: tuple[int, ...]
    cores: int
    memory: int | None = None
    gpus: tuple[str, ...] = ()
    bell: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Where one worker is, or may be: the agent, and which of its slots."""

    agent: str
    index: int


def name_machine(node: str, address: str) -> str:
    """A machine as people are told of it."""
    return node if node == address else f"{node} ({address})"


def choose(
    berths: Sequence[Berth], taken: Iterable[Slot], ranks: Sequence[int], before: Mapping[int, Slot]
) -> dict[int, Slot]:
    """A free slot for each of these workers, as far as there are any: node by node, in their order.

    Whoever had a slot before gets it again if it is free: a process may be waiting there to become this worker.
    """
    used = set(taken)
    ordered = sorted(berths, key=lambda berth: (berth.order, berth.node, berth.agent))
    everywhere = [Slot(agent=b.agent, index=index) for b in ordered for index in range(b.num_slots)]
    free = dict.fromkeys(slot for slot in everywhere if slot not in used)
    found: dict[int, Slot] = {}
    for rank in ranks:
        if (slot := before.get(rank)) in free:
            del free[slot]
            found[rank] = slot
    rest = iter(free)
    for rank in ranks:
        if rank not in found and (slot := next(rest, None)) is not None:
            found[rank] = slot
    return {rank: found[rank] for rank in ranks if rank in found}


def seats_of(
    berths: Sequence[Berth], slots: Mapping[int, Slot], *, is_elastic: bool, held: Mapping[int, Seat] | None = None
) -> dict[int, Seat]:
    """What each of these workers is told about where it is.

    In an elastic run workers come and go, so that the counts are those of the slots and not of who is there. `held`
    are the seats of those who run: what they were told stays so, and no other on their node gets their local rank.
    """
    held = held or {}
    by_agent = {berth.agent: berth for berth in berths}
    used = [(slot.agent, slot.index) for slot in slots.values()]
    everywhere = [(berth.agent, index) for berth in berths for index in range(berth.num_slots)]
    local: dict[str, list[tuple[str, int]]] = {}
    for agent, index in sorted(everywhere if is_elastic else used):
        local.setdefault(by_agent[agent].node, []).append((agent, index))
    nodes = sorted(local, key=lambda node: min((b.order, b.node) for b in berths if b.node == node))
    seats = {rank: held[rank] for rank in slots if rank in held}
    for rank, slot in slots.items():
        if rank not in seats:
            berth = by_agent[slot.agent]
            seat = _seat(berth, slot, local[berth.node], nodes, is_elastic=is_elastic)
            taken = {each.local_rank for each in (*held.values(), *seats.values()) if each.node == berth.node}
            free = (n for n in (seat.local_rank, *range(len(taken) + 1)) if n not in taken)
            local_rank = next(free)
            seats[rank] = replace(seat, local_rank=local_rank, gpus=visible_gpus(berths, berth, local_rank))
    return {rank: seats[rank] for rank in slots}


def visible_gpus(berths: Sequence[Berth], berth: Berth, local_rank: int) -> tuple[str, ...]:
    """What a worker whose agent was given one GPU is to see: scripts take the GPU that stands at their local rank.

    Empty where it sees what its agent sees: one that has several slots, or was not given just one.
    """
    others = [gpu for each in berths if each.node == berth.node for gpu in each.gpus if gpu not in berth.gpus]
    if berth.num_slots > 1 or len(berth.gpus) != 1 or len(others) < local_rank:
        return ()
    return (*others[:local_rank], *berth.gpus, *others[local_rank:])


def _seat(berth: Berth, slot: Slot, local: list[tuple[str, int]], nodes: list[str], *, is_elastic: bool) -> Seat:
    return Seat(
        node=berth.node,
        address=berth.address,
        interface=berth.interface if len(nodes) > 1 or is_elastic else "lo",
        store_port=berth.ports[2 * slot.index],
        worker_port=berth.ports[2 * slot.index + 1],
        local_rank=local.index((slot.agent, slot.index)),
        num_local=len(local),
        node_rank=nodes.index(berth.node),
        num_nodes=len(nodes),
        cores=berth.cores,
    )


def check_memory(berths: Sequence[Berth], slots: Mapping[int, Slot]) -> None:
    """Raise UserError where workers would not even get as far as importing torch."""
    nodes = {berth.agent: berth for berth in berths}
    count: dict[str, int] = {}
    for slot in slots.values():
        count[nodes[slot.agent].node] = count.get(nodes[slot.agent].node, 0) + 1
    for berth in berths:
        needed = count.get(berth.node, 0) * TORCH_WORKER_BYTES
        if berth.memory is not None and needed > berth.memory:
            raise UserError(
                f"{count[berth.node]} workers do not fit into the memory of {berth.node}.",
                why=f"each takes about {TORCH_WORKER_BYTES >> 20} MB and {berth.memory >> 20} MB are available there",
                hint="start fewer workers, or spread them over more machines",
            )
