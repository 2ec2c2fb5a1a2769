"""A group that talks over sockets (gloo), or between GPUs (NCCL): for ranks that cannot share memory.

PyTorch's process groups do the work, built directly on our store: nothing global is set up, so a script may still
call `init_process_group` itself.
"""

import fcntl
import socket
import struct
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

from shoal.comm.group import Call, CopiedWork, Op, Work, check_parts, check_peer, flatten
from shoal.comm.letters import Letters
from shoal.comm.letting_go import UnderWay, let_go
from shoal.comm.process import Process, on_one_loopback
from shoal.comm.reach import CAUSE, check_reach
from shoal.comm.rendezvous import Rendezvous
from shoal.comm.roll import LOOK_SECONDS, Roll
from shoal.spec.errors import UserError
from shoal.spec.spans import timed_calls

_CONNECT_SECONDS = 2.0
"""What gloo is told to take for a connection, once all ranks listen. It takes up to five times as long."""
_SIOCGIFADDR = 0x8915
_LET_GO_SECONDS = 0.05
"""A backend is not destroyed sooner after its last call: a thread of gloo that has just done the last work of a
backward needs the interpreter to let go of that."""
_OPS: dict[Op, Any] = {Op.SUM: dist.ReduceOp.SUM, Op.MAX: dist.ReduceOp.MAX, Op.MIN: dist.ReduceOp.MIN}


@timed_calls("all_reduce", "reduce_scatter", "all_gather", "broadcast", "send", "recv", "barrier")
class TcpGroup:
    """Ranks connected by sockets. Calls return at once; `wait` on what they return.

    gloo ends the whole process when two ranks pass different sizes. So the first time a call follows another, all
    ranks compare it through the store before they start; a loop that repeats itself pays nothing. After a
    disagreement or a loss the group is only good for `close`. `reason` says why it is this transport.
    """

    transport = "tcp"

    def __init__(
        self, meeting: Rendezvous, processes: Sequence[Process], interface: str = "", reason: str = ""
    ) -> None:
        self.rank, self.size, self.reason = meeting.rank, meeting.size, reason
        self._meeting = meeting
        self._roll = Roll(meeting, processes)
        try:
            self._addresses = Addresses(PrefixStore("gloo", meeting.store), self._roll)
            gloo = _make_gloo(meeting, self._addresses, _device(meeting, processes, interface))
        except RuntimeError as error:
            raise self._roll.roll_call(f"could not connect to every rank: {error}") from error
        self._backends: dict[str, Any] = {"cpu": gloo}
        self._letters = [Letters(self._backend, self._roll, peer) for peer in range(self.size)]
        self._num_calls, self._previous, self._last_call = 0, 0, 0.0
        self._under_way = UnderWay()
        self._known: set[tuple[int, int]] = set()

    def all_reduce(self, tensor: torch.Tensor, op: Op = Op.SUM) -> Work:
        """Combine `tensor` across the group, in place. Moves 2 (size - 1) / size of its bytes per rank."""
        flat, options = flatten(tensor), dist.AllreduceOptions()
        options.reduceOp = _OPS[op]
        call = Call("all_reduce", flat.numel(), flat.dtype, op)
        return self._start(call, flat, lambda backend: backend.allreduce([flat], options))

    def reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor, op: Op = Op.SUM) -> Work:
        check_parts(tensor, out, self.size)
        part, flat = flatten(out), flatten(tensor)
        call = Call("reduce_scatter", flat.numel(), flat.dtype, op)
        if not flat.is_cuda:
            return self._sum_and_take(call, part, flat)
        options = dist.ReduceScatterOptions()
        options.reduceOp = _OPS[op]
        return self._start(call, flat, lambda backend: backend._reduce_scatter_base(part, flat, options))

    def _sum_and_take(self, call: Call, part: torch.Tensor, flat: torch.Tensor) -> Work:
        """What gloo makes of a reduce_scatter, too. But waiting for its own knows no limit, and so no loss."""
        whole, options = flat.clone(), dist.AllreduceOptions()
        options.reduceOp = _OPS[call.op]
        work = self._start(call, whole, lambda backend: backend.allreduce([whole], options))
        return CopiedWork(work, part, whole.view(self.size, -1)[self.rank])

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> Work:
        check_parts(out, tensor, self.size)
        whole, flat = flatten(out), flatten(tensor)
        call = Call("all_gather", flat.numel(), flat.dtype)
        return self._start(call, flat, lambda backend: backend._allgather_base(whole, flat))

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Work:
        check_peer(root, self.size)
        flat, options = flatten(tensor), dist.BroadcastOptions()
        options.rootRank = root
        call = Call("broadcast", flat.numel(), flat.dtype, root=root)
        return self._start(call, flat, lambda backend: backend.broadcast([flat], options))

    def send(self, tensor: torch.Tensor, to: int) -> Work:
        check_peer(to, self.size, self.rank)
        return self._letters[to].send(flatten(tensor))

    def recv(self, tensor: torch.Tensor, source: int) -> Work:
        check_peer(source, self.size, self.rank)
        return self._letters[source].recv(flatten(tensor))

    def barrier(self) -> None:
        self._start(Call("barrier"), torch.empty(0), lambda backend: backend.barrier()).wait()

    def close(self) -> None:
        """Drop all connections. Peers that still wait for this rank get MemberLost."""
        if self._backends:
            self._roll.leave(f"call/{self._num_calls}")
        self._letters.clear()
        backends = [[self._backends.popitem()[1], self._addresses] for _ in range(len(self._backends))]
        for held in backends:
            held[0].abort()
        time.sleep(max(0.0, self._last_call + _LET_GO_SECONDS - time.monotonic()))
        for held in backends:
            let_go(held, self._under_way)

    def _start(self, call: Call, flat: torch.Tensor, begin: Callable[[Any], dist.Work]) -> Work:
        code, self._num_calls = call.code, self._num_calls + 1
        name, step = f"call/{self._num_calls}", (self._previous, code)
        if step not in self._known:
            self._roll.compare(name, code)
            self._known.add(step)
        self._previous, self._last_call = code, time.monotonic()
        try:
            work = begin(self._backend(flat.device))
        except RuntimeError as error:
            raise self._roll.roll_call(str(error)) from error
        self._under_way.add(work)
        if flat.is_cuda:
            return StreamWork(self._roll, work, self._under_way)
        return TcpWork(self._roll, name, code, work, self._under_way)

    def _backend(self, device: torch.device) -> Any:
        """gloo for tensors in main memory, NCCL for those on a GPU; the latter is made when first needed."""
        if not self._backends:
            raise UserError("This group is closed.", hint="make another one with `shoal.group()`", rank=self.rank)
        if device.type not in self._backends:
            if device.type != "cuda" or not dist.is_nccl_available():
                raise UserError(
                    f"This build of PyTorch cannot move {device.type} tensors between processes.",
                    hint="move them to the CPU, or install a build with NCCL",
                    rank=self.rank,
                )
            self._backends["cuda"] = _make_nccl(self._meeting)
        return self._backends[device.type]


@timed_calls("wait")
class TcpWork:
    """A collective under way. While it takes long, `wait` looks for ranks that ended or called something else."""

    def __init__(self, roll: Roll, name: str, code: int, work: dist.Work, under_way: UnderWay) -> None:
        self._roll, self._name, self._code, self._work = roll, name, code, work
        self._under_way = under_way

    def wait(self) -> None:
        began = time.monotonic()
        while True:
            try:
                self._work.wait(timedelta(seconds=LOOK_SECONDS))
                self._under_way.forget_ended()
                return
            except RuntimeError:
                if self._work.is_completed():
                    break
            self._roll.look(self._name, self._code, began)
        try:
            self._work.wait()  # it may have been done in the very moment in which our patience ended
        except RuntimeError as error:
            raise self._roll.roll_call(str(error)) from error


@timed_calls("wait")
class StreamWork:
    """A collective on a GPU. `wait` lets the current stream wait, not the processor, so it cannot look for anyone.

    A loss is noticed by NCCL's own watchdog after the group's timeout. Waiting with a limit, as TcpWork does, would
    make NCCL give up the whole communicator.
    """

    def __init__(self, roll: Roll, work: dist.Work, under_way: UnderWay) -> None:
        self._roll, self._work, self._under_way = roll, work, under_way

    def wait(self) -> None:
        try:
            self._work.wait()
            self._under_way.forget_ended()
        except RuntimeError as error:
            raise self._roll.roll_call(str(error)) from error


class Addresses(Store):
    """The store through which gloo learns the others' addresses. It gives none before all ranks listen at theirs.

    gloo itself would wait for a rank that died on the way until its time is over, and nothing can interrupt it; here
    the lost are looked for. Must live as long as the backend, which does not keep this half of it alive.
    """

    def __init__(self, store: Store, roll: Roll) -> None:
        super().__init__()
        self._store, self._roll = store, roll

    def set(self, key: str, value: Any) -> None:
        """Called by gloo with the address at which it listens from now on."""
        self._store.set(key, value)
        self._roll.compare("listening", 0)

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """All of them are there: nobody has come further than `set` before everybody had."""


def _make_gloo(meeting: Rendezvous, store: Store, device: Any) -> Any:
    options: Any = getattr(dist.ProcessGroupGloo, "_Options")()  # noqa: B009
    options._devices = [device]
    # All listen by then, so whoever does not answer has gone again.
    options._timeout = timedelta(seconds=min(meeting.timeout_seconds, _CONNECT_SECONDS))
    gloo: Any = dist.ProcessGroupGloo(store, meeting.rank, meeting.size, options)
    # From here our own deadline comes first and can name the missing; gloo's ends what nobody waits for any more.
    gloo.set_timeout(timedelta(seconds=meeting.timeout_seconds + 60))
    return gloo


def _make_nccl(meeting: Rendezvous) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=meeting.timeout_seconds)
    return dist.ProcessGroupNCCL(PrefixStore("nccl", meeting.store), meeting.rank, meeting.size, options)


def _device(meeting: Rendezvous, processes: Sequence[Process], interface: str) -> Any:
    """The network device to talk over: the one asked for, loopback within a host, else the one towards the store."""
    if interface:
        return dist.ProcessGroupGloo.create_device(interface=interface)
    if on_one_loopback(processes):
        return dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
    address = _address_of(meeting.interface, meeting.rank) if meeting.interface else _own_address(meeting.store)
    if meeting.is_fixed:  # whoever joins an elastic run is replaced if it does not get through
        check_reach(meeting, address, meeting.interface)
    return dist.ProcessGroupGloo.create_device(hostname=address)


def _address_of(interface: str, rank: int) -> str:
    """The address of a network device of this machine, which somebody has named."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
    except OSError as error:
        names = ", ".join(name for _, name in socket.if_nameindex())
        raise UserError(
            f"Rank {rank} cannot use the network interface {interface!r}.",
            why=f"{error.strerror or error}; its machine has: {names}",
            hint="set GLOO_SOCKET_IFNAME to the one that leads to the other machines, or leave it unset",
            rank=rank,
        ).blame(CAUSE, [rank]) from None
    return socket.inet_ntoa(answer[20:24])


def _own_address(store: Store) -> str:
    """Our address on the network that leads to the store. Nothing is sent: connecting a datagram socket is enough."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return socket.gethostname()
    family, kind, _, _, address = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
