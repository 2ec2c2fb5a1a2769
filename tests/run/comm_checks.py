"""What ranks do in tests/run/test_comm_processes.py. A module of its own, because processes import it by name."""

import os
import signal
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shoal.comm import board, futex
from shoal.comm.connect import _gather_number, connect, connect_at, share_memory
from shoal.comm.passing import connect_all
from shoal.comm.process import decode, describe_self, encode
from shoal.comm.rendezvous import Rendezvous, open_store
from shoal.comm.tcp import TcpGroup
from shoal.testing.ranks import Member


def wait_long(member: Member, seconds: float) -> float:
    """Processor seconds that rank 1 used while rank 0 let it wait."""
    group = member.group
    group.barrier()
    before = time.process_time()
    if member.rank == 0:
        time.sleep(seconds)
        group.signal(0, 1)
    else:
        group.wait(0, 1, [0])
        assert group.late_seconds[0] > 0.5 * seconds
    return time.process_time() - before


def wake_up(member: Member, rounds: int, nap_seconds: float) -> int:
    """Signals there and back, and naps of so long where nobody wakes us; returns how often this rank slept."""
    group, naps = member.group, []

    def sleep(*arguments: Any) -> None:
        naps.append(arguments)
        wait(*arguments)

    usual, wait = board._NAP_SECONDS, futex.wait
    board._NAP_SECONDS, futex.wait = nap_seconds, sleep
    try:
        for turn in range(1, rounds + 1):
            if member.rank == 0:
                time.sleep(0.003)
                group.signal(1, turn)
                group.wait(2, turn, [1])
            else:
                group.wait(1, turn, [0])
                group.signal(2, turn)
    finally:
        board._NAP_SECONDS, futex.wait = usual, wait
    return len(naps)


def files_in_dev_shm(member: Member) -> tuple[list[str], list[str]]:
    """What is in /dev/shm, and which of our mappings come from there, while memory is shared."""
    shared = member.group.share(100 << 20)
    shared.mine.fill_(1)
    member.group.barrier()
    with open("/proc/self/maps") as file:
        mapped = [line for line in file if "/dev/shm" in line]
    return os.listdir("/dev/shm"), mapped


def share_by_sockets(member: Member) -> str:
    """Meet without /proc."""
    meeting = Rendezvous(member.rank, member.size, 20.0, store=member.store, generation=30)
    processes = [decode(text) for text in meeting.gather("process", encode(describe_self()))]
    group, reason = share_memory(meeting, processes, ways=("sockets",))
    assert group is not None, reason
    tensor = group.share(400_000).mine.view(torch.float32)
    tensor.fill_(1.0)
    group.all_reduce(tensor).wait()
    assert tensor.unique().tolist() == [float(member.size)]
    group.barrier()
    group.close()
    return group.reason


def fail_to_share(member: Member, transport: str) -> str:
    """One rank may not open what others offer."""
    if member.rank == 1:
        import shoal.comm.connect as module

        def refuse(*_: Any) -> int:
            raise PermissionError(13, "Permission denied")

        def hang_up(*arguments: Any) -> list[Any]:
            for peer in connect_all(*arguments):
                if peer is not None:
                    peer.close()
            return refuse()

        module.open_of, module.connect_all = refuse, hang_up
    group = connect(member.rank, member.size, member.store, generation=31, transport=transport, timeout_seconds=20.0)
    tensor = torch.ones(5)
    group.all_reduce(tensor).wait()
    assert tensor[0] == member.size
    group.barrier()
    group.close()
    return f"{group.transport}: {group.reason}"


def fork_a_child(member: Member) -> None:
    """A child ends in the ordinary way; its copy of the group must not say that we left."""
    member.group.barrier()
    if (child := os.fork()) == 0:
        try:
            sys.exit(0)
        finally:
            import atexit

            atexit._run_exitfuncs()
            os._exit(0)
    os.waitpid(child, 0)
    time.sleep(0.2)
    member.group.barrier()
    member.group.wait(0, 0)


def beside_a_process_group(member: Member, port: int, is_hosted: bool) -> None:
    """Our store and the script's own init_process_group at one address, both in use at once."""
    store = open_store("127.0.0.1", port, member.rank, member.size, 20.0)
    group = connect(member.rank, member.size, store, timeout_seconds=20.0)
    os.environ.update(
        TORCHELASTIC_USE_AGENT_STORE=str(is_hosted),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(member.rank),
        WORLD_SIZE=str(member.size),
    )
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    theirs, ours = torch.ones(3), torch.ones(3)
    dist.all_reduce(theirs)
    group.all_reduce(ours).wait()
    newer = connect(member.rank, member.size, store, generation=1, transport="tcp", timeout_seconds=20.0)
    newer.all_reduce(ours).wait()
    dist.barrier()
    dist.destroy_process_group()
    newer.all_reduce(ours).wait()
    assert theirs[0] == member.size
    assert ours[0] == member.size**3
    newer.barrier()
    for each in (newer, group):
        each.close()


def join_as_if_far(member: Member) -> None:
    """A group whose ranks believe to be on different hosts: nobody can look up anyone's pid.

    Calls that are new are compared through the store, which does not notice a death; so these are not new any more.
    """
    meeting = Rendezvous(member.rank, member.size, 20.0, store=member.store, generation=40)
    processes = [decode(text) for text in meeting.gather("process", encode(describe_self()))]
    apart = [replace(process, boot=f"host {rank}") for rank, process in enumerate(processes)]
    member.group = TcpGroup(meeting, apart)
    for _ in range(2):
        member.group.all_reduce(torch.zeros(200_000)).wait()


def sum_shared(member: Member, mebibytes: int, turns: int) -> None:
    """Many in-place sums, until someone dies."""
    tensor = member.group.share(mebibytes << 20).mine.view(torch.float32)
    plan = member.group.all_reduce_plan(tensor)
    for _ in range(turns):
        tensor.fill_(1.0)
        member.group.barrier()
        plan()
        assert tensor[0] == tensor[-1] == member.size


def die_while_sharing(member: Member) -> None:
    """Rank 1 ends, and its descriptors a moment before it."""
    meeting = member.group._meeting
    if member.rank == 1:

        def tell_and_die(fd: int) -> list[int]:
            _gather_number(meeting.board, 9999)
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError

        meeting._swap = tell_and_die
    member.group.share(4096)


def scatter(member: Member, times: int) -> float:
    """Sums of which each rank gets its part; returns the last sum of this rank's."""
    group = member.group
    out, mine = torch.zeros(1000), torch.full((1000 * group.size,), float(member.rank + 1))
    for _ in range(times):
        group.reduce_scatter(out, mine).wait()
    return float(out.sum())


def close_alone(member: Member) -> None:
    """Rank 0 begins a sum that rank 1 never takes part in, and closes its group; rank 1 keeps its own."""
    if member.rank == 0:
        member.group.all_reduce(torch.ones(1000))
        member.group.close()


def close_after(member: Member) -> list[str]:
    """Rank 1 closes its group, too; which threads still hold on to a group in the end."""
    member.group.close()
    deadline, names = time.monotonic() + 20, ["shoal-let-go"]
    while "shoal-let-go" in names and time.monotonic() < deadline:
        time.sleep(0.02)
        names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name == "shoal-let-go"]


def sum_twice(member: Member) -> None:
    """Calls that are known are not compared any more before they begin."""
    for _ in range(2):
        member.group.all_reduce(torch.ones(1000)).wait()


def die_while_connecting(member: Member) -> None:
    """Rank 1 has met the others, and is gone before they can connect to it."""
    meeting = Rendezvous(member.rank, member.size, 100.0, store=member.store, generation=7)
    if member.rank == 1:
        meeting.gather("process", encode(describe_self()))
        os.kill(os.getpid(), signal.SIGKILL)
    connect_at(meeting, "tcp")
