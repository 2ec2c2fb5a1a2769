"""A model's forward, written down: which layers there are, what each reads, and a function for each stage."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

Stage = Callable[..., tuple[Any, ...]]
"""(root, tensors of the model's call..., what the stage before hands on...) -> what it hands on, or (the output,)."""


class Root:
    """What the code of a stage knows as `self`: the user's model, and tensors that its forward made itself."""

    def __init__(self, model: nn.Module, constants: Mapping[str, Any]) -> None:
        self.__model, self.__constants = model, constants  # no name of the model's own is like these

    def __getattr__(self, name: str) -> Any:
        return self.__constants[name] if name in self.__constants else getattr(self.__model, name)


@dataclass(frozen=True, slots=True)
class Layer:
    """A call of a layer, and where the forward can be cut before it."""

    name: str
    at: int


class Program:
    """A forward as a list of calls. `names` says which calls are those of layers."""

    def __init__(
        self, model: nn.Module, graph: fx.Graph, constants: Mapping[str, Any], names: Mapping[fx.Node, str]
    ) -> None:
        self.root = Root(model, constants)
        self.nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
        self.inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self.output = next(node for node in graph.nodes if node.op == "output").args[0]
        self._model, self._constants = model, constants
        self._index = {node: index for index, node in enumerate(self.nodes)}
        first: dict[str, int] = {}
        for node, index in self._index.items():
            first.setdefault(names.get(node, ""), index)
        self.layers = [Layer(name, at) for name, at in first.items() if name]

    def uses(self, node: fx.Node) -> list[str]:
        """The names of the parameters and buffers that a call reads."""
        if node.op == "call_module":
            return _tensors_in(self._model, str(node.target))
        if node.op == "get_attr" and node.target not in self._constants:
            return _tensors_in(self._model, str(node.target))
        return []

    def called(self) -> list[str]:
        """The names of the modules that are called as they are, directly or through another function."""
        modules = {name for name, _ in self._model.named_modules()}
        calls = [node for node in self.nodes if node.op in ("call_module", "get_attr")]
        return [str(node.target) for node in calls if node.target in modules]

    def direct(self) -> list[str]:
        """The names of the parameters and buffers that are read by no layer's call."""
        read = [node for node in self.nodes if _is_constant(node) and not _is_recomputed(node)]
        return [name for node in read for name in self.uses(node)]

    def spans(self) -> dict[int, tuple[str, int, int]]:
        """Of every parameter and buffer, by identity: its name, and the first and last call that reads it."""
        named: dict[str, torch.Tensor] = dict(self._model.named_parameters(remove_duplicate=False))
        named |= dict(self._model.named_buffers(remove_duplicate=False))
        found: dict[int, tuple[str, int, int]] = {}
        for index, node in enumerate(self.nodes):
            for name in self.uses(node):
                key = id(named[name])
                # An attribute is read where it is used.
                reads = (
                    [self._index[user] for user in node.users if user in self._index]
                    if _is_constant(node)
                    else [index]
                )
                for at in reads:
                    old = found.get(key, (name, at, at))
                    found[key] = (old[0], min(old[1], at), max(old[2], at))
        return found

    def crossing(self, at: int) -> list[fx.Node]:
        """The values that calls from `at` on need from those before. What is given to the model is everywhere."""
        needed = _nodes_in(self.output)
        return [
            node
            for node in self.nodes[:at]
            if not _is_constant(node)
            and (node in needed or any(self._index.get(user, -1) >= at for user in node.users))
        ]

    def extract(self, start: int, stop: int) -> Stage:
        """The calls from `start` to `stop` as a function."""
        graph = fx.Graph()
        copied: dict[fx.Node, fx.Node] = {}
        for node in self.inputs:
            copied[node] = graph.placeholder(node.name)
        for node in self.crossing(start):
            copied[node] = graph.placeholder(node.name)
        for node in [each for each in self.nodes[:start] if _is_constant(each)] + self.nodes[start:stop]:
            copied[node] = graph.node_copy(node, copied.__getitem__)
            copied[node].meta.pop("is_wrapped", None)  # else the code would register it with torch.fx for good
        is_last = stop == len(self.nodes)
        given = (self.output,) if is_last else tuple(self.crossing(stop))
        graph.output(fx.node.map_arg(given, copied.__getitem__))
        graph.eliminate_dead_code(lambda node: node.op != "get_attr")
        code = graph.python_code("self")
        scope = dict(code.globals)
        exec(code.src, scope)
        made: Stage = scope["forward"]
        return made


def _is_constant(node: fx.Node) -> bool:
    """An attribute of the model: whoever needs it has it."""
    return node.op == "get_attr"


def _is_recomputed(node: fx.Node) -> bool:
    """A layer that is given to `checkpoint`, which calls it."""
    return bool(node.users) and all(user.target is checkpoint and user.args[0] is node for user in node.users)


def _nodes_in(value: Any) -> set[fx.Node]:
    found: set[fx.Node] = set()
    fx.node.map_arg(value, found.add)
    return found


def _tensors_in(model: nn.Module, name: str) -> list[str]:
    """The parameters and buffers of a module, or the one of that name."""
    owner, _, last = name.rpartition(".")
    holder = model.get_submodule(owner)
    if last in holder._parameters or last in holder._buffers:
        return [name]
    found = getattr(holder, last, None) if last else holder
    if not isinstance(found, nn.Module):
        return []
    prefix = f"{name}." if name else ""
    more = [*found.named_parameters(remove_duplicate=False), *found.named_buffers(remove_duplicate=False)]
    return [f"{prefix}{each}" for each, _ in more]
