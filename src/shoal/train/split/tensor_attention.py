"""`nn.MultiheadAttention` of which each part has some heads."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from shoal.train.split.tensor_portion import Layout, Parts, Portion, Stuck


def attend(
    module: nn.MultiheadAttention,
    parts: Parts,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_padding_mask: torch.Tensor | None = None,
    need_weights: bool = True,
    attn_mask: torch.Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What the module's own forward gives, from our heads and the others'. Dropout draws as one process does."""
    is_single, batch_dim = query.dim() == 2, 0 if module.batch_first else 1
    three = [query, key, value]
    if is_single:
        three = _each_once(three, lambda each: each.unsqueeze(batch_dim))
    if not module.batch_first:
        three = _each_once(three, lambda each: each.transpose(0, 1))
    q, k, v = (_heads(module, each) for each in _project(module, parts, three))
    mask = _mask(attn_mask, key_padding_mask, q)
    rate = module.dropout if module.training else 0.0
    if need_weights:
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
        seen = F.dropout((scores if mask is None else scores + mask).softmax(-1), rate)
        found, weights = seen @ v, _weights(seen, parts, average_attn_weights)
    else:
        is_plain = is_causal and key_padding_mask is None
        mask = None if is_plain else mask
        found, weights = F.scaled_dot_product_attention(q, k, v, mask, rate, is_causal=is_plain), None
    # In the order of memory that the module's own forward leaves: dropout that follows draws in that order.
    result = _out(module, parts, found.permute(2, 0, 1, 3).flatten(2))
    if module.batch_first:
        result = result.transpose(0, 1)
    if is_single:
        result, weights = result.squeeze(batch_dim), None if weights is None else weights.squeeze(0)
    return result, weights


def _each_once(tensors: list[torch.Tensor], function: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """Apply a function, so that those that were the same tensor still are."""
    made = {id(each): function(each) for each in tensors}
    return [made[id(each)] for each in tensors]


def _project(module: nn.MultiheadAttention, parts: Parts, three: list[torch.Tensor]) -> list[Portion]:
    """Our part of queries, keys and values: in one product where they are made from the same."""
    biases: tuple[torch.Tensor | None, ...] = (None, None, None)
    if module.in_proj_bias is not None:
        biases = module.in_proj_bias.chunk(3)
    weights = (
        (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        if module.in_proj_weight is None
        else module.in_proj_weight.chunk(3)
    )
    if module.in_proj_weight is not None and three[0] is three[1] is three[2]:
        made = list(F.linear(parts.enter(three[0]), module.in_proj_weight, module.in_proj_bias).chunk(3, -1))
    else:
        made = [F.linear(parts.enter(x), w, b) for x, w, b in zip(three, weights, biases, strict=True)]
    return [Portion(each, Layout(2), parts) for each in made]


def _heads(module: nn.MultiheadAttention, value: Portion) -> torch.Tensor:
    return value.view(*value.whole[:2], module.num_heads, -1).transpose(1, 2)


def _mask(
    attn_mask: torch.Tensor | None, key_padding_mask: torch.Tensor | None, q: torch.Tensor
) -> torch.Tensor | None:
    """Both masks as one that is added: (batch or 1, heads or 1, queries, keys)."""
    mask = None
    if attn_mask is not None:
        mask = _added(attn_mask, q)
        mask = mask.unflatten(0, (q.shape[0], -1)) if mask.dim() == 3 else mask[None, None]
    if key_padding_mask is not None:
        padding = _added(key_padding_mask, q)
        padding = (padding if padding.dim() == 2 else padding[None])[:, None, None, :]
        mask = padding if mask is None else mask + padding
    return mask


def _added(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros(mask.shape, dtype=like.dtype, device=mask.device).masked_fill_(mask, float("-inf"))


def _weights(seen: torch.Tensor, parts: Parts, is_average: bool) -> torch.Tensor:
    assert isinstance(seen, Portion)
    if is_average:
        return parts.leave(seen.local.sum(1) / seen.whole[1])
    return parts.gather(seen, Stuck("weights of all heads are asked for"))


def _out(module: nn.MultiheadAttention, parts: Parts, found: torch.Tensor) -> torch.Tensor:
    assert isinstance(found, Portion)
    result = parts.leave(F.linear(found.local, module.out_proj.weight))
    return result if module.out_proj.bias is None else result + module.out_proj.bias.to(result.dtype)
