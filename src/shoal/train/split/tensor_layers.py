"""Layers of which each part holds a slice: what of their parameters, and how they compute with it."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from shoal.train.split.tensor_attention import attend
from shoal.train.split.tensor_portion import Layout, Parts, Portion, Stuck, slice_of

Style = Literal["colwise", "rowwise", "embedding", "heads"]


@dataclass(frozen=True, slots=True)
class LayerCut:
    """How a layer is cut.

    colwise: by outputs, which leave it cut. rowwise: by inputs, and the parts' outputs are added up. embedding: by
    rows of its table. heads: a whole `nn.MultiheadAttention`, by heads. `blocks`: see `Slice`.
    """

    style: Style
    blocks: int = 1

    def __str__(self) -> str:
        return self.style if self.blocks == 1 else f"{self.style} in {self.blocks} blocks"


def is_linear(module: nn.Module) -> bool:
    """`nn.Linear`, and the `Conv1D` of older transformers; not what computes in another way than these."""
    is_ours = type(module).forward is nn.Linear.forward or is_transposed(module)
    return is_ours and "weight" in module._parameters


def is_transposed(module: nn.Module) -> bool:
    """Whether the weight is stored as (inputs, outputs)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and not isinstance(module, nn.Linear)


def features_of(module: nn.Module) -> tuple[int, int]:
    """Inputs and outputs of a linear layer, as a whole."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    first, second = weight.shape
    return (first, second) if is_transposed(module) else (second, first)


def cut_parameters(module: nn.Module, cut: LayerCut) -> Iterator[tuple[str, Layout]]:
    """The parameters of a layer that are cut, by name, and where."""
    if cut.style == "heads":
        names = {"in_proj_weight": 3, "in_proj_bias": 3, "q_proj_weight": 1, "k_proj_weight": 1, "v_proj_weight": 1}
        yield from ((name, Layout(0, blocks)) for name, blocks in names.items() if getattr(module, name) is not None)
        yield "out_proj.weight", Layout(1)
        return
    is_second = (cut.style == "rowwise") != is_transposed(module)
    yield "weight", Layout(int(is_second), cut.blocks)
    if cut.style == "colwise" and module.bias is not None:
        yield "bias", Layout(0, cut.blocks)


def install(module: nn.Module, cut: LayerCut, parts: Parts) -> None:
    """Let a layer, whose parameters are slices from now on, compute with the other parts."""
    compute = {"colwise": _by_outputs, "rowwise": _by_inputs, "embedding": _by_rows, "heads": _by_heads}[cut.style]
    module.forward = partial(compute, module, cut, parts)


def _whole(value: Any) -> Any:
    return value.region.gather(value, Stuck("a layer needs all of it")) if isinstance(value, Portion) else value


def _multiply(module: Any, value: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(value, module.weight.t() if is_transposed(module) else module.weight, bias)


def _by_outputs(module: Any, cut: LayerCut, parts: Parts, input: torch.Tensor) -> torch.Tensor:
    result = _multiply(module, parts.enter(_whole(input)), module.bias)
    return Portion(result, Layout(result.dim() - 1, cut.blocks), parts)


def _by_inputs(module: Any, cut: LayerCut, parts: Parts, input: torch.Tensor) -> torch.Tensor:
    layout = Layout(input.dim() - 1, cut.blocks)
    if isinstance(input, Portion) and input.cut == layout:
        local = input.local
    else:
        local = slice_of(layout, input.shape[-1], parts).of(parts.enter(_whole(input)))
    result = parts.leave(_multiply(module, local, None))
    return result if module.bias is None else result + module.bias.to(result.dtype)


def _by_rows(module: nn.Embedding, cut: LayerCut, parts: Parts, input: torch.Tensor) -> torch.Tensor:
    num_rows = module.weight.shape[0]
    ids = input - parts.part * num_rows
    is_ours = (ids >= 0) & (ids < num_rows)
    padding = None if module.padding_idx is None else module.padding_idx - parts.part * num_rows
    padding = padding if padding is not None and 0 <= padding < num_rows else None
    rows = F.embedding(ids.where(is_ours, 0), module.weight, padding, scale_grad_by_freq=module.scale_grad_by_freq)
    return parts.leave(rows.masked_fill(~is_ours.unsqueeze(-1), 0.0))


def _by_heads(module: nn.MultiheadAttention, cut: LayerCut, parts: Parts, *args: Any, **kwargs: Any) -> Any:
    wholes: list[Any] = [_whole(each) for each in args]
    return attend(module, parts, *wholes, **{key: _whole(value) for key, value in kwargs.items()})
