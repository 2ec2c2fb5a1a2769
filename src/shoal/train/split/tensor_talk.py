"""What the parts of a cut layer say to each other, in forward and in backward."""

from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from shoal.comm.group import DTYPES, Group


def enter(whole: torch.Tensor, group: Group) -> torch.Tensor:
    """The same tensor, of which each part will make something else: the parts' gradients of it are added up."""
    result: torch.Tensor = _Enter.apply(whole, group)  # type: ignore[no-untyped-call]
    return result


def leave(term: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum of the parts' terms, the same bits on all; `term` is used up. Each term's gradient is the sum's."""
    result: torch.Tensor = _Leave.apply(term, group)  # type: ignore[no-untyped-call]
    return result


def gather(local: torch.Tensor, group: Group, dim: int, blocks: int) -> torch.Tensor:
    """The whole of which the parts have slices along `dim`, in `blocks` blocks; their gradients are slices of its."""
    result: torch.Tensor = _Gather.apply(local, group, dim, blocks)  # type: ignore[no-untyped-call]
    return result


class _Enter(Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        # A copy: what autograd hands out may be somebody else's gradient, too.
        return _add_up(gradient.clone(memory_format=torch.contiguous_format), ctx.group), None


class _Leave(Function):
    @staticmethod
    def forward(ctx: Any, term: torch.Tensor, group: Group) -> torch.Tensor:
        if not term.is_contiguous() or term.dtype not in DTYPES:
            return _add_up(term.clone(memory_format=torch.contiguous_format), group)
        ctx.mark_dirty(term)
        return _add_up(term, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, group: Group, dim: int, blocks: int) -> torch.Tensor:
        ctx.group, ctx.dim, ctx.blocks = group, dim, blocks
        data = local.contiguous()
        everyone = data.new_empty(group.size, *data.shape)
        # As bytes, because a group moves only some types.
        group.all_gather(everyone.view(-1).view(torch.uint8), data.view(-1).view(torch.uint8)).wait()
        whole: torch.Tensor = everyone.unflatten(dim + 1, (blocks, -1)).movedim(0, dim + 1).flatten(dim, dim + 2)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        group = ctx.group
        mine = gradient.unflatten(ctx.dim, (ctx.blocks, group.size, -1)).select(ctx.dim + 1, group.rank)
        return mine.flatten(ctx.dim, ctx.dim + 1), None, None, None


def _add_up(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """In place, where the group knows the type."""
    if tensor.dtype in DTYPES:
        group.all_reduce(tensor).wait()
        return tensor
    wider = tensor.float()
    group.all_reduce(wider).wait()
    return wider.to(tensor.dtype)
