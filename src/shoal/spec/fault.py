"""A fault: something bad that is done to a run on purpose, at a place that is written down."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from typing import Any

from shoal.spec.errors import UserError

POINTS = ("start", "forward", "posted", "backward", "summed", "updating", "updated", "saving")
"""Where in a step a fault can strike, in the order a step reaches them; `saving` is while a checkpoint is written."""

KINDS: Mapping[str, frozenset[str]] = {
    "kill": frozenset({"at"}),
    "kill_launcher": frozenset({"at"}),
    "freeze": frozenset({"at", "seconds"}),
    "hang": frozenset({"at", "seconds"}),
    "slow": frozenset({"at", "seconds", "steps"}),
    "fail": frozenset({"at", "error", "retryable"}),
    "nan": frozenset({"steps"}),
    "corrupt": frozenset({"bit"}),
    "partition": frozenset({"at", "seconds"}),
    "disk_full": frozenset({"at", "seconds", "mebibytes"}),
}
"""Every kind of fault, and what can be said of it besides its rank and when it strikes."""

RIG = "shoal-rig-"
"""How the names of all disks, networks and groups begin that were made for tests, and may be broken."""

_ALWAYS = frozenset({"kind", "rank", "step", "after_seconds", "incarnation"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault. It strikes once in a run, also when its worker is replaced or the run is resumed.

    It strikes the worker `rank`, in `step` (they count from zero) or at the first point it reaches `after_seconds` of
    the run. In a map, `step` is the number of an item, and with `rank` None it strikes whoever has that item.
    `incarnation` 0 is the first process of that rank, 1 its replacement. None is whoever has the rank: then a fault
    whose step has passed while nobody was there strikes as soon as somebody is.

    `seconds` is how long it lasts; None is until somebody ends it. `steps` is over how many steps in a row. `bit` is
    that of a parameter, from the lowest on; None is the highest of its mantissa. Raises UserError where this makes no
    sense.
    """

    kind: str
    rank: int | None
    step: int | None = None
    after_seconds: float | None = None
    incarnation: int | None = 0
    at: str = "start"
    seconds: float | None = None
    steps: int = 1
    error: str = ""
    retryable: bool = False
    mebibytes: float | None = None
    bit: int | None = None

    def __post_init__(self) -> None:
        _check_words(self)
        _check_numbers(self)
        if (self.step is None) == (self.after_seconds is None):
            raise UserError(
                f"A {self.kind} of rank {self.rank} needs a step or after_seconds, and not both.",
                hint="give `step=3` for the fourth step, or `after_seconds=2.5` for a time in the run",
            )
        if self.rank is None and self.step is None:
            raise UserError(
                f"A {self.kind} does not say whom it strikes.", hint="give a `rank`, or the `item` of a map"
            )
        if self.kind == "slow" and self.seconds is None:
            raise UserError("slow does not say how slow.", hint="give the seconds that each step takes longer")

    def to_plain(self) -> dict[str, Any]:
        """What differs from the defaults, as JSON values."""
        default = {field.name: field.default for field in fields(self)}
        return {name: getattr(self, name) for name in default if getattr(self, name) != default[name]}

    def __str__(self) -> str:
        when = f"step {self.step}" if self.step is not None else f"{self.after_seconds:g} s"
        where = f" at {self.at}" if self.at != "start" else ""
        if self.rank is None:
            return f"{self.kind} of whoever has item {self.step}{where}"
        return f"{self.kind} of rank {self.rank} in {when}{where}"


def _check_words(fault: Fault) -> None:
    if not isinstance(fault.kind, str) or fault.kind not in KINDS:
        raise _unknown("fault", fault.kind, KINDS)
    if fault.at not in POINTS:
        raise _unknown("point", fault.at, POINTS)
    if not isinstance(fault.error, str) or not isinstance(fault.retryable, bool):
        raise UserError(
            f"error= of a {fault.kind} is a text, and retryable= is true or false.",
            why=f"they are {fault.error!r} and {fault.retryable!r}",
        )
    said = fault.to_plain().keys() - _ALWAYS
    if extra := sorted(said - KINDS[fault.kind]):
        known = ", ".join(sorted(KINDS[fault.kind])) or "nothing more"
        raise UserError(f"A {fault.kind} has no {extra[0]}.", hint=f"besides rank and step it takes: {known}")


def _check_numbers(fault: Fault) -> None:
    for name, least in (("rank", 0), ("step", 0), ("incarnation", 0), ("bit", 0), ("steps", 1)):
        value = getattr(fault, name)
        if value is None and name != "steps":
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise UserError(f"{name} of a {fault.kind} is {value!r}.", hint=f"give a whole number, {least} or more")
    for name in ("after_seconds", "seconds", "mebibytes"):
        value = getattr(fault, name)
        if value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value < 0:
            raise UserError(f"{name} of a {fault.kind} is {value!r}.", hint="give a number, 0 or more")


def encode(faults: Sequence[Fault]) -> str:
    """Faults as JSON: a list of objects, each with what differs from the defaults."""
    return json.dumps([fault.to_plain() for fault in faults], separators=(",", ":"))


def decode(text: str, source: str = "the list of faults") -> tuple[Fault, ...]:
    """The faults in a JSON text. Raises UserError that names `source`, the fault and the field that is wrong."""
    try:
        plain = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{source} is not JSON.", why=str(error), hint=_EXAMPLE) from None
    if not isinstance(plain, list):
        raise UserError(f"{source} holds a {type(plain).__name__} instead of a list of faults.", hint=_EXAMPLE)
    return tuple(_decode_one(item, f"fault {number} of {source}") for number, item in enumerate(plain, start=1))


def _decode_one(item: object, place: str) -> Fault:
    if not isinstance(item, dict):
        raise UserError(f"{place} is {str(item)[:60]!r} instead of an object.", hint=_EXAMPLE)
    known = {field.name: field.default is MISSING for field in fields(Fault)}
    try:
        if unknown := next((name for name in item if name not in known), None):
            raise _unknown("field", unknown, known)
        if missing := next((name for name, is_needed in known.items() if is_needed and name not in item), None):
            raise UserError(f"It has no {missing}.", hint=_EXAMPLE)
        return Fault(**item)
    except UserError as error:
        raise UserError(f"{place} is wrong: {error.message}", why=error.why, hint=error.hint) from None


def _unknown(what: str, word: object, known: Mapping[str, Any] | Sequence[str]) -> UserError:
    close = get_close_matches(str(word), list(known), n=1, cutoff=0.5)
    hint = f"did you mean `{close[0]}`?" if close else f"use one of: {', '.join(known)}"
    return UserError(f"There is no {what} {str(word)[:60]!r}.", hint=hint)


_EXAMPLE = 'for example: [{"kind": "kill", "rank": 1, "step": 3}]'
