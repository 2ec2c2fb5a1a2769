"""Rules for functions that act on each element of a part by itself, and what all rules have in common.

A rule is `rule(func, args, kwargs, portions)`: it calls `func` with the local parts, and says where the result is
cut. Where it does not hold it raises `Stuck`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shoal.train.split.tensor_portion import Layout, Portion, Stuck, cut_like, slice_of

Args = Sequence[Any]
Kwargs = Mapping[str, Any]
Rule = Callable[[Any, Args, Kwargs, list[Portion]], Any]


def name_of(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    return f".{func.__self__.__name__}" if name == "__get__" else name


def wrap(result: Any, dim: int, blocks: int, portions: Sequence[Portion]) -> Any:
    """The local result of a function, as a portion that is cut in `dim`, counted from behind if negative."""
    if isinstance(result, torch.Tensor):
        first = portions[0]
        sources = first.sources if len(portions) == 1 else first.sources.union(*(each.sources for each in portions))
        return Portion(result, Layout(dim % result.dim(), blocks), first.region, sources)
    if isinstance(result, list | tuple):
        wrapped = [wrap(each, dim, blocks, portions) for each in result]
        return type(result)(*wrapped) if hasattr(result, "_fields") else type(result)(wrapped)
    raise Stuck("its result is not a tensor")


def from_behind(portion: Portion) -> int:
    return portion.cut.dim - len(portion.whole)


def agree(portions: Sequence[Portion]) -> Portion:
    """The first of portions that are all cut alike."""
    first = portions[0]
    here = from_behind(first), first.cut.blocks, first.whole[first.cut.dim]
    for other in portions[1:]:
        if (from_behind(other), other.cut.blocks, other.whole[other.cut.dim]) != here:
            raise Stuck(f"tensors of {list(first.whole)} and {list(other.whole)} are cut in different places")
    return first


def localize(value: Any, like: Portion) -> Any:
    if isinstance(value, Portion):
        return value.local
    return cut_like(value, like) if isinstance(value, torch.Tensor) else value


def elementwise(func: Any, args: Args, kwargs: Kwargs, portions: list[Portion]) -> Any:
    first = agree(portions)
    local = [localize(each, first) for each in args]
    named = {key: localize(value, first) for key, value in kwargs.items()}
    result = func(*local, **named)
    if result is local[0] and isinstance(args[0], Portion):  # changed in place
        return args[0]
    return wrap(result, from_behind(first), first.cut.blocks, portions)


def convert(func: Any, args: Args, kwargs: Kwargs, portions: list[Portion]) -> Any:
    """`to` and the like: another tensor among the arguments only says what type is meant."""
    if not isinstance(args[0], Portion):
        return func(args[0], *(getattr(each, "local", each) for each in args[1:]), **kwargs)
    local = [getattr(each, "local", each) for each in args]
    return wrap(func(*local, **kwargs), args[0].cut.dim, args[0].cut.blocks, [args[0]])


def dropout(func: Any, args: Args, kwargs: Kwargs, portions: list[Portion]) -> Any:
    """Random numbers are drawn for the whole, by every part: so they are those of one process."""
    (portion,) = portions
    named = dict(zip(("p", "training"), args[1:], strict=False)) | dict(kwargs)
    rate, is_on = named.get("p", 0.5), named.get("training", named.get("train", True))
    if not rate or not is_on:
        return portion
    # Numbers are drawn in the order of memory, so the whole must lie in memory as the part does.
    order = sorted(range(portion.local.dim()), key=portion.local.stride, reverse=True)
    ones = torch.empty_permuted(portion.whole, order, dtype=portion.local.dtype, device=portion.local.device).fill_(1)
    noise = torch.nn.functional.dropout(ones, rate, True)
    mine = slice_of(portion.cut, portion.whole[portion.cut.dim], portion.region).of(noise)
    return wrap(portion.local * mine, portion.cut.dim, portion.cut.blocks, portions)


def draw_like(func: Any, args: Args, kwargs: Kwargs, portions: list[Portion]) -> Any:
    (portion,) = portions
    drawn = func(portion.local.new_empty(portion.whole), *args[1:], **kwargs)
    mine = slice_of(portion.cut, portion.whole[portion.cut.dim], portion.region).of(drawn)
    return wrap(mine, portion.cut.dim, portion.cut.blocks, portions)


def fact(func: Any, args: Args, kwargs: Kwargs, portions: list[Portion]) -> Any:
    """What is the same of a portion and of the whole."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def local_fact(func: Any, args: Args, kwargs: Kwargs, portions: list[Portion]) -> Any:
    return func(args[0].local, *args[1:], **kwargs)
