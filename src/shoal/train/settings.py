"""What a training run leaves open or decides: one frozen record, from the script and then from `-o`."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_type_hints

from shoal.spec.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to train. Every field may be given to `Trainer` or overridden with `shoal run -o name=value`.

    batch_size: samples of a step, over all workers together.
    seed: of the order of samples and of the model's random numbers.
    exact: bit-identical parameters for any number of workers; see docs/exact.md for what it costs.
    shards: into how many parts a step is cut; None chooses. Models with dropout or batch statistics compute each
        part by itself, so their result depends on it (and on nothing else).
    microbatch_size: most samples in one forward; larger steps accumulate gradients.
    max_norm: clip the gradient of the whole batch to this norm.
    precision: "float32", or "bf16" for autocast.
    compile: run the model through torch.compile.
    ema: decay of a moving average of the parameters, such as 0.999.
    loaders: processes that load data in each worker; None uses a thread, or one process where the data draws random
        numbers; 0 never uses a process.
    checkpoint_every: steps between checkpoints; None saves at the end of `fit` only.
    keep: how many checkpoints to keep.
    balance: give faster workers more of each step.
    threads: intra-op threads of each worker; None leaves them as they are, in exact mode one.
    schedule: when the scheduler steps: after each "step" or each "epoch".
    unused: what to do about parameters that no sample of the first step reaches: "error", or "zero" for models with
        branches that are used now and then.
    transport: how workers exchange gradients: "auto" (shared memory where possible), "shm" or "tcp".
    timeout_seconds: how long to wait for a silent worker.
    """

    batch_size: int
    seed: int = 0
    shuffle: bool = True
    exact: bool = False
    shards: int | None = None
    microbatch_size: int | None = None
    max_norm: float | None = None
    precision: Literal["float32", "bf16"] = "float32"
    compile: bool = False
    ema: float | None = None
    loaders: int | None = None
    checkpoint_every: int | None = None
    keep: int = 3
    balance: bool = True
    threads: int | None = None
    schedule: Literal["step", "epoch"] = "step"
    unused: Literal["error", "zero"] = "error"
    transport: Literal["auto", "shm", "tcp"] = "auto"
    timeout_seconds: float = 300.0

    def __post_init__(self) -> None:
        for name in ("batch_size", "shards", "microbatch_size", "checkpoint_every", "keep", "threads"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise _wrong(name, value, "a whole number of 1 or more")
        for name in ("max_norm", "timeout_seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise _wrong(name, value, "a number above 0")
        if self.ema is not None and not 0 < self.ema < 1:
            raise _wrong("ema", self.ema, "a decay between 0 and 1, such as 0.999")
        for name in ("precision", "schedule", "unused", "transport"):
            allowed = get_args(get_type_hints(Settings)[name])
            if getattr(self, name) not in allowed:
                raise _wrong(name, getattr(self, name), " or ".join(map(repr, allowed)))


NAMES = tuple(field.name for field in fields(Settings))


def make_settings(given: Mapping[str, Any], overrides: Mapping[str, str]) -> tuple[Settings, dict[str, str]]:
    """Settings from the script's keywords, then from text overrides; also says where each value came from."""
    _check_names(given, "Trainer has no argument {name!r}.")
    origins = {name: "script" if name in given else "default" for name in NAMES}
    settings = Settings(**given)
    # `engine.` and the like are other parts' options.
    own = {name.removeprefix("train."): text for name, text in overrides.items() if _is_ours(name)}
    _check_names(own, "There is no setting {name!r} to override with -o.")
    for name, text in own.items():
        settings = replace(settings, **{name: parse(name, text)})
        origins[name] = f"-o {name}={text}"
    return settings, origins


def _is_ours(name: str) -> bool:
    return name.startswith("train.") or "." not in name


def _check_names(given: Mapping[str, Any], message: str) -> None:
    for name in given:
        if name not in NAMES:
            close = get_close_matches(name, NAMES, 1)
            raise UserError(
                message.format(name=name),
                hint=f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(NAMES)}",
            )


def parse(name: str, text: str) -> Any:
    """A setting's value from its text on the command line."""
    hint = str(get_type_hints(Settings)[name])
    if text.lower() in ("none", "") and "None" in hint:
        return None
    try:
        if "bool" in hint:
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[text.lower()]
        if "float" in hint and "Literal" not in hint:
            return float(text)
        return int(text) if "int" in hint else text
    except (ValueError, KeyError):
        raise _wrong(name, text, "a value of the right type") from None


def _wrong(name: str, value: object, wanted: str) -> UserError:
    return UserError(f"{name}={value!r} does not work.", why=f"it must be {wanted}", hint=f"change {name}=")
