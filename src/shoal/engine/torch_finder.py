"""How workers import torch: without the garbage collector, and without its compiler where nobody compiles.

Loaded by path, beside `worker.py`, and importing nothing of shoal.
"""

from __future__ import annotations

import gc
import sys
from functools import partial

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

_STEP_NAMES = {
    "torch._dynamo", "cast", "Optimizer", "is_grad_enabled", "set_grad_enabled", "defaults", "_dynamo", "graph_break",
}  # fmt: skip
"""All that torch's own wrapper of `step` uses. One that uses more is not replaced."""


class TorchFinder:
    """Finds torch where everybody does, and has it imported as workers want it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        specs = (finder.find_spec(name, path, target) for finder in sys.meta_path)
        spec = next((found for found in specs if found is not None), None)
        loader: Any = spec.loader if spec is not None else None
        if loader is not None:
            execute = loader.exec_module
            loader.exec_module = lambda module: import_lightly(execute, module)
        return spec


def import_lightly(execute: Callable[[ModuleType], None], torch: ModuleType) -> None:
    without_collecting(execute, torch)
    put_off_compiler(torch)


def without_collecting(execute: Callable[[ModuleType], None], torch: ModuleType) -> None:
    """Import torch without the garbage collector.

    That would look through hundreds of thousands of new objects again and again and find nothing, which is a fifth of
    the time. Afterwards they count as always there, so that it need not look at them in training either.
    """
    if not gc.isenabled():
        execute(torch)
        return
    gc.disable()
    try:
        execute(torch)
    finally:
        gc.freeze()
        gc.enable()


def put_off_compiler(torch: Any) -> None:
    """Keep optimizers from importing torch._dynamo, which takes as long as torch, where nobody compiles.

    Torch keeps its compiler out of optimizers: some methods go through `_disable_dynamo`, each `step` through
    `_use_grad`, and to tell the compiler so, both import it. While nobody else has, there is nothing to be kept out:
    until then they do only the rest of what they do. Where torch is not as we know it, it is left alone.
    """
    finder = CompilerFinder()
    sys.meta_path.insert(0, finder)
    try:
        release_methods(torch, finder.undo)
        release_steps(torch, finder.undo)
    except Exception:  # another torch, or a file of the user's that is called so
        return


def release_methods(torch: Any, undo: list[Callable[[], None]]) -> None:
    """Let methods that keep the compiler out call what they wrap."""
    code = torch._disable_dynamo(lambda: None).__code__
    if "__dynamo_disable" not in code.co_consts:
        return
    for method in vars(torch.optim.Optimizer).values():
        if getattr(method, "__code__", None) is code:
            # It is here that the wrapper looks for what to call, and finds nothing the first time.
            method.__wrapped__.__dynamo_disable = method.__wrapped__
            undo.append(partial(delattr, method.__wrapped__, "__dynamo_disable"))


def release_steps(torch: Any, undo: list[Callable[[], None]]) -> None:
    """Let the steps of torch's optimizers do all that they do but to speak to the compiler."""
    code = sys.modules["torch.optim.optimizer"]._use_grad_for_differentiable(lambda: None).__code__
    if set(code.co_names) != _STEP_NAMES:
        return
    for one in vars(torch.optim).values():
        step: Any = vars(one).get("step") if isinstance(one, type) else None
        if getattr(step, "__code__", None) is code:
            step.__code__ = plain_step().__code__
            undo.append(partial(setattr, step, "__code__", code))


def plain_step(func: Any = None) -> Any:
    """What torch makes of a `step`, without the compiler. Its code is to run among the names of torch's own."""

    def _use_grad(*args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(args[0].defaults["differentiable"]):  # type: ignore[name-defined] # noqa: F821
            return func(*args, **kwargs)

    return _use_grad


class CompilerFinder:
    """Finds nothing. When torch._dynamo is about to be imported, everything becomes as torch has made it."""

    def __init__(self) -> None:
        self.undo: list[Callable[[], None]] = []

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        while name == "torch._dynamo" and self.undo:
            self.undo.pop()()
