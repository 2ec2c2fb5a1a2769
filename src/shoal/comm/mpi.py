"""A group that talks over MPI: for ranks that mpirun has started.

MPI takes tensors where they are, and moves them only while somebody waits: nothing happens in the background. What it
cannot do is done through the store, as for sockets: comparing calls, and noticing who has left or is silent.
"""

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shoal.comm.asked import Asked
from shoal.comm.group import DONE, Call, CopiedWork, Op, Work, check_parts, check_peer, disagreement, flatten
from shoal.comm.process import Process
from shoal.comm.rendezvous import Rendezvous
from shoal.comm.roll import LOOK_SECONDS, Roll
from shoal.spec.errors import UserError
from shoal.spec.spans import timed_calls

_MOST_ELEMENTS = 2**31 - 1
_SPIN_SECONDS, _NAP_SECONDS = 0.002, 0.00002
_HEADER, _BODY, _ANSWER = 0, 1, 2

_in_flight: set["MpiWork"] = set()
"""What MPI may still write to. Who gave up waiting has no way to call it back, so its memory is never given away."""


@timed_calls("all_reduce", "reduce_scatter", "all_gather", "broadcast", "send", "recv", "barrier")
class MpiGroup:
    """Ranks of one MPI job. Calls return at once; `wait` on what they return, because only that moves anything.

    Calls are compared as in a TcpGroup: the first time one follows another. When a rank dies, mpirun ends all others,
    so nobody is left to go on; a rank that is silent or has left is noticed. `reason` says why it is this transport.
    """

    transport = "mpi"

    def __init__(self, meeting: Rendezvous, processes: Sequence[Process], reason: str = "asked for") -> None:
        self.rank, self.size, self.reason = meeting.rank, meeting.size, reason
        self.mpi = _import_mpi(meeting.rank)
        self._comm = _communicator(self.mpi, meeting)
        self._roll = Roll(meeting, processes)
        self._types = _types(self.mpi)
        self._ops = {Op.SUM: self.mpi.SUM, Op.MAX: self.mpi.MAX, Op.MIN: self.mpi.MIN}
        self._mail = [Mail(self, peer) for peer in range(self.size)]
        self._num_calls, self._previous = 0, 0
        self._known: set[tuple[int, int]] = set()

    def all_reduce(self, tensor: torch.Tensor, op: Op = Op.SUM) -> Work:
        """Combine `tensor` across the group, in place. bfloat16 is summed as float32, and rounded once."""
        flat = _in_memory(tensor)
        call = Call("all_reduce", flat.numel(), flat.dtype, op)
        if flat.dtype == torch.bfloat16:
            wide = flat.float()
            return CopiedWork(self._reduce(call, wide), flat, wide)
        return self._reduce(call, flat)

    def _reduce(self, call: Call, flat: torch.Tensor) -> Work:
        buffer, op = self.buffer(flat), self._ops[call.op]
        return self._start(call, lambda comm: comm.Iallreduce(self.mpi.IN_PLACE, buffer, op), flat)

    def reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor, op: Op = Op.SUM) -> Work:
        check_parts(tensor, out, self.size)
        part, flat = _in_memory(out), _in_memory(tensor)
        call = Call("reduce_scatter", flat.numel(), flat.dtype, op)
        if flat.dtype == torch.bfloat16:
            wide = part.float()
            return CopiedWork(self._scatter(call, wide, flat.float()), part, wide)
        return self._scatter(call, part, flat)

    def _scatter(self, call: Call, part: torch.Tensor, flat: torch.Tensor) -> Work:
        buffers, op = (self.buffer(flat), self.buffer(part)), self._ops[call.op]
        return self._start(call, lambda comm: comm.Ireduce_scatter_block(*buffers, op), part, flat)

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> Work:
        check_parts(out, tensor, self.size)
        whole, flat = _in_memory(out), _in_memory(tensor)
        call = Call("all_gather", flat.numel(), flat.dtype)
        return self._start(call, lambda comm: comm.Iallgather(self.buffer(flat), self.buffer(whole)), whole, flat)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Work:
        check_peer(root, self.size)
        flat = _in_memory(tensor)
        call = Call("broadcast", flat.numel(), flat.dtype, root=root)
        return self._start(call, lambda comm: comm.Ibcast(self.buffer(flat), root), flat)

    def send(self, tensor: torch.Tensor, to: int) -> Work:
        check_peer(to, self.size, self.rank)
        return self._mail[to].send(_in_memory(tensor))

    def recv(self, tensor: torch.Tensor, source: int) -> Work:
        check_peer(source, self.size, self.rank)
        return self._mail[source].recv(_in_memory(tensor))

    def barrier(self) -> None:
        self._start(Call("barrier"), lambda comm: comm.Ibarrier(), torch.empty(1)).wait()

    def close(self) -> None:
        """Leave. Peers that still wait for this rank get MemberLost."""
        comm, self._comm = self._comm, None
        if comm is None:
            return
        self._roll.leave(f"call/{self._num_calls}")
        self._mail.clear()
        # Freeing waits for nobody, unless something is still under way.
        if not self.mpi.Is_finalized() and not any(work.is_of(self) for work in _in_flight):
            comm.Free()

    def buffer(self, flat: torch.Tensor) -> list[Any]:
        """The memory of a tensor as MPI takes it."""
        memory = self.mpi.buffer.fromaddress(flat.data_ptr(), flat.numel() * flat.element_size())
        return [memory, self._types[flat.dtype]]

    def begin(self, begin: Callable[[Any], Any], look: Callable[[float], None], *tensors: torch.Tensor) -> "MpiWork":
        """Hand something to MPI. `look` is called while it takes long, with the time since which it is waited for."""
        if self._comm is None:
            raise UserError("The group is closed.", hint="form another to go on", rank=self.rank)
        try:
            return MpiWork(self, begin(self._comm), look, tensors)
        except self.mpi.Exception as error:
            raise self.failed(error) from error

    def failed(self, error: Exception) -> Exception:
        """What a failure inside of MPI means."""
        return self._roll.roll_call(str(error))

    def look_for(self, peer: int, began: float) -> None:
        """While a message takes long: raise if somebody has left or ended, or if this peer is silent too long."""
        self._roll.look_for_the_lost()
        if time.monotonic() - began >= self._roll.timeout_seconds:
            raise self._roll.silent([peer])

    def _start(self, call: Call, begin: Callable[[Any], Any], *tensors: torch.Tensor) -> Work:
        code, self._num_calls = call.code, self._num_calls + 1
        name, step = f"call/{self._num_calls}", (self._previous, code)
        if step not in self._known:
            self._roll.compare(name, code)
            self._known.add(step)
        self._previous = code
        if tensors[0].numel() == 0:
            return DONE
        return self.begin(begin, lambda began: self._roll.look(name, code, began), *tensors)


@timed_calls("wait")
class MpiWork:
    """Something MPI does, while somebody waits for it. Its tensors live until it is done, wanted or not."""

    def __init__(
        self, group: MpiGroup, request: Any, look: Callable[[float], None], tensors: Sequence[torch.Tensor]
    ) -> None:
        self._group, self._request, self._look, self._tensors = group, request, look, tensors
        _in_flight.add(self)

    def is_of(self, group: MpiGroup) -> bool:
        return self._group is group

    def wait(self) -> None:
        """Keep a core busy for 2 ms, as MPI does; from then on look again every 0.1 ms or so."""
        if self not in _in_flight:
            return
        try:
            if not self._request.Test():
                self._keep_testing()
        except self._group.mpi.Exception as error:
            raise self._group.failed(error) from error
        _in_flight.discard(self)

    def _keep_testing(self) -> None:
        test = self._request.Test
        began = looked = time.monotonic()
        while not test():
            now = time.monotonic()
            if now - looked >= LOOK_SECONDS:
                self._look(began)
                looked = now
            if now - began < _SPIN_SECONDS:
                os.sched_yield()  # the one we wait for may need this core
            else:
                time.sleep(_NAP_SECONDS)


class Mail:
    """Messages to and from one rank: a header with the sender's call, the receiver's in answer, and the body.

    MPI keeps the order of each of the three. The body sets out at once, and is taken only by who expects it.
    """

    def __init__(self, group: MpiGroup, peer: int) -> None:
        self._group, self._peer = group, peer
        self._asked = Asked(self._take)

    def send(self, flat: torch.Tensor) -> Work:
        code = Call("send", flat.numel(), flat.dtype).code
        answer = _word(0)
        reply = self._receive(answer, _ANSWER)
        return Sending(self, code, answer, [reply, self._send(_word(code), _HEADER), self._send(flat, _BODY)])

    def recv(self, flat: torch.Tensor) -> Work:
        return self._asked.ask(flat)

    def compare(self, code: int, word: torch.Tensor) -> None:
        if (theirs := int.from_bytes(bytes(word.tolist()), "little")) != code:
            raise disagreement(self._group.rank, code, self._peer, theirs)

    def _take(self, flat: torch.Tensor) -> None:
        code, header = Call("send", flat.numel(), flat.dtype).code, _word(0)
        self._receive(header, _HEADER).wait()
        self._send(_word(code), _ANSWER).wait()
        self.compare(code, header)
        self._receive(flat, _BODY).wait()

    def _send(self, flat: torch.Tensor, tag: int) -> Work:
        return self._begin(lambda comm: comm.Isend(self._group.buffer(flat), self._peer, tag), flat)

    def _receive(self, flat: torch.Tensor, tag: int) -> Work:
        return self._begin(lambda comm: comm.Irecv(self._group.buffer(flat), self._peer, tag), flat)

    def _begin(self, begin: Callable[[Any], Any], flat: torch.Tensor) -> Work:
        return self._group.begin(begin, lambda began: self._group.look_for(self._peer, began), flat)


@timed_calls("wait")
class Sending:
    """A message on its way; received once the answer is here and agrees."""

    def __init__(self, mail: Mail, code: int, answer: torch.Tensor, works: Sequence[Work]) -> None:
        self._mail, self._code, self._answer, self._works = mail, code, answer, works

    def wait(self) -> None:
        reply, *others = self._works
        reply.wait()
        self._mail.compare(self._code, self._answer)
        for work in others:
            work.wait()


def _import_mpi(rank: int) -> Any:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise UserError(
            "mpi4py is not installed, or does not find the MPI library.",
            why=f"transport 'mpi' needs it ({error})",
            hint="Run `pip install 'shoal[mpi]'`.",
            rank=rank,
        ) from None
    return MPI


def _communicator(mpi: Any, meeting: Rendezvous) -> Any:
    """A communicator of these ranks only, in which no other group's messages are seen."""
    world = mpi.COMM_WORLD
    ranks = [int(text) for text in meeting.gather("mpi", str(world.Get_rank()))]
    if len(set(ranks)) < meeting.size:
        raise UserError(
            f"{meeting.size} workers cannot talk over MPI: they are not ranks of one MPI job.",
            why=f"MPI counts {world.Get_size()} in its world here",
            hint="start them with `mpirun -n 4 shoal worker SCRIPT`, or use transport 'auto'",
            rank=meeting.rank,
        )
    return world.Create_group(world.Get_group().Incl(ranks))


def _types(mpi: Any) -> dict[torch.dtype, Any]:
    return {
        torch.float32: mpi.FLOAT,
        torch.float64: mpi.DOUBLE,
        torch.bfloat16: mpi.INT16_T,  # moved only, never combined
        torch.int32: mpi.INT32_T,
        torch.int64: mpi.INT64_T,
        torch.uint8: mpi.UINT8_T,
    }


def _in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The flat tensor, if MPI can reach it and count it."""
    if not tensor.is_cpu:
        raise UserError(
            f"MPI cannot move a tensor on {tensor.device} here.", hint="connect with transport='tcp' for NCCL"
        )
    if tensor.numel() > _MOST_ELEMENTS:
        raise UserError(
            f"MPI cannot move {tensor.numel()} elements at once.",
            why=f"it counts up to {_MOST_ELEMENTS}",
            hint="move it in parts, or use transport 'tcp'",
        )
    return flatten(tensor)


def _word(code: int) -> torch.Tensor:
    return torch.tensor(list(code.to_bytes(8, "little")), dtype=torch.uint8)
