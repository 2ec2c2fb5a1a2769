"""The engines by name, and where each takes its machines from."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shoal.spec.errors import UserError

if TYPE_CHECKING:
    from shoal.engine.fleet import Ground


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Where workers are to run, as it was asked for. `options` are those that begin with `engine.`.

    `address` is that of a Ray cluster, `hosts` a list for mpirun, `master` that of Spark.
    """

    engine: str = "local"
    address: str | None = None
    hosts: str | None = None
    master: str | None = None
    options: dict[str, str] = field(default_factory=dict)


def _ray(where: Where) -> "Ground":
    from shoal.engine.ray import make_ground

    return make_ground(where.address, where.options)


def _mpi(where: Where) -> "Ground":
    from shoal.engine.mpi import make_ground

    return make_ground(where.hosts, where.options)


def _spark(where: Where) -> "Ground":
    from shoal.engine.spark import make_ground

    return make_ground(where.master, where.options)


GROUNDS: dict[str, Callable[[Where], "Ground"]] = {"ray": _ray, "mpi": _mpi, "spark": _spark}
OPTION_OF = {"address": "ray", "hosts": "mpi", "master": "spark"}


def find_ground(where: Where) -> "Ground | None":
    """Where the machines of an engine are; None is this machine. Raises UserError where that makes no sense."""
    for option, engine in OPTION_OF.items():
        if getattr(where, option) is not None and where.engine != engine:
            raise UserError(
                f"--{option} was given, and the engine is {where.engine}.",
                why=f"it says where `--engine {engine}` finds its machines",
                hint=f"add `--engine {engine}`, or leave --{option} out",
            )
    if where.engine == "local":
        return None
    if where.engine not in GROUNDS:
        raise UserError(f"There is no engine {where.engine!r}.", hint=f"use one of: local, {', '.join(GROUNDS)}")
    return GROUNDS[where.engine](where)


def amount(text: str, name: str) -> float:
    """The value of an option that is a number, 0 or more."""
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < 1e9:
        raise UserError(f"{name} is {text!r}, which is not an amount.", hint="give it a number, 0 or more")
    return found
