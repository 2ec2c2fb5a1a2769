"""The engines by name, and where each takes its machines from."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shoal.spec.errors import UserError

if TYPE_CHECKING:
    from shoal.engine.ground import Ground


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Where workers are to run, as it was asked for. `options` are those that begin with `engine.`.

    `address` is that of a Ray cluster, `hosts` a list for mpirun, `master` that of Spark. Without `engine` it is the
    one that these belong to; where none of them is given, this machine.
    """

    engine: str | None = None
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


def engine_of(where: Where) -> str:
    """The engine that was asked for, by name or by an option that only it has. Raises UserError where they disagree.

    Pure.
    """
    if where.engine is not None and where.engine not in ("local", *GROUNDS):
        raise UserError(f"There is no engine {where.engine!r}.", hint=f"use one of: local, {', '.join(GROUNDS)}")
    given = [option for option in OPTION_OF if getattr(where, option) is not None]
    if len(given) > 1:
        raise UserError(
            f"--{given[0]} and --{given[1]} were both given.",
            why=f"the first is for `--engine {OPTION_OF[given[0]]}`, the second for `--engine {OPTION_OF[given[1]]}`",
            hint="leave one of them out",
        )
    for option in given:
        engine = OPTION_OF[option]
        if where.engine not in (None, engine):
            raise UserError(
                f"--{option} was given, and the engine is {where.engine}.",
                why=f"it says where `--engine {engine}` finds its machines",
                hint=f"leave --engine out, or leave --{option} out",
            )
    return where.engine or (OPTION_OF[given[0]] if given else "local")


def find_ground(where: Where) -> "Ground | None":
    """Where the machines of an engine are; None is this machine. Raises UserError where that makes no sense."""
    engine = engine_of(where)
    return None if engine == "local" else GROUNDS[engine](where)


def amount(text: str, name: str) -> float:
    """The value of an option that is a number, 0 or more."""
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < 1e9:
        raise UserError(f"{name} is {text!r}, which is not an amount.", hint="give it a number, 0 or more")
    return found
