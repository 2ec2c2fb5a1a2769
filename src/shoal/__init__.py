"""Train, tune and serve PyTorch models across the machines you have.

Importing this package is cheap: torch and every engine are imported when a name that needs them is first used.
"""

import gc
from typing import TYPE_CHECKING, Any

from shoal.spec.errors import (
    BugError,
    MemberLost,
    PlanError,
    Preempted,
    Retryable,
    ShoalError,
    UserError,
    WorkerError,
)
from shoal.spec.strategy import all_reduce, diloco, local, pipeline, sharded, tensor
from shoal.version import __version__

if TYPE_CHECKING:
    from shoal.opened import open_run, runs
    from shoal.run import launch
    from shoal.service.client import Client
    from shoal.task_run import map
    from shoal.train.loop import Trainer
    from shoal.train.own_group import group
    from shoal.train.own_numbers import log

__all__ = [
    "BugError",
    "Client",
    "MemberLost",
    "PlanError",
    "Preempted",
    "Retryable",
    "ShoalError",
    "Trainer",
    "UserError",
    "WorkerError",
    "__version__",
    "all_reduce",
    "diloco",
    "group",
    "launch",
    "local",
    "log",
    "map",
    "open_run",
    "pipeline",
    "runs",
    "sharded",
    "tensor",
    "testing",
]

_LAZY = {
    "Client": "shoal.service.client",
    "Trainer": "shoal.train.loop",
    "group": "shoal.train.own_group",
    "launch": "shoal.run",
    "log": "shoal.train.own_numbers",
    "map": "shoal.task_run",
    "open_run": "shoal.opened",
    "runs": "shoal.opened",
    "testing": "shoal.testing",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    from importlib import import_module

    is_collecting = gc.isenabled()
    gc.disable()  # torch has made so many objects that looking for garbage in between takes longer than our import
    try:
        module = import_module(_LAZY[name])
        value = module if _LAZY[name] == f"shoal.{name}" else getattr(module, name)
    finally:
        if is_collecting:
            gc.enable()
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
