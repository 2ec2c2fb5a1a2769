"""What a training run leaves open or decides: one frozen record, from the script and then from `-o`."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from os import PathLike, fspath
from typing import Any, Literal, get_args, get_type_hints

from shoal.engine.fit import parse_bytes
from shoal.files import mask
from shoal.spec.errors import UserError
from shoal.spec.strategy import EVERY_STEP, AllReduce, Local, Sharded, Split, Sync, combine, parse_split, parse_sync

Precision = Literal["float32", "auto", "bf16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to train. Every field may be given to `Trainer` or overridden with `shoal run -o name=value`.

    batch_size: samples of a step, over all workers together.
    seed: of the order of samples and of the model's random numbers.
    exact: bit-identical parameters for any number of workers; see docs/exact.md for what it costs.
    shards: into how many parts a step is cut; None chooses. Models with dropout or batch statistics compute each
        part by itself, so their result depends on it (and on nothing else).
    microbatch_size: most samples in one forward; larger steps accumulate gradients. Fewer where memory is short.
    memory: the most memory that this worker may use, as bytes or as "2GB"; None: what its machine or cgroup has.
    device: where this worker computes: "cpu", "cuda", "cuda:1", or "auto" for its GPU where it has one. The model is
        moved there; None leaves it where it is.
    max_norm: clip the gradient of the whole batch to this norm.
    precision: "float32", "bf16" for autocast, or "auto": bf16 on workers that are faster with it.
    compile: run the model through torch.compile.
    ema: decay of a moving average of the parameters, such as 0.999.
    loaders: processes that load data in each worker; None uses a thread, or one process where the data draws random
        numbers; 0 never uses a process.
    checkpoint_every: steps between checkpoints; None saves at the end of `fit` only.
    keep: how many checkpoints to keep.
    checkpoint_dir: where they go: a folder that all workers see, or a URL such as s3://bucket/run; None: in the run
        folder. With `resume=True` a run goes on from there, on whatever machine.
    balance: give faster workers more of each step.
    threads: intra-op threads of each worker, or "auto": its part of its machine's cores; None leaves them as they
        are, in exact mode one.
    schedule: when the scheduler steps: after each "step" or each "epoch".
    unused: what to do about parameters that no sample of the first step reaches: "error", or "zero" for models with
        branches that are used now and then.
    not_finite: what to do about a step whose loss or gradient is no number: "skip" leaves it out on all workers, and
        goes back to the last checkpoint after three in a row; "error" ends the run.
    split: how one copy of the model is divided among workers: `shoal.tensor(2)`, `shoal.pipeline(2)`, or both.
    sync: how copies agree: `shoal.all_reduce()`, `shoal.sharded("parameters")`, `shoal.local(32)`, `shoal.diloco(9)`.
    redundancy: in elastic runs, how many other workers keep what only one holds where state is divided by messages: 1
        lets it survive that worker; 0 saves the memory, and a loss goes back to the newest checkpoint.
    transport: how workers exchange gradients: "auto" (shared memory where possible), "shm" or "tcp".
    timeout_seconds: how long to wait for a silent worker.
    """

    batch_size: int
    seed: int = 0
    shuffle: bool = True
    exact: bool = False
    shards: int | None = None
    microbatch_size: int | None = None
    memory: int | None = None
    device: str | None = None
    max_norm: float | None = None
    precision: Precision = "float32"
    compile: bool = False
    ema: float | None = None
    loaders: int | None = None
    checkpoint_every: int | None = None
    keep: int = 3
    checkpoint_dir: str | None = None
    balance: bool = True
    threads: int | Literal["auto"] | None = None
    schedule: Literal["step", "epoch"] = "step"
    unused: Literal["error", "zero"] = "error"
    not_finite: Literal["skip", "error"] = "skip"
    split: Split | None = None
    sync: Sync = EVERY_STEP
    redundancy: int = 1
    transport: Literal["auto", "shm", "tcp"] = "auto"
    timeout_seconds: float = 300.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value, rule = getattr(self, field.name), RULES[field.name]
            if not (value is None and field.default is None) and not rule.fits(value):
                raise _wrong(field.name, value, rule)


@dataclass(frozen=True, slots=True)
class Rule:
    """What a setting may be, in words and as a test, and an example."""

    wanted: str
    example: str
    fits: Callable[[Any], bool]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _one_of(name: str) -> Rule:
    allowed = get_args(get_type_hints(Settings)[name])
    return Rule(" or ".join(map(repr, allowed)), repr(allowed[-1]), lambda value: value in allowed)


DEVICES = re.compile(r"auto|cpu|cuda(:\d+)?")

_COUNT = Rule("a whole number of 1 or more", "8", lambda value: _is_whole(value) and value >= 1)
_THREADS = Rule(f"{_COUNT.wanted}, or 'auto'", "8", lambda value: value == "auto" or _COUNT.fits(value))
_SWITCH = Rule("True or False", "True", lambda value: isinstance(value, bool))

RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("batch_size", "shards", "microbatch_size", "checkpoint_every", "keep"), _COUNT),
    **dict.fromkeys(("shuffle", "exact", "compile", "balance"), _SWITCH),
    **{name: _one_of(name) for name in ("precision", "schedule", "unused", "not_finite", "transport")},
    "checkpoint_dir": Rule(
        "a folder or a URL", '"s3://bucket/run"', lambda value: isinstance(value, str) and value != ""
    ),
    "seed": Rule("a whole number", "0", _is_whole),
    "memory": Rule("a size", '"2GB"', _COUNT.fits),
    "device": Rule("'cpu', 'cuda', 'cuda:1' or 'auto'", '"auto"', lambda value: bool(DEVICES.fullmatch(str(value)))),
    "threads": _THREADS,
    "loaders": Rule("a whole number of 0 or more", "1", lambda value: _is_whole(value) and value >= 0),
    "max_norm": Rule("a number above 0", "1.0", lambda value: _is_number(value) and value > 0),
    "timeout_seconds": Rule("a number above 0", "300.0", lambda value: _is_number(value) and value > 0),
    "split": Rule("a way to cut a model", "shoal.pipeline(2)", lambda value: isinstance(value, Split)),
    "sync": Rule(
        "a way to agree", "shoal.local(every=32)", lambda value: isinstance(value, AllReduce | Sharded | Local)
    ),
    "redundancy": Rule("1, or 0 for none", "1", lambda value: _is_whole(value) and value in (0, 1)),
    "ema": Rule("a decay between 0 and 1", "0.999", lambda value: _is_number(value) and 0 < value < 1),
}
"""One for each setting; None is allowed where it is the default."""

NAMES = tuple(field.name for field in fields(Settings))

OTHER_NAMES = ("scheduler", "collate", "init_from", "strict", "run_dir", "resume")
"""What `Trainer` takes besides."""

ELSEWHERE = {
    "epochs": "say it to fit: `trainer.fit(epochs=3)`",
    "steps": "say it to fit: `trainer.fit(steps=1000)`",
    "lr": "give it to the optimizer: `torch.optim.AdamW(model.parameters(), lr=1e-3)`",
    "num_workers": "start the script with `shoal run -n 2`; processes that load data are `loaders=2`",
}
"""What people look for here and find in another place."""


def values_of(settings: Settings) -> dict[str, Any]:
    """Every value as plain data; strategies as their texts, URLs without secrets."""
    values = {name: getattr(settings, name) for name in NAMES}
    values["checkpoint_dir"] = settings.checkpoint_dir and mask(settings.checkpoint_dir)
    return values | {"split": str(settings.split or "none"), "sync": str(settings.sync)}


def make_settings(given: Mapping[str, Any], overrides: Mapping[str, str]) -> tuple[Settings, dict[str, str]]:
    """Settings from the script's keywords, then from text overrides; also says where each value came from."""
    _check_names(given, "Trainer has no argument {name!r}.", (*NAMES, *OTHER_NAMES))
    origins = {name: "script" if name in given else "default" for name in NAMES}
    settings = Settings(**{name: _plain(name, value) for name, value in given.items()})
    # `engine.` and the like are other parts' options.
    own = {name.removeprefix("train."): text for name, text in overrides.items() if _is_ours(name)}
    _check_names(own, "There is no setting {name!r} to override with -o.", NAMES)
    for name, text in own.items():
        settings = replace(settings, **{name: parse(name, text)})
        origins[name] = f"-o {name}={mask(text)}"
    _check_exact(settings)
    _check_copy(settings)
    return settings, origins


def _check_copy(settings: Settings) -> None:
    """The workers that hold one copy of the model together compute one forward."""
    if settings.precision == "auto" and settings.split is not None:
        raise UserError(
            f'precision="auto" and split={settings.split} exclude each other.',
            why="each worker would choose for itself, and those of one copy compute one forward together",
            hint='say which it is to be: precision="bf16" or "float32"',
        )


def _check_exact(settings: Settings) -> None:
    """What each machine would choose for itself is part of the result, and so is what each copy learns by itself."""
    if settings.exact and isinstance(settings.sync, Local):
        raise UserError(
            f"exact=True and sync={settings.sync} exclude each other.",
            why="copies that train by themselves come to another result with another number of them",
            hint="leave exact out, or use sync=all_reduce",
        )
    found = [f'{name}="auto"' for name in ("precision", "threads") if getattr(settings, name) == "auto"]
    if settings.exact and found:
        raise UserError(
            f"exact=True and {found[0]} exclude each other.",
            why="machines that choose differently come to different results",
            hint="say which it is to be, the same on all workers",
        )


def _is_ours(name: str) -> bool:
    return name.startswith("train.") or "." not in name


def _check_names(given: Mapping[str, Any], message: str, known: Sequence[str]) -> None:
    for name in given:
        if name not in NAMES:
            close = get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(known)}"
            raise UserError(
                message.format(name=name),
                why="it is none of the settings of a run",
                hint=ELSEWHERE.get(name, hint),
            )


def _plain(name: str, value: Any) -> Any:
    """A single number of numpy or torch counts as that number, and a text of a strategy as that strategy."""
    if name == "split":
        return combine(value)
    if name == "sync" and isinstance(value, str):
        return parse_sync(value)
    if name == "memory" and isinstance(value, str):
        return parse(name, value)
    if name == "device" and value is not None:
        return str(value)
    if name == "checkpoint_dir" and isinstance(value, PathLike):
        return fspath(value)
    return value.item() if getattr(value, "ndim", None) == 0 else value


def parse(name: str, text: str) -> Any:
    """A setting's value from its text on the command line."""
    if name in ("split", "sync"):
        return parse_split(text) if name == "split" else parse_sync(text)
    hint = str(get_type_hints(Settings)[name])
    if text.lower() in ("none", "") and "None" in hint:
        return None
    if text == "auto" and "'auto'" in hint:
        return text
    try:
        if name == "memory":
            return parse_bytes(text)
        if "bool" in hint:
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[text.lower()]
        if "float" in hint and "Literal" not in hint:
            return float(text)
        return int(text) if "int" in hint else text
    except (ValueError, KeyError, UserError):
        raise _wrong(name, text, RULES[name]) from None


def _wrong(name: str, value: object, rule: Rule) -> UserError:
    shown = repr(value) if len(repr(value)) <= 60 else f"a {type(value).__name__}"
    return UserError(
        f"{name}={shown} does not work.", why=f"it must be {rule.wanted}", hint=f"for example: {name}={rule.example}"
    )
