"""Writes a model's forward down in the first way that works: in layers, in finer ones, or as torch.export does."""

import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from shoal.spec.errors import UserError
from shoal.train.split.exported import export_layers
from shoal.train.split.stages import Program
from shoal.train.split.tracing import LayerTracer, Untraceable, trace_layers


def write_down(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], num_stages: int, cuts: Sequence[str]
) -> Program:
    """The forward as calls of at least so many layers, if there are. Raises UserError where it cannot be followed."""
    best: Program | None = None
    failure: Untraceable | None = None
    for is_fine in (False, True):
        try:
            tracer = trace_layers(model, args, kwargs, is_fine=is_fine, within=cuts)
        except Untraceable as error:
            failure = failure or error
            break
        best = Program(model, tracer.graph, tracer.constants, layer_names(tracer))
        if len(best.layers) >= num_stages:
            return best
    try:
        found = export_layers(model, args, kwargs, cuts)
    except Untraceable as error:
        failure = failure or error
    else:
        if best is None or len(found.layers) > len(best.layers):
            refuse_recomputing(model, args, kwargs, failure)
            return found
    if best is not None:
        return best
    assert failure is not None
    raise cannot_follow(model, failure)


def layer_names(tracer: LayerTracer) -> dict[fx.Node, str]:
    """The calls of layers: directly, or through `checkpoint(layer, ...)`."""
    names: dict[fx.Node, str] = {}
    for node in tracer.graph.nodes:
        if node.op == "call_module":
            names[node] = str(node.target)
        elif node.op == "call_function" and node.target is checkpoint and isinstance(node.args[0], fx.Node):
            names[node] = str(node.args[0].target)
    return names


def refuse_recomputing(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], failure: Untraceable | None
) -> None:
    """Where layers are taken apart, activations that are to be recomputed would be kept, and may not fit."""
    if is_recomputing(model, args, kwargs):
        reason = failure.why if failure is not None else "its layers are fewer than the stages"
        raise UserError(
            f"The model ({type(model).__name__}) cannot recompute activations (torch.utils.checkpoint) in stages.",
            why=f"its forward is left to torch.export, which takes layers apart: {reason}",
            hint="move code into layers, so that the forward calls `checkpoint(layer, x)`; or do not use checkpoint",
        )


def is_recomputing(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a forward comes to torch.utils.checkpoint, under whatever name and through whatever library."""
    files = set[str]()
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, value: files.add(frame.f_code.co_filename))
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    finally:
        sys.setprofile(before)
    return inspect.unwrap(checkpoint).__code__.co_filename in files


def cannot_follow(model: nn.Module, failure: Untraceable) -> UserError:
    where = f"{failure.module} ({type(model.get_submodule(failure.module)).__name__})" if failure.module else "itself"
    return UserError(
        f"The model ({type(model).__name__}) cannot be cut into stages: the forward of {where} cannot be followed.",
        why=failure.why,
        hint="move that code into a layer of its own, which is then called as it is; nn.Sequential always works",
    )
