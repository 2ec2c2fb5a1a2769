"""Forming a group: shared memory where all ranks can, sockets where not."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch.distributed import Store, is_nccl_available

from shoal.comm import board as boards
from shoal.comm.board import Board
from shoal.comm.group import Group
from shoal.comm.memory import map_memory, reserve
from shoal.comm.mpi import MpiGroup
from shoal.comm.passing import Swap, connect_all, listen, open_of, swap_by_proc, swap_by_sockets
from shoal.comm.process import Process, can_share, decode, describe_self, encode, is_running
from shoal.comm.rendezvous import Rendezvous
from shoal.comm.shm import ShmGroup
from shoal.comm.staged import StagedGroup, choose_transport, must_stage
from shoal.comm.tcp import TcpGroup
from shoal.spec.errors import UserError

_SOCKET_SECONDS = 5.0


def connect(
    rank: int,
    size: int,
    store: Store | None = None,
    *,
    generation: int = 0,
    transport: str = "auto",
    timeout_seconds: float = 300.0,
    interface: str = "",
) -> ShmGroup | TcpGroup | MpiGroup:
    """Meet the other ranks of this generation and form a group with them.

    `transport` is "shm", "tcp", "mpi" or "auto": shared memory if all ranks can map each other's, else tcp, on every
    rank alike; `group.reason` says why. A group of one needs no store. `timeout_seconds` is how long to wait for a
    silent rank, here and in every call on the group. `interface` names the network device for tcp between hosts.
    """
    _check_transport(transport)
    if store is None and size > 1:
        raise UserError(f"A group of {size} needs a store to meet at.", hint="make one with `open_store`")
    return connect_at(
        Rendezvous(rank, size, timeout_seconds, store=store, generation=generation), transport, interface
    )


def connect_at(meeting: Rendezvous, transport: str = "auto", interface: str = "") -> ShmGroup | TcpGroup | MpiGroup:
    """`connect` with those who come to this rendezvous, all of them with tensors in main memory."""
    _check_transport(transport)
    if meeting.size == 1:
        return _alone(meeting.timeout_seconds)
    return _connect(meeting, _gather(meeting), transport, interface)


def connect_devices(
    meeting: Rendezvous, transport: str = "auto", device: str = "cpu", before: Group | None = None
) -> Group:
    """`connect_at` for ranks whose tensors may be on a GPU: `device` is this rank's, "cpu" or "cuda".

    GPUs among themselves use NCCL. Where some ranks have one and others not, tensors go through main memory.
    `before` is the group that this one takes the place of, on those ranks that were in it.
    """
    _check_transport(transport)
    before = before if isinstance(before, ShmGroup) else None
    if meeting.size == 1:
        alone = _alone(meeting.timeout_seconds, before)
        return alone if device == "cpu" else StagedGroup(alone)
    processes = _gather(meeting, device)
    devices = [process.device for process in processes]
    group = _connect(meeting, processes, choose_transport(transport, devices), before=before)
    return StagedGroup(group) if must_stage(device, devices, has_nccl=is_nccl_available()) else group


def _gather(meeting: Rendezvous, device: str = "cpu") -> list[Process]:
    return [decode(text) for text in meeting.gather("process", encode(describe_self(device)))]


def _connect(
    meeting: Rendezvous,
    processes: Sequence[Process],
    transport: str,
    interface: str = "",
    before: ShmGroup | None = None,
) -> ShmGroup | TcpGroup | MpiGroup:
    if transport == "mpi":
        return MpiGroup(meeting, processes)
    group, reason = (None, "asked for") if transport == "tcp" else share_memory(meeting, processes, before=before)
    if group is not None:
        return group
    if transport == "shm":
        raise UserError(
            "The workers cannot share memory.", why=reason, hint="use transport 'tcp' or 'auto'", rank=meeting.rank
        )
    return TcpGroup(meeting, processes, interface, reason)


def _check_transport(transport: str) -> None:
    if transport not in ("auto", "shm", "tcp", "mpi"):
        raise UserError(f"There is no transport {transport!r}.", hint="use 'auto', 'shm', 'tcp' or 'mpi'")


def _alone(timeout_seconds: float, before: ShmGroup | None = None) -> ShmGroup:
    """A group of one: the same memory, board and code, with nobody to wait for."""
    control = reserve(boards.num_bytes(1))
    board = Board(map_memory(control), 0, 1, timeout_seconds, lambda _: True)
    os.close(control)
    swap = swap_by_proc([describe_self()], 0, lambda fd: [fd])
    return ShmGroup(board, swap, reason="one worker", before=before)


@dataclass(frozen=True, slots=True)
class Way:
    """Descriptors can be passed: this one is the board's, `swap` passes more, `leave` ends it."""

    control: int
    swap: Callable[[Board], Swap]
    leave: Callable[[], None] = lambda: None


def share_memory(
    meeting: Rendezvous,
    processes: Sequence[Process],
    ways: Sequence[str] = ("proc", "sockets"),
    before: ShmGroup | None = None,
) -> tuple[ShmGroup | None, str]:
    """A group on memory that rank 0 makes, by the first way that works for all; else None and why not.

    Every rank returns alike, because each tells the others how it fared before any goes on.
    """
    possible, reason = can_share(processes)
    if not possible:
        return None, reason
    control = reserve(boards.num_bytes(meeting.size)) if meeting.rank == 0 else -1
    reasons = []
    try:
        for name in ways:
            way, reason = _try(meeting, processes, control, name)
            if way is not None:
                reason = f"{meeting.size} workers on one host, memory by {name}"
                board = _board_on(way, meeting, processes)
                return ShmGroup(board, way.swap(board), way.leave, reason, before), ""
            reasons.append(reason)
        return None, f"the memory of another worker could not be opened ({'; '.join(reasons)})"
    finally:
        if control >= 0:
            os.close(control)


def _try(meeting: Rendezvous, processes: Sequence[Process], control: int, name: str) -> tuple[Way | None, str]:
    way, problem = None, ""
    try:
        way = _WAYS[name](meeting, processes, control)
    except OSError as error:
        problem = str(error)
    problems = meeting.gather(f"opened-by-{name}", problem)
    failed = next((rank for rank, text in enumerate(problems) if text), None)
    if failed is None:
        return way, ""
    if way is not None:
        os.close(way.control)
        way.leave()
    return None, f"by {name}, rank {failed}: {problems[failed]}"


def _board_on(way: Way, meeting: Rendezvous, processes: Sequence[Process]) -> Board:
    memory = map_memory(way.control)
    os.close(way.control)
    return Board(
        memory,
        meeting.rank,
        meeting.size,
        meeting.timeout_seconds,
        lambda rank: is_running(processes[rank]),
        meeting.look,
    )


def _by_proc(meeting: Rendezvous, processes: Sequence[Process], control: int) -> Way:
    number = int(meeting.gather("control", str(control))[0])
    opened = os.dup(control) if meeting.rank == 0 else open_of(processes[0], number)
    return Way(opened, lambda board: swap_by_proc(processes, meeting.rank, lambda fd: _gather_number(board, fd)))


def _gather_number(board: Board, number: int) -> list[int]:
    board.post(np.array([number]))
    return [int(other) for other in board.peers()[:, 0]]


def _by_sockets(meeting: Rendezvous, processes: Sequence[Process], control: int) -> Way:
    listener, name = listen()
    with listener:
        names = meeting.gather("socket", name)
        sockets = connect_all(listener, names, processes, meeting.rank, _SOCKET_SECONDS)
    swap = swap_by_sockets(sockets, meeting.rank)

    def leave() -> None:
        for peer in sockets:
            if peer is not None:
                peer.close()

    return Way(swap(control)[0], lambda _: swap, leave)


_WAYS = {"proc": _by_proc, "sockets": _by_sockets}
