"""Rules for functions that add up: along dimensions, products of matrices, attention."""

from typing import Any

import torch
import torch.nn.functional as F

from shoal.train.split.tensor_elements import Args, Kwargs, dropout, elementwise, from_behind, localize, wrap
from shoal.train.split.tensor_portion import Layout, Portion, Stuck, slice_of


def reduce(func: Any, args: Args, kwargs: Kwargs, portions: list[Portion]) -> Any:
    """Functions along some dimensions, which must not be cut."""
    portion = args[0]
    dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if dims is None or isinstance(dims, torch.Tensor | bool) or not isinstance(portion, Portion):
        raise Stuck("it looks at all of a tensor")
    over = {each % len(portion.whole) for each in (dims if isinstance(dims, list | tuple) else [dims])}
    if portion.cut.dim in over:
        raise Stuck(f"it needs all of dimension {portion.cut.dim}, which is cut")
    result = func(portion.local, *args[1:], **kwargs)
    size = (result if isinstance(result, torch.Tensor) else result[0]).dim()
    gone = sum(each < portion.cut.dim for each in over) if size < len(portion.whole) else 0
    return wrap(result, portion.cut.dim - gone, portion.cut.blocks, portions)


def glu(func: Any, args: Args, kwargs: Kwargs, portions: list[Portion]) -> Any:
    (portion,) = portions
    dim = kwargs.get("dim", args[1] if len(args) > 1 else -1) % len(portion.whole)
    blocks = portion.cut.blocks
    if dim == portion.cut.dim:
        if blocks % 2:
            raise Stuck("it takes halves of the dimension that is cut")
        blocks //= 2
    return wrap(F.glu(portion.local, dim), portion.cut.dim, blocks, portions)


def normalize(func: Any, args: Args, kwargs: Kwargs, portions: list[Portion]) -> Any:
    """`layer_norm` and `rms_norm` over dimensions behind the cut."""
    portion, shape = args[0], args[1] if len(args) > 1 else kwargs["normalized_shape"]
    if not isinstance(portion, Portion) or portion.cut.dim >= len(portion.whole) - len(shape):
        raise Stuck("it needs all of the dimension that is cut")
    local = [portion.local, *(_entered(each, portion) for each in args[1:])]
    named = {key: _entered(value, portion) for key, value in kwargs.items()}
    return wrap(func(*local, **named), portion.cut.dim, portion.cut.blocks, portions)


def _entered(value: Any, like: Portion) -> Any:
    """A whole tensor that every part uses as a whole."""
    if isinstance(value, Portion):
        raise Stuck("a part is used where a whole is needed")
    if isinstance(value, torch.Tensor) and value.requires_grad:
        like.region.admit(value, like)
        return like.region.enter(value)
    return value


def linear(func: Any, args: Args, kwargs: Kwargs, portions: list[Portion]) -> Any:
    """`F.linear` where the cut is not in the dimension that it adds up over, as where heads are."""
    portion = args[0]
    if not isinstance(portion, Portion) or portion.cut.dim == len(portion.whole) - 1:
        raise Stuck("it adds up over the dimension that is cut, and its weight is whole")
    local = [portion.local, *(_entered(each, portion) for each in args[1:])]
    named = {key: _entered(value, portion) for key, value in kwargs.items()}
    return wrap(func(*local, **named), portion.cut.dim, portion.cut.blocks, portions)


def matmul(func: Any, args: Args, kwargs: Kwargs, portions: list[Portion]) -> Any:
    """Products of many matrices, of which each part has some; or of some rows, or columns."""
    left, right = args
    first = portions[0]
    if all(from_behind(each) <= -3 for each in portions):
        return elementwise(func, args, kwargs, portions)
    if len(portions) == 2 or min(left.dim(), right.dim()) < 2:
        raise Stuck("it adds up over the dimension that is cut, or both factors are cut in different ones")
    if first is left and from_behind(left) == -2:
        return wrap(func(left.local, _entered(right, left)), -2, first.cut.blocks, portions)
    if first is right and from_behind(right) == -1:
        return wrap(func(_entered(left, right), right.local), -1, first.cut.blocks, portions)
    raise Stuck("it adds up over the dimension that is cut")


def einsum(func: Any, args: Args, kwargs: Kwargs, portions: list[Portion]) -> Any:
    equation, *tensors = args
    tensors = list(tensors[0]) if len(tensors) == 1 and isinstance(tensors[0], list | tuple) else tensors
    inputs, arrow, output = str(equation).replace(" ", "").partition("->")
    names = inputs.split(",")
    if "." in inputs or not arrow:
        raise Stuck("its equation has dots, or no result")
    cuts = {
        (names[i][each.cut.dim], each.cut.blocks, each.whole[each.cut.dim])
        for i, each in enumerate(tensors)
        if isinstance(each, Portion)
    }
    (letter, blocks, size), *others = cuts
    if others or letter not in output:
        raise Stuck("it adds up over the dimension that is cut")
    local = []
    for name, each in zip(names, tensors, strict=True):
        if isinstance(each, Portion):
            local.append(each.local)
            continue
        each = _entered(each, portions[0])
        where = name.find(letter)
        local.append(slice_of(Layout(where, blocks), size, portions[0].region).of(each) if where >= 0 else each)
    return wrap(func(equation, *local), output.index(letter), blocks, portions)


def attend(func: Any, args: Args, kwargs: Kwargs, portions: list[Portion]) -> Any:
    """Attention of which each part has some heads. Dropout draws for all heads, as one process does."""
    named = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)) | dict(
        kwargs
    )
    three = [named.pop(name) for name in ("query", "key", "value")]
    if not all(isinstance(each, Portion) for each in three):
        raise Stuck("queries, keys and values are not cut alike", met_whole=True)
    query = three[0]
    places = {(from_behind(each), each.cut.blocks) for each in three}
    if len(places) > 1 or from_behind(query) > -3:
        raise Stuck("queries, keys and values are not cut by heads")
    mask = named.pop("attn_mask", None)
    mask = localize(mask, query)
    rate = named.pop("dropout_p", 0.0)
    heads = [each.local for each in three]
    if rate:
        result = _attend_slowly(query, heads, mask, rate, **named)
    else:
        result = func(*heads, attn_mask=mask, **named)
    return wrap(result, from_behind(query), query.cut.blocks, portions)


def _attend_slowly(
    query: Portion,
    heads: list[torch.Tensor],
    mask: torch.Tensor | None,
    rate: float,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    q, k, v = heads
    if enable_gqa:
        k, v = (each.repeat_interleave(q.shape[-3] // each.shape[-3], -3) for each in (k, v))
    scores = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.transpose(-1, -2)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    cut = Portion(scores.softmax(-1), query.cut, query.region)
    dropped: Portion = dropout(F.dropout, [cut, rate, True], {}, [cut])
    return dropped.local.to(v.dtype) @ v
