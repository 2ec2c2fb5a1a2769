"""The Group protocol: flat tensors in, the same tensors out, on every rank."""

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

import torch

from shoal.spec.errors import MemberLost, UserError


class Op(IntEnum):
    """How the values of the ranks become one."""

    SUM = 0
    MAX = 1
    MIN = 2


class Work(Protocol):
    """Something under way. The tensors it was given belong to it until `wait` returns."""

    def wait(self) -> None:
        """Block until done. Raises MemberLost when a rank is gone or silent, UserError when the ranks disagree."""
        ...


class Done:
    """Work that was finished before its call returned."""

    def wait(self) -> None:
        return


DONE = Done()


class CopiedWork:
    """Work whose result, or a part of it, is copied to `out` once it is done."""

    def __init__(self, work: Work, out: torch.Tensor, result: torch.Tensor) -> None:
        self._work, self._out, self._result = work, out, result

    def wait(self) -> None:
        self._work.wait()
        self._out.copy_(self._result)


class Group(Protocol):
    """Moves flat, contiguous tensors between the ranks of one World.

    Every rank makes the same calls in the same order, with equal sizes, dtypes and ops; where they disagree every
    rank gets a UserError that names both sides. After a reduction all ranks hold the same bits. A lost or silent rank
    raises MemberLost (its `ranks` names who) on every survivor; the tensors are then undefined and the group is good
    only for `close`.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def all_reduce(self, tensor: torch.Tensor, op: Op = Op.SUM) -> Work:
        """Combine `tensor` across the group, in place."""
        ...

    def reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor, op: Op = Op.SUM) -> Work:
        """Combine `tensor` across the group; `out` gets this rank's part, 1/size of it."""
        ...

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> Work:
        """Fill `out` with every rank's `tensor`, in rank order."""
        ...

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Work:
        """Give every rank the root's values."""
        ...

    def send(self, tensor: torch.Tensor, to: int) -> Work:
        """Hand `tensor` to one rank. `wait` may block until it was received."""
        ...

    def recv(self, tensor: torch.Tensor, source: int) -> Work:
        """Fill `tensor` from the matching `send` of one rank; messages of a pair arrive in order."""
        ...

    def barrier(self) -> None:
        """Return when every rank has called it."""
        ...

    def close(self) -> None:
        """Leave. Never waits for anyone; may be called twice."""
        ...


KINDS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "send", "barrier", "share", "common")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64, torch.uint8)
_KIND_BITS = {kind: code << 60 for code, kind in enumerate(KINDS, start=1)}
_OP_BITS = {op: int(op) << 56 for op in Op}
_DTYPE_BITS = {dtype: code << 52 for code, dtype in enumerate(DTYPES)}


class Call(NamedTuple):
    """What a rank asked for, small enough to compare in one 64-bit word: two calls match when their codes do."""

    kind: str
    numel: int = 0
    dtype: torch.dtype = torch.uint8
    op: Op = Op.SUM
    root: int = 0

    @property
    def code(self) -> int:
        """kind 4 bits, op 4, dtype 4, root 12, numel 40; never zero, so that zero means nothing was asked."""
        kind, numel, dtype, op, root = self
        return _KIND_BITS[kind] | _OP_BITS[op] | _DTYPE_BITS[dtype] | root << 40 | numel

    @classmethod
    def of(cls, code: int) -> "Call":
        dtype, op = DTYPES[code >> 52 & 15], Op(code >> 56 & 15)
        return cls(KINDS[(code >> 60) - 1], code & (1 << 40) - 1, dtype, op, code >> 40 & 0xFFF)

    def __str__(self) -> str:
        if self.kind == "barrier":
            return "barrier"
        what = f"{self.kind} of {self.numel} {str(self.dtype).removeprefix('torch.')}"
        if self.kind == "broadcast":
            return f"{what} from rank {self.root}"
        return f"{what}, {self.op.name.lower()}" if "reduce" in self.kind else what


def flatten(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as one dimension, sharing its memory; refuses what a group cannot move."""
    if tensor.dtype not in _DTYPE_BITS:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise UserError(f"A group cannot move {tensor.dtype}.", hint=f"convert to one of: {known}")
    if not tensor.is_contiguous():
        raise UserError(
            f"A group moves contiguous tensors; this {tuple(tensor.shape)} one has strides {tensor.stride()}.",
            hint="pass `tensor.contiguous()` and copy the result back",
        )
    if tensor.numel() == 0:  # may have any strides, even zero
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    flat = tensor.detach() if tensor.requires_grad else tensor
    return flat if flat.dim() == 1 else flat.view(-1)


def check_parts(whole: torch.Tensor, part: torch.Tensor, size: int) -> None:
    """A whole must be `size` parts of the same dtype."""
    if whole.numel() != part.numel() * size or whole.dtype != part.dtype:
        raise UserError(
            f"{whole.numel()} {whole.dtype} cannot be {size} parts of {part.numel()} {part.dtype}.",
            hint=f"the larger tensor must hold exactly {size} times the smaller, in the same dtype",
        )


def check_peer(peer: int, size: int, rank: int = -1) -> None:
    """The other side of a call must be a rank of the group, and not ourselves."""
    if not 0 <= peer < size or peer == rank:
        raise UserError(f"Rank {peer} is not a possible partner in a group of {size}.", hint="ranks count from zero")


def disagreement(rank: int, mine: int, other: int, theirs: int) -> UserError:
    """The error for two ranks that made different calls; the arguments are `Call.code`s."""
    return UserError(
        f"Ranks disagree: rank {rank} called {Call.of(mine)}; rank {other} called {Call.of(theirs)}.",
        why="every rank must make the same calls in the same order, with equal sizes, dtypes and ops",
        hint="look for a branch that depends on the rank or on its data",
        rank=rank,
    ).blame("shape_mismatch", (rank, other))


def lost(ranks: Sequence[int], message: str, *, why: str, rank: int) -> MemberLost:
    """A MemberLost that knows which ranks are missing."""
    error = MemberLost(message, why=why, hint="form a new group with the next generation, without them", rank=rank)
    error.ranks = tuple(ranks)
    return error


def name_ranks(ranks: Sequence[int]) -> str:
    """`rank 3` or `ranks 1, 3`."""
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks))}"
