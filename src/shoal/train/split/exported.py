"""A model's forward as torch.export writes it down: every operation by itself, with sizes that may vary.

It follows code that writing down layers cannot, such as code that asks for types. What it costs: layers are taken
apart, so hooks that they have are not called, and nothing is recomputed: `programs` refuses models that want that.
"""

import inspect
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from shoal.spec.errors import UserError
from shoal.train.split.stages import Program
from shoal.train.split.tracing import Untraceable, is_layer

GUARDS = "_guards_fn"
"""What torch.export calls the check that a call is like the one it has seen."""


def export_layers(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], cuts: Sequence[str]) -> Program:
    """The forward as operations, each of which knows its layer. Raises Untraceable where torch.export cannot."""
    device = next(model.parameters()).device.type
    try:
        with _quietly(), torch.autocast(device, enabled=False):
            exported = torch.export.export(
                model, tuple(args), dict(kwargs), dynamic_shapes=_any_sizes(model, args, kwargs), strict=False
            )
            module = exported.module()
    except Exception as error:
        text = str(error).strip().splitlines()
        raise Untraceable("", f"torch.export: {text[0] if text else type(error).__name__}") from error
    assert isinstance(module, fx.GraphModule)
    leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
    graph, constants = _plain_graph(model, module, leaves)
    return Program(model, graph, constants, {node: _layer_of(node, model, cuts) for node in graph.nodes})


@contextmanager
def _quietly() -> Iterator[None]:
    """Sizes of 1 are fixed, of which it warns; a size that changes is an error later."""
    logger = logging.getLogger("torch._export.non_strict_utils")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _any_sizes(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """By argument of the forward: all sizes may vary."""

    def free(value: Any) -> Any:
        return [torch.export.Dim.AUTO] * value.dim() if isinstance(value, torch.Tensor) else None

    bound = inspect.signature(model.forward).bind(*args, **kwargs)
    return {name: pytree.tree_map(free, value) for name, value in bound.arguments.items()}


def _plain_graph(model: nn.Module, module: fx.GraphModule, leaves: Sequence[Any]) -> tuple[fx.Graph, dict[str, Any]]:
    """The graph with tensors as its only inputs and the model's own output, and what it reads besides the model."""
    graph, copied = fx.Graph(), dict[fx.Node, Any]()
    constants: dict[str, Any] = {"_shoal_spec": module._out_spec}
    given = iter(leaves)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            leaf = next(given)
            copied[node] = graph.placeholder(node.name) if isinstance(leaf, torch.Tensor) else leaf
        elif node.op == "output":
            flat = fx.node.map_arg(node.args[0], copied.__getitem__)
            spec = graph.get_attr("_shoal_spec")
            graph.output(graph.call_function(pytree.tree_unflatten, (list(flat), spec)))
        else:
            copied[node] = graph.node_copy(node, copied.__getitem__)
            if node.op in ("get_attr", "call_module") and not _has(model, str(node.target)):
                constants[str(node.target)] = _read(module, str(node.target))
    return graph, constants


def _read(module: nn.Module, name: str) -> Any:
    if name != GUARDS:
        return module.get_submodule(name) if "." not in name and name in module._modules else getattr(module, name)
    guards = module.get_submodule(name)

    def check(*args: Any) -> None:
        try:
            guards(*args)
        except AssertionError as error:
            raise UserError(
                "The model was given sizes that it was not cut for.",
                why=str(error).strip().splitlines()[0] if str(error) else "torch.export fixed a size",
                hint="give all batches the same shape but for the number of samples",
            ) from None

    return check


def _has(model: nn.Module, name: str) -> bool:
    owner, _, last = name.rpartition(".")
    try:
        return hasattr(model.get_submodule(owner), last)
    except AttributeError:
        return False


def _layer_of(node: fx.Node, model: nn.Module, cuts: Sequence[str]) -> str:
    """The outermost layer whose operation it is; "" for what is between layers."""
    for name, _ in (node.meta.get("nn_module_stack") or {}).values():
        bare = name.partition("@")[0]
        if bare and _has(model, bare) and is_layer(model, model.get_submodule(bare), bare, within=cuts):
            return str(bare)
    return ""
