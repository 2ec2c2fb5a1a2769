"""How several workers train one model: how it is cut (`Split`) times how its copies agree (`Sync`). Plain data.

Each has a text, the same on the command line and in a run's folder: `sharded:parameters`, `local:32`,
`pipeline:2,microbatches=8,cuts=layers.2`, `tensor:2+pipeline:2`. `str` writes it and `parse_sync` and `parse_split`
read it; only the `plan` of a tensor split has none.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from shoal.spec.errors import UserError

Level = Literal["optimizer", "gradients", "parameters"]
Outer = Literal["average", "nesterov"]
Codec = Literal["none", "int8"]
Order = Literal["1f1b", "gpipe", "interleaved"]


@dataclass(frozen=True, slots=True)
class AllReduce:
    """All copies take every step together."""

    def __str__(self) -> str:
        return "all_reduce"


@dataclass(frozen=True, slots=True)
class Sharded:
    """The same, and each copy keeps only its part: of the optimizer's state, of gradients too, of parameters too."""

    level: Level = "parameters"

    def __post_init__(self) -> None:
        _check_one_of("sharded", "level", self.level, get_args(Level))

    def __str__(self) -> str:
        return f"sharded:{self.level}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """Copies take steps of their own and agree now and then: every so many steps, or every so many seconds.

    outer: what they do with the mean of how far they have come since they last agreed: "average" takes it as it is,
        "nesterov" is a step of SGD with `lr` and Nesterov `momentum` (DiLoCo), of which the first rounds have less.
    codec: how that travels: "int8" is a quarter of the bytes; what rounding leaves over is sent the next time.
    fragments: in how many parts the model travels, each at a time of its own while steps go on (streaming DiLoCo).
    overlap: how many steps are taken while it travels; None chooses, by measured time; 0 waits for it.
    """

    every: int | None = None
    seconds: float | None = None
    outer: Outer = "average"
    lr: float = 0.7
    momentum: float = 0.9
    codec: Codec = "none"
    fragments: int = 1
    overlap: int | None = None

    def __post_init__(self) -> None:
        if (self.every is None) == (self.seconds is None):
            raise _wrong("local", "exactly one of every= (steps) and seconds= must be given", "local(every=32)")
        _check_count("local", "every", self.every)
        _check_count("local", "fragments", self.fragments)
        for name in ("seconds", "lr"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and value > 0):
                raise _wrong("local", f"{name}={value!r} is not a number above 0", f"{name}=1.0")
        if not _is_number(self.momentum) or not 0 <= self.momentum < 1:
            raise _wrong("local", f"momentum={self.momentum!r} is not between 0 and 1", "momentum=0.9")
        _check_one_of("local", "outer", self.outer, get_args(Outer))
        _check_one_of("local", "codec", self.codec, get_args(Codec))
        if self.every is not None and self.fragments > self.every:
            raise _wrong(
                "local",
                f"{self.fragments} fragments cannot travel at different steps of {self.every}",
                f"fragments={self.every} or fewer",
            )
        self._check_overlap()

    def _check_overlap(self) -> None:
        if self.overlap is None:
            return
        if not isinstance(self.overlap, int) or isinstance(self.overlap, bool) or self.overlap < 0:
            raise _wrong("local", f"overlap={self.overlap!r} is not a whole number of 0 or more", "overlap=0")
        if self.every is not None and self.overlap >= self.every // self.fragments:
            raise _wrong(
                "local",
                f"what leaves after one step must be there before the next leaves, {self.every // self.fragments} "
                f"step(s) later, and not after {self.overlap}",
                f"overlap={self.every // self.fragments - 1} or less",
            )

    def __str__(self) -> str:
        first = str(self.every) if self.seconds is None else f"{self.seconds:g}s"
        return _write("local", first, self, ("every", "seconds"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """Layers are cut: each of `size` workers has a part of every weight. `plan` overrides: layer pattern -> style."""

    size: int
    plan: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        _check_count("tensor", "size", self.size)

    def __str__(self) -> str:
        return f"tensor:{self.size}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """The model is cut into `size` stages, and a step into micro-batches that follow each other through them.

    microbatches: None is four for each stage. schedule: in which order a stage takes them. cuts: names of the layers
    that later stages begin with; None chooses them, by measured time.
    """

    size: int
    microbatches: int | None = None
    schedule: Order = "1f1b"
    cuts: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        _check_count("pipeline", "size", self.size)
        _check_count("pipeline", "microbatches", self.microbatches)
        _check_one_of("pipeline", "schedule", self.schedule, get_args(Order))
        cuts: Any = self.cuts
        if cuts is not None and (isinstance(cuts, str) or not all(isinstance(name, str) for name in cuts)):
            raise _wrong("pipeline", f"cuts={cuts!r} is no tuple of names of layers", 'cuts=("layers.2",)')

    @property
    def num_microbatches(self) -> int:
        return self.microbatches if self.microbatches is not None else 4 * self.size

    def __str__(self) -> str:
        cuts = f",cuts={'+'.join(self.cuts)}" if self.cuts is not None else ""
        return _write("pipeline", str(self.size), self, ("size", "cuts")) + cuts


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How one copy of the model is divided among workers; `num_parts` of them hold one copy together."""

    tensor: Tensor | None = None
    pipeline: Pipeline | None = None

    @property
    def num_parts(self) -> int:
        return (self.tensor.size if self.tensor else 1) * (self.pipeline.size if self.pipeline else 1)

    def __str__(self) -> str:
        return "+".join(str(way) for way in (self.tensor, self.pipeline) if way is not None) or "none"


Sync = AllReduce | Sharded | Local

EVERY_STEP = AllReduce()


# What people write in a script.


def all_reduce() -> AllReduce:
    """Every step together: what `Trainer` does if nothing is said."""
    return AllReduce()


def sharded(level: Level = "parameters") -> Sharded:
    """Every step together, with the state divided: "optimizer" (ZeRO 1), "gradients" (2), or "parameters" (3)."""
    return Sharded(level)


def local(
    every: int | None = None,
    *,
    seconds: float | None = None,
    outer: Outer = "average",
    lr: float = 0.7,
    momentum: float = 0.9,
    codec: Codec = "none",
    fragments: int = 1,
    overlap: int | None = None,
) -> Local:
    """Steps of one's own, and agreement every so many steps or seconds. See `Local`."""
    return Local(
        every=every,
        seconds=seconds,
        outer=outer,
        lr=lr,
        momentum=momentum,
        codec=codec,
        fragments=fragments,
        overlap=overlap,
    )


def diloco(
    every: int | None = None, *, seconds: float | None = None, fragments: int = 1, overlap: int | None = None
) -> Local:
    """Local steps with Nesterov momentum between agreements, and int8 on the way: for slow links."""
    return Local(every=every, seconds=seconds, outer="nesterov", codec="int8", fragments=fragments, overlap=overlap)


def tensor(size: int, *, plan: Mapping[str, str] | None = None) -> Split:
    """Cut every large layer into `size` parts."""
    return Split(tensor=Tensor(size=size, plan=plan))


def pipeline(
    size: int, *, microbatches: int | None = None, schedule: Order = "1f1b", cuts: tuple[str, ...] | None = None
) -> Split:
    """Cut the model into `size` stages. See `Pipeline`."""
    return Split(pipeline=Pipeline(size=size, microbatches=microbatches, schedule=schedule, cuts=cuts))


def combine(parts: Any) -> Split | None:
    """One Split of what a script gives: None, a Split, a text, or a tuple of a tensor and a pipeline one."""
    if isinstance(parts, str):
        return parse_split(parts)
    if not isinstance(parts, tuple | list):
        return parts  # type: ignore[no-any-return]  # checked as every other setting
    ways = [combine(part) for part in parts]
    if any(not isinstance(way, Split) for way in ways):
        raise _wrong("split", "it holds something that is no split", "(shoal.tensor(2), shoal.pipeline(2))")
    tensors = [way.tensor for way in ways if way is not None and way.tensor is not None]
    pipelines = [way.pipeline for way in ways if way is not None and way.pipeline is not None]
    if len(tensors) > 1 or len(pipelines) > 1:
        raise _wrong("split", "a model is cut once in each way", "(shoal.tensor(2), shoal.pipeline(2))")
    return Split(tensor=next(iter(tensors), None), pipeline=next(iter(pipelines), None))


# Texts.


def parse_sync(text: str) -> Sync:
    """`all_reduce`, `sharded:LEVEL`, `local:STEPS`, `local:2.5s`, `diloco:STEPS`, with `,name=value` behind."""
    name, first, more = _read(text)
    match name:
        case "all_reduce":
            _refuse(text, {"value": first} if first else more)
            return AllReduce()
        case "sharded":
            _refuse(text, more)
            return Sharded(first or "parameters")  # type: ignore[arg-type]  # checked by it
        case "local" | "diloco":
            more_known = ("outer", "lr", "momentum", "codec") if name == "local" else ()
            known = ("fragments", "overlap", *more_known)
            _refuse(text, {key: value for key, value in more.items() if key not in known})
            key, value = ("seconds", first[:-1]) if first.endswith("s") else ("every", first)
            given = {key: _number(text, value)} | {each: _number(text, value) for each, value in more.items()}
            return local(**given) if name == "local" else diloco(**given)
    raise UserError(
        f"There is no sync {name!r}.",
        why="copies agree by all_reduce, sharded, local or diloco",
        hint="for example: sync=local:32 or sync=sharded:parameters",
    )


def parse_split(text: str) -> Split | None:
    """`tensor:2`, `pipeline:2,microbatches=8,cuts=layers.2+head`, both with a `+` between, or `none`."""
    if text.lower() in ("", "none"):
        return None
    ways = re.split(r"\+(?=\w+:)", text)  # other ones are between names of layers
    if len(ways) > 1:
        return combine([parse_split(way) for way in ways])
    name, first, more = _read(text)
    known = {"tensor": (), "pipeline": ("microbatches", "schedule", "cuts")}.get(name)
    if known is None:
        raise UserError(
            f"There is no split {name!r}.",
            why="a model is cut by tensor or pipeline, or both",
            hint="for example: split=pipeline:2 or split=tensor:2+pipeline:2",
        )
    _refuse(text, {key: value for key, value in more.items() if key not in known})
    given: dict[str, Any] = {
        key: tuple(value.split("+")) if key == "cuts" else _number(text, value) for key, value in more.items()
    }
    return (tensor if name == "tensor" else pipeline)(_number(text, first), **given)


def _read(text: str) -> tuple[str, str, dict[str, str]]:
    name, _, rest = text.partition(":")
    first, *others = rest.split(",")
    return name.strip(), first.strip(), {key.strip(): value for key, _, value in (o.partition("=") for o in others)}


def _refuse(text: str, unknown: Mapping[str, str]) -> None:
    if unknown:
        raise UserError(
            f"{text!r} says more than is understood: {', '.join(unknown)}.",
            why="that is no part of it",
            hint="see docs/strategies.md for what each takes",
        )


def _number(text: str, value: str) -> Any:
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    if value.strip().isidentifier() or value[:1].isdigit():
        return value.strip()
    raise UserError(f"{text!r} lacks a value.", why="a number or a word is expected there", hint="such as local:32")


def _write(name: str, first: str, of: Any, without: tuple[str, ...]) -> str:
    more = [
        f",{field.name}={getattr(of, field.name)}"
        for field in fields(of)
        if field.name not in without and getattr(of, field.name) != field.default
    ]
    return f"{name}:{first}{''.join(more)}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_count(where: str, name: str, value: Any) -> None:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if value is not None and not (is_whole and value >= 1):
        raise _wrong(where, f"{name}={value!r} is not a whole number of 1 or more", f"{name}=2")


def _check_one_of(where: str, name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise _wrong(where, f"{name}={value!r} is none of {', '.join(allowed)}", f"{name}={allowed[-1]!r}")


def _wrong(where: str, why: str, example: str) -> UserError:
    return UserError(f"This {where} does not work.", why=why, hint=f"for example: {example}")
