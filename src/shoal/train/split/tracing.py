"""A model's forward as a list of calls: of its layers, as they are, and of what its code does between them.

The forward runs once on real samples while every call is written down. So code between layers sees real shapes; where
it decides by a shape, the decision is kept and checked in every later call. Layers are called, not taken apart: what
they do with modes, hooks or recomputation goes on as before.
"""

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from shoal.spec.errors import UserError

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)

FACTORIES = ("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randn", "tril_indices", "zeros")
"""Functions of torch that make tensors of a size: a size that is only written down is none to them."""

SHAPE_FACTS = ("size", "dim", "numel", "stride", "__len__", "is_floating_point", "is_contiguous")
SHAPE_ATTRIBUTES = ("shape", "ndim", "dtype", "device", "requires_grad", "is_cuda", "training")


def is_layer(root: nn.Module, module: nn.Module, name: str, *, is_fine: bool = False, within: Sequence[str]) -> bool:
    """Whether a module is called as it is, rather than looked into.

    Such are the elements of containers (unless `is_fine`), modules without others in them, and torch's own.
    Containers are looked into, and so is whatever holds a layer named in `within`.
    """
    if isinstance(module, CONTAINERS) or any(other.startswith(f"{name}.") for other in within):
        return False
    if not is_fine and isinstance(root.get_submodule(name.rpartition(".")[0]), CONTAINERS):
        return True
    children = list(module.children())
    is_torch = type(module).__module__.startswith("torch.nn.")
    return not children or (is_torch and not any(isinstance(child, CONTAINERS) for child in children))


class Untraceable(Exception):
    """Why a forward cannot be written down; `module` is the innermost one whose code it was."""

    def __init__(self, module: str, why: str) -> None:
        super().__init__(why)
        self.module, self.why = module, why


def check_same(found: Any, expected: Any) -> None:
    """Part of a traced forward: a shape decided which way it went, and must not decide otherwise now."""
    if found != expected:
        raise UserError(
            f"The model's forward depends on a size that has changed: {found} instead of {expected}.",
            why="it was cut into stages along the way that it took with the first samples",
            hint="give all batches the same shape, or move that decision into a layer",
        )


def assign_buffer(holder: dict[str, Any], name: str, before: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Part of a traced forward: a buffer gets another value. `before`, what it was, says in which stage it is."""
    holder[name] = value.detach()
    return value


def _augmented(name: str) -> Callable[[fx.Proxy, Any], Any]:
    """What `+=` and the like do: a buffer is changed for all who have it; any other value is one by itself."""

    def act(proxy: fx.Proxy, other: Any) -> Any:
        if proxy.node.op != "get_attr":
            return getattr(operator, name)(proxy, other)
        return proxy.tracer.create_proxy("call_function", getattr(operator, f"i{name}"), (proxy, other), {})

    return act


class Recorded(fx.Proxy):
    """A value of which the calls are written down. Its own Python value is `tracer.values[node]`."""

    def __getattr__(self, k: str) -> "RecordedAttribute":
        return RecordedAttribute(self, k)

    def __iter__(self) -> Iterator[Any]:
        return self.tracer.iter(self)

    def __len__(self) -> int:
        return self.tracer.length(self)  # type: ignore[attr-defined,no-any-return]

    def __index__(self) -> int:
        return int(self.tracer.fix(self))  # type: ignore[attr-defined]

    def __int__(self) -> int:
        return int(self.tracer.fix(self))  # type: ignore[attr-defined]

    def __float__(self) -> float:
        return float(self.tracer.fix(self))  # type: ignore[attr-defined]

    def __contains__(self, item: Any) -> bool:
        return item in self.tracer.fix(self)  # type: ignore[attr-defined]

    __iadd__, __isub__, __imul__, __itruediv__ = map(_augmented, ("add", "sub", "mul", "truediv"))


class RecordedAttribute(fx.proxy.Attribute, Recorded):
    """The same of an attribute, such as a shape."""


class LayerTracer(fx.Tracer):
    """Writes down a forward on the example `inputs`, the tensors of (args, kwargs) whose structure is `spec`.

    `is_fine` looks into the elements of containers, too. `whole` are modules that are not looked into, whatever they
    are; `within` are names that must appear as layers.
    """

    proxy_buffer_attributes = True

    def __init__(
        self, inputs: Sequence[Any], spec: pytree.TreeSpec, *, is_fine: bool, whole: set[str], within: Sequence[str]
    ) -> None:
        super().__init__(autowrap_functions=(checkpoint,))
        self._inputs, self._spec, self._is_fine, self._whole, self._within = inputs, spec, is_fine, whole, within
        self.values: dict[fx.Node, Any] = {}
        self.constants: dict[str, Any] = {}
        self._assigned: dict[int, fx.Proxy] = {}
        self._is_real = False
        self._inside: list[str] = []
        self.failed_in = ""

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return Recorded(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        name = module_qualified_name
        return name in self._whole or is_layer(self.root, m, name, is_fine=self._is_fine, within=self._within)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._is_real:
            return forward(*args, **kwargs)
        name = self.path_of_module(m)
        self._inside.append(name)
        try:
            result = super().call_module(m, forward, args, kwargs)
        except BaseException:
            self.failed_in = self.failed_in or name
            raise
        self._inside.pop()
        return result

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        if self._is_real:
            return attr_val
        if id(attr_val) in self._assigned:
            return self._assigned[id(attr_val)]
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def assign(self, module: nn.Module, name: str, value: Any) -> bool:
        """Write down that a module's attribute gets a value, if it is a buffer; False where it is none."""
        holder = module.__dict__.get("_buffers", {})
        if self._is_real or name not in holder or not isinstance(value, fx.Proxy | torch.Tensor):
            return False
        self._assigned.pop(id(holder[name]), None)
        constant = f"_shoal_buffers_{len(self.constants)}"
        self.constants[constant] = holder
        before = self.create_proxy("get_attr", f"{self.path_of_module(module)}.{name}".lstrip("."), (), {})
        args = (self.create_proxy("get_attr", constant, (), {}), name, before, value)
        made = self.create_proxy("call_function", assign_buffer, args, {})
        self._assigned[id(holder[name])] = made
        return True

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        """Tensors of the call are written down; anything else is what it was."""
        leaves = [
            self.create_proxy("placeholder", f"input_{index}", (), {}) if isinstance(value, torch.Tensor) else value
            for index, value in enumerate(self._inputs)
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)

        def run(root: nn.Module) -> Any:
            return root_fn(root, *args, **kwargs)

        return run, [self.root]

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *more: Any, **keywords: Any) -> fx.Proxy:
        if self._is_real:
            raise Untraceable(self.failed_in, "a layer uses a value of another call of the forward")
        made = super().create_proxy(kind, target, args, kwargs, *more, **keywords)
        self.values[made.node] = self._compute(made.node)
        return made

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        if node.op == "get_attr" and node not in self.values:
            self.values[node] = self._attribute(str(node.target))
        return node

    def _compute(self, node: fx.Node) -> Any:
        """The value of a call, on the example."""
        if node.op == "placeholder":
            return self._inputs[int(str(node.target).rpartition("_")[2])]
        args = fx.node.map_arg(node.args, self.values.__getitem__)
        kwargs = fx.node.map_arg(node.kwargs, self.values.__getitem__)
        with self._really():
            match node.op:
                case "call_function":
                    return node.target(*args, **kwargs)  # type: ignore[operator]
                case "call_method":
                    return getattr(args[0], str(node.target))(*args[1:], **kwargs)
                case "call_module":
                    return self.root.get_submodule(str(node.target))(*args, **kwargs)
                case _:
                    return self.values[node]

    @contextmanager
    def _really(self) -> Iterator[None]:
        """Inside, modules are called and read as ever."""
        self._is_real = True
        try:
            yield
        finally:
            self._is_real = False

    def _attribute(self, name: str) -> Any:
        if name in self.constants:
            return self.constants[name]
        owner, _, last = name.rpartition(".")
        with self._really():
            return getattr(self.root.get_submodule(owner), last)

    # What code between layers may ask of a value.

    def fix(self, of: fx.Proxy) -> Any:
        """A value that Python must know now: taken from the example, and checked in every later call."""
        value = self.values[of.node]
        if isinstance(value, torch.Tensor) or not self._is_of_shapes(of.node):
            raise Untraceable(self._inside[-1] if self._inside else "", "it decides by the values of a tensor")
        self.create_proxy("call_function", check_same, (of, value), {})
        return value

    def _is_of_shapes(self, node: fx.Node) -> bool:
        """Whether a value follows from shapes alone."""
        for source in node.all_input_nodes:
            is_tensor = isinstance(self.values[source], torch.Tensor)
            asks = node.target in SHAPE_FACTS or (node.target is getattr and node.args[1] in SHAPE_ATTRIBUTES)
            if not asks if is_tensor else not self._is_of_shapes(source):
                return False
        return True

    def to_bool(self, obj: fx.Proxy) -> bool:
        return bool(self.fix(obj))

    def length(self, of: fx.Proxy) -> int:
        value = self.values[of.node]
        return int(self.fix(of.size(0))) if isinstance(value, torch.Tensor) else len(value)

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        return iter(
            [
                obj[index]  # type: ignore[index]
                for index in range(self.length(obj))
            ]
        )

    def keys(self, obj: fx.Proxy) -> Any:
        return list(self.values[obj.node])


@contextmanager
def recording_factories(tracer: LayerTracer) -> Iterator[None]:
    """Inside, tensors that are made of a recorded size are written down."""

    def wrap(make: Callable[..., Any]) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> Any:
            if not any(isinstance(value, fx.Proxy) for value in pytree.tree_leaves((args, kwargs))):
                return make(*args, **kwargs)
            return tracer.create_proxy("call_function", make, args, kwargs)

        return record

    with ExitStack() as stack:
        for name in FACTORIES:
            stack.callback(setattr, torch, name, getattr(torch, name))
            setattr(torch, name, wrap(getattr(torch, name)))
        yield


@contextmanager
def recording_buffers(tracer: LayerTracer) -> Iterator[None]:
    """Inside, buffers that get another value (`self.count = self.count + 1`) are written down."""
    assign = nn.Module.__setattr__

    def record(module: nn.Module, name: str, value: Any) -> None:
        if not tracer.assign(module, name, value):
            assign(module, name, value)

    nn.Module.__setattr__ = record  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.__setattr__ = assign  # type: ignore[method-assign]


def trace_layers(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, is_fine: bool, within: Sequence[str]
) -> LayerTracer:
    """Write down one forward. Modules whose own code cannot be followed are called as a whole.

    Raises Untraceable where that is the model itself.
    """
    inputs, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    whole: set[str] = set()
    while True:
        tracer = LayerTracer(inputs, spec, is_fine=is_fine, whole=whole, within=within)
        before = dict(vars(model))
        try:
            with torch.no_grad(), recording_factories(tracer), recording_buffers(tracer):
                tracer.trace(model)
        except UserError:
            raise
        except Exception as error:
            name = tracer.failed_in or (error.module if isinstance(error, Untraceable) else "")
            if not name or name in whole:
                raise Untraceable(name, _reason(error)) from error
            whole.add(name)
        else:
            return tracer
        finally:
            for name in set(vars(model)) - set(before):  # tensors that the code made itself
                tracer.constants[name] = model.__dict__.pop(name)
            vars(model).update(before)


def _reason(error: Exception) -> str:
    if isinstance(error, Untraceable):
        return error.why
    line = next(
        (
            f" ({frame.filename.rpartition('/')[2]}:{frame.lineno})"
            for frame in reversed(inspect.trace())
            if _is_user(frame)
        ),
        "",
    )
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}{line}"


def _is_user(frame: inspect.FrameInfo) -> bool:
    return "/torch/" not in frame.filename and "/shoal/train/" not in frame.filename
