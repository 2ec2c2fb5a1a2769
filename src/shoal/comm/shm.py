"""A group of processes on one host that share memory.

Tensors that live in memory made by `share` are combined where they are: each rank reduces its slice straight out of
everyone's buffer and writes it into everyone's. Other tensors pass through a stage small enough to stay in the cache.
The caller's thread does the work before the call returns; only a `send` that finds its boxes full goes on in another.
"""

import os
import weakref
from collections.abc import Callable, Sequence

import torch

from shoal.comm import collectives
from shoal.comm.board import NUM_CHANNELS, Board, Numbers
from shoal.comm.collectives import Plan
from shoal.comm.group import DONE, Call, Op, Work, check_parts, check_peer, flatten
from shoal.comm.meeting import Meeting, Shared
from shoal.comm.pairs import BOX_BYTES, Pairs
from shoal.comm.passing import Swap
from shoal.spec.errors import UserError
from shoal.spec.spans import timed_calls


@timed_calls("all_reduce", "reduce_scatter", "all_gather", "broadcast", "send", "recv", "barrier")
class ShmGroup:
    """Ranks that meet on a `Board` and `swap` memory. `leave` is called once at the end, to close what they met over.

    `reason` says why it is this transport. `before` is a group that this one takes the place of: memory that has a
    name goes over into it.

    For those who combine tensors themselves: memory (`share`, `common`), monotonic counters on 16 channels
    (`signal`, `wait`) that carry the time of arrival, and a tiny gather of numbers (`post`, `peers`).
    """

    transport = "shm"

    def __init__(
        self,
        board: Board,
        swap: Swap,
        leave: Callable[[], None] = lambda: None,
        reason: str = "",
        before: "ShmGroup | None" = None,
    ) -> None:
        self.rank, self.size, self.reason = board.rank, board.size, reason
        self._board = board
        # Also at interpreter exit: a rank that ends well has left, and is not taken for lost.
        self._close = weakref.finalize(self, _close, board, leave, os.getpid())
        self._meeting: Meeting = Meeting(board, swap, before._meeting.kept if before is not None else None)
        self._pairs = Pairs(board, self._meeting.share_sparsely(2 * BOX_BYTES * self.size).all)

    def share(self, num_bytes: int, name: str = "") -> Shared:
        """Make memory that tensors can live in: one piece a rank, visible to all. A collective.

        It lasts as long as the group, and longer while a tensor on it lives. Taking the pages costs 0.3 ms a MiB.
        With a name, ranks that had memory of that name and size in the group before have it again, as they left it.
        """
        return self._meeting.share(num_bytes, name)

    def common(self, num_bytes: int, name: str = "") -> torch.Tensor:
        """Make one piece of memory that all ranks map: bytes, page aligned, zero at first. A collective.

        With a name, it is what rank 0 had of that name and size in the group before, as it was left.
        """
        return self._meeting.common(num_bytes, name)

    def signal(self, channel: int, value: int) -> None:
        """Tell everyone that this rank has reached `value` on a channel (0 to 15); values only grow.

        Whoever sees the value sees everything this rank wrote before it.
        """
        assert 0 <= channel < NUM_CHANNELS
        self._board.signal(channel, value)

    def wait(self, channel: int, value: int, ranks: Sequence[int] | None = None) -> int:
        """Return when the ranks (default: all others) have reached `value`: the rank that arrived last, maybe us."""
        return self._board.wait(channel, value, ranks)

    def counters(self, channel: int) -> list[int]:
        """How far each rank has come on a channel; of those that have ended this is final."""
        return self._board.counters(channel)

    def arrivals(self, channel: int, value: int) -> list[int]:
        """When each rank reached `value`, in ns of the host's monotonic clock.

        Holds after `wait` for that value, until someone signals that value plus two.
        """
        return self._board.arrivals(channel, value)

    @property
    def late_seconds(self) -> list[float]:
        """How long this rank has waited so far, by the rank that was last to arrive; collectives included."""
        return self._board.late_seconds

    def post(self, numbers: Numbers) -> None:
        """Show up to 64 numbers, float64 or int64, to all ranks, who all post equally many and then call `peers`."""
        self._board.post(numbers)

    def peers(self) -> Numbers:
        """Everyone's posted numbers, one row a rank."""
        return self._board.peers()

    def all_reduce(self, tensor: torch.Tensor, op: Op = Op.SUM) -> Work:
        """Combine `tensor` across the group, in place. Done when it returns; see `all_reduce_plan` to repeat it."""
        self.all_reduce_plan(tensor, op)()
        return DONE

    def all_reduce_plan(self, tensor: torch.Tensor, op: Op = Op.SUM) -> Plan:
        """An `all_reduce` prepared for a tensor that is reduced again and again; call it to do it.

        Preparing costs some 10 µs and 5 µs a MiB; a 4 KB plan then takes 4 µs, where all is quiet.
        """
        return collectives.plan_all_reduce(self._meeting, _in_memory(tensor), op)

    def reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor, op: Op = Op.SUM) -> Work:
        check_parts(tensor, out, self.size)
        collectives.reduce_scatter(self._meeting, _in_memory(out), _in_memory(tensor), op)
        return DONE

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> Work:
        check_parts(out, tensor, self.size)
        collectives.all_gather(self._meeting, _in_memory(out), _in_memory(tensor))
        return DONE

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Work:
        check_peer(root, self.size)
        collectives.broadcast(self._meeting, _in_memory(tensor), root)
        return DONE

    def send(self, tensor: torch.Tensor, to: int) -> Work:
        check_peer(to, self.size, self.rank)
        return self._pairs.send(_in_memory(tensor), to)

    def recv(self, tensor: torch.Tensor, source: int) -> Work:
        check_peer(source, self.size, self.rank)
        return self._pairs.recv(_in_memory(tensor), source)

    def barrier(self) -> None:
        self._meeting.agree(Call("barrier").code)

    def close(self) -> None:
        self._close()
        # What they hold refers back to them; memory nobody uses shall not wait for the garbage collector.
        vars(self).pop("_meeting", None)
        if (pairs := vars(self).pop("_pairs", None)) is not None:
            pairs.close()


def _in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The flat tensor, if it is in main memory."""
    if not tensor.is_cpu:
        raise UserError(
            f"Shared memory cannot hold a tensor on {tensor.device}.", hint="connect with transport='tcp' for NCCL"
        )
    return flatten(tensor)


def _close(board: Board, leave: Callable[[], None], pid: int) -> None:
    # A forked child has a copy of the group, but it is not the member.
    if os.getpid() == pid:
        board.close()
        leave()
