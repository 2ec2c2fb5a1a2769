"""Where the ranks of a job that somebody else started find each other: an address of rank 0, and a port."""

import contextlib
import socket
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shoal.engine.env import LOCAL_ADDR
from shoal.engine.machine import interfaces, route_to
from shoal.engine.place import Place
from shoal.engine.ports import ReservedPorts
from shoal.spec.errors import UserError

_WORDS_BYTES = 1024
_REACH_SECONDS = 5.0
_FIRST_PORT, _NUM_PORTS = 10_000, 20_000
"""Below those that the kernel gives to others."""

_kept: list[ReservedPorts] = []
"""Rank 0 keeps its port until it ends: nobody else gets it before a store is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeetingPoint:
    """Where rank 0 hosts a store. `own_address` is where others reach this rank, through the device `interface`."""

    address: str
    port: int
    own_address: str = LOCAL_ADDR
    interface: str = "lo"


def find_without_mpi(place: Place, env: Mapping[str, str]) -> MeetingPoint:
    """From what every rank knows: the first host of the job, a port made of its number. MASTER_ADDR and _PORT win."""
    port = _asked_port(env) or (_port_of(*place.job) if place.size > 1 else 0)
    is_near = place.num_nodes == 1
    address = env.get("MASTER_ADDR") or (LOCAL_ADDR if is_near else place.first_host)
    if not address:
        raise UserError(
            "It is not known where rank 0 is.",
            why="SLURM_STEP_NODELIST and SLURM_JOB_NODELIST are not set",
            hint="set MASTER_ADDR to the name of the first node",
            rank=place.rank,
        )
    return MeetingPoint(address=address, port=port) if is_near else _look_from_here(address, port)


def _port_of(job: int, step: int) -> int:
    return _FIRST_PORT + (31 * job + step) % _NUM_PORTS


def find_by_mpi(mpi: Any, place: Place, env: Mapping[str, str]) -> tuple[Place, MeetingPoint]:
    """Ask the other ranks: who shares our node, and where rank 0 can be reached. Called by all of them."""
    world = mpi.COMM_WORLD
    place = _count_nodes(mpi, world, place)
    if place.rank == 0:
        _kept.append(ReservedPorts(1))
    port = _kept[-1].numbers[0] if place.rank == 0 else 0
    is_near = place.num_nodes == 1
    offer = " ".join([str(port), *([LOCAL_ADDR] if is_near else list(interfaces()))])
    port_text, *offered = _tell_all(mpi, world, offer)
    address = env.get("MASTER_ADDR") or _first_reached(mpi, world, offered, int(port_text))
    point = MeetingPoint(address=address, port=_asked_port(env) or int(port_text))
    return place, point if is_near else _look_from_here(point.address, point.port)


def _count_nodes(mpi: Any, world: Any, place: Place) -> Place:
    """A node is known by its first rank."""
    near = world.Split_type(mpi.COMM_TYPE_SHARED)
    first, firsts = array("i", [place.rank]), array("i", [0] * place.size)
    near.Allreduce(mpi.IN_PLACE, [first, mpi.INT], mpi.MIN)
    world.Allgather([first, mpi.INT], [firsts, mpi.INT])
    local_rank, local_size = near.Get_rank(), near.Get_size()
    near.Free()
    nodes = sorted(set(firsts))
    return replace(
        place, local_rank=local_rank, local_size=local_size, node=nodes.index(first[0]), num_nodes=len(nodes)
    )


def _tell_all(mpi: Any, world: Any, words: str) -> list[str]:
    """The words of rank 0."""
    buffer = bytearray(words.encode().ljust(_WORDS_BYTES)[:_WORDS_BYTES])
    world.Bcast([buffer, mpi.BYTE], root=0)
    return buffer.decode().split()


def _first_reached(mpi: Any, world: Any, addresses: Sequence[str], port: int) -> str:
    """The first of rank 0's addresses that all others reach: a node has several, and not all lead to everyone."""
    if len(addresses) == 1:
        return addresses[0]
    reached = array("i", [1] * len(addresses))
    with _listen(port) if world.Get_rank() == 0 else contextlib.nullcontext():
        world.Barrier()
        if world.Get_rank() != 0:
            reached = array("i", [_is_reached(address, port) for address in addresses])
        world.Allreduce(mpi.IN_PLACE, [reached, mpi.INT], mpi.MIN)
    if 1 not in reached:
        raise UserError(
            "Rank 0 cannot be reached by all ranks.",
            why=f"tried {', '.join(addresses) or 'nothing: its node has no network'}, port {port}",
            hint="set MASTER_ADDR and MASTER_PORT for all ranks: `mpirun -x MASTER_ADDR=... -x MASTER_PORT=...`",
            rank=world.Get_rank(),
        )
    return addresses[reached.index(1)]


def _listen(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("", port))
    listener.listen(4096)
    return listener


def _is_reached(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), _REACH_SECONDS).close()
    except OSError:
        return False
    return True


def _look_from_here(address: str, port: int) -> MeetingPoint:
    """Which of our addresses, and which device, leads to rank 0."""
    own = route_to(address)
    devices = interfaces()
    if own not in devices and devices:  # a name of this very node may lead to its loopback, where nobody else gets
        own = next(iter(devices))
    return MeetingPoint(address=address, port=port, own_address=own, interface=devices.get(own, ""))


def _asked_port(env: Mapping[str, str]) -> int:
    text = env.get("MASTER_PORT", "")
    if text and not (text.isdecimal() and 0 < int(text) < 65536):
        raise UserError(f"MASTER_PORT is {text!r}, which is not a port.", hint="use a number from 1 to 65535")
    return int(text) if text else 0
