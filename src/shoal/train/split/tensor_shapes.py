"""Rules for functions that change the shape of a tensor: where the cut is afterwards."""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch

from shoal.train.split.tensor_elements import Args, Kwargs, agree, from_behind, name_of, wrap
from shoal.train.split.tensor_portion import Layout, Portion, Stuck


def reshape(func: Any, args: Args, kwargs: Kwargs, portions: list[Portion]) -> Any:
    """Anything that keeps elements in their order."""
    portion = args[0]
    if not isinstance(portion, Portion) or any(isinstance(each, torch.dtype) for each in args):
        raise Stuck("only shapes can be changed")
    whole = tuple(func(_ghost(portion.whole), *(_ghost_of(each) for each in args[1:]), **kwargs).shape)
    layout = reshaped(portion.whole, whole, portion.cut)
    portion.region.divide(whole[layout.dim] // layout.blocks, portion)
    shape = list(whole)
    shape[layout.dim] //= portion.region.num_parts
    local = portion.local.view(shape) if func is torch.Tensor.view else portion.local.reshape(shape)
    return wrap(local, layout.dim, layout.blocks, [portion])


def reshaped(old: Sequence[int], new: Sequence[int], layout: Layout) -> Layout:
    """Where the cut is after a change of shape.

    As one row of numbers a tensor is `outer` runs, each of which is divided evenly among the parts. In the new
    shape, too, the dimensions before the cut, and its blocks, must make up just these runs.
    """
    outer, before = prod(old[: layout.dim]) * layout.blocks, 1
    for dim, size in enumerate(new):
        if outer % before:
            break
        blocks = outer // before
        if size % blocks == 0 and size > blocks:
            return Layout(dim, blocks)
        before *= size
    raise Stuck(f"a change of shape from {list(old)} to {list(new)} tears the parts of dimension {layout.dim} apart")


def _ghost(shape: Sequence[int]) -> torch.Tensor:
    """A tensor without values: what a function does to shapes can be seen on it, at little cost."""
    return torch.empty(shape, device="meta")


def _ghost_of(value: Any) -> Any:
    return _ghost(value.whole) if isinstance(value, Portion) else value


def move(func: Any, args: Args, kwargs: Kwargs, portions: list[Portion]) -> Any:
    """Dimensions change places, come, or go, but that of the cut stays whole: it is found by its stride."""
    portion = args[0]
    if not isinstance(portion, Portion) or any(isinstance(each, torch.Tensor) for each in _flat(args[1:])):
        raise Stuck("positions are given as a tensor")
    ghost = _ghost(portion.whole)
    size, stride = portion.whole[portion.cut.dim], ghost.stride(portion.cut.dim)
    moved = func(ghost, *args[1:], **kwargs)
    found = [dim for dim in range(moved.dim()) if (moved.shape[dim], moved.stride(dim)) == (size, stride)]
    if not found:
        raise Stuck(f"it takes some of dimension {portion.cut.dim}, which is cut")
    return wrap(func(portion.local, *args[1:], **kwargs), found[0], portion.cut.blocks, [portion])


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value


def expand(func: Any, args: Args, kwargs: Kwargs, portions: list[Portion]) -> Any:
    portion = args[0]
    sizes = list(args[1] if isinstance(args[1], list | tuple) else args[1:])
    dim = from_behind(portion)
    if sizes[dim] not in (-1, portion.whole[dim]):
        raise Stuck("it expands the dimension that is cut")
    sizes[dim] = -1
    return wrap(portion.local.expand(sizes), dim, portion.cut.blocks, portions)


def take_apart(func: Any, args: Args, kwargs: Kwargs, portions: list[Portion]) -> Any:
    """`chunk`, `split` and `unbind`; along the cut only between blocks."""
    portion, name = args[0], name_of(func)
    more = dict(zip(("dim",) if name == "unbind" else ("size", "dim"), args[1:], strict=False)) | dict(kwargs)
    dim = more.get("dim", 0) % len(portion.whole)
    if dim != portion.cut.dim:
        at = from_behind(portion) if dim < portion.cut.dim or name != "unbind" else portion.cut.dim
        return wrap(func(portion.local, *args[1:], **kwargs), at, portion.cut.blocks, portions)
    size = portion.whole[dim]
    sizes = list(_pieces(name, size, more))
    blocks = portion.cut.blocks
    if len(set(sizes)) > 1 or blocks % len(sizes):
        raise Stuck(f"it takes dimension {dim} apart, which is cut in {blocks} block(s), into {sizes}")
    return wrap(portion.local.chunk(len(sizes), dim), dim, blocks // len(sizes), portions)


def _pieces(name: str, size: int, more: Mapping[str, Any]) -> Sequence[int]:
    if name == "unbind":
        raise Stuck("it takes the dimension apart that is cut")
    if name == "chunk":
        return [len(each) for each in torch.arange(size).chunk(more.get("chunks", more.get("size")))]
    wanted = more.get("split_size_or_sections", more.get("split_size", more.get("size")))
    return [len(each) for each in torch.arange(size).split(wanted)]


def join(func: Any, args: Args, kwargs: Kwargs, portions: list[Portion]) -> Any:
    """`cat` and `stack`, along other dimensions than the cut."""
    first = agree(portions)
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    is_new = name_of(func) == "stack"
    # torch passes over `torch.tensor([])`, whatever the others are: a cache of keys begins with it in transformers.
    tensors = [each for each in args[0] if is_new or each.shape != (0,)]
    if len(portions) < len(tensors):
        raise Stuck("it joins parts and wholes", met_whole=True)
    dim %= len(first.whole) + is_new
    if dim == first.cut.dim and not is_new:
        raise Stuck("it joins along the dimension that is cut")
    at = first.cut.dim + (is_new and dim <= first.cut.dim)
    return wrap(func([each.local for each in tensors], dim), at, first.cut.blocks, portions)


def repeat_each(func: Any, args: Args, kwargs: Kwargs, portions: list[Portion]) -> Any:
    portion = args[0]
    repeats = args[1] if len(args) > 1 else kwargs["repeats"]
    dim = args[2] if len(args) > 2 else kwargs.get("dim")
    if dim is None or not isinstance(repeats, int):
        raise Stuck("it repeats by a tensor, or without a dimension")
    return wrap(portion.local.repeat_interleave(repeats, dim), portion.cut.dim, portion.cut.blocks, portions)
