"""A model's forward as torch.export writes it down: every operation, with sizes that may vary."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from shoal.train.split.stages import Program
from shoal.train.split.tracing import CONTAINERS, Untraceable


def export_layers(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], cuts: Sequence[str]) -> Program:
    """The forward as operations, each of which knows its layer. Layers are taken apart: they run as exported."""
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            shapes = pytree.tree_map(_any_size, (tuple(args), dict(kwargs)))
            exported = torch.export.export(
                model, tuple(args), dict(kwargs), dynamic_shapes=_by_name(model, shapes), strict=False
            )
            module = exported.module()
    except Exception as error:
        text = str(error).strip().splitlines()
        raise Untraceable("", f"torch.export: {text[0] if text else type(error).__name__}") from error
    assert isinstance(module, fx.GraphModule)
    return Program(model, *_plain_graph(model, module, cuts))


def _any_size(value: Any) -> Any:
    return [torch.export.Dim.AUTO] * value.dim() if isinstance(value, torch.Tensor) else None


def _by_name(model: nn.Module, shapes: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    import inspect

    bound = inspect.signature(model.forward).bind(*shapes[0], **shapes[1])
    return dict(bound.arguments)


def _plain_graph(
    model: nn.Module, module: fx.GraphModule, cuts: Sequence[str]
) -> tuple[fx.Graph, dict[str, Any], dict[fx.Node, str]]:
    raise Untraceable("", "not yet")
