"""What a checkpoint says besides tensors: where the run was, and how it was going on."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shoal.checkpoint.facts import Fact
from shoal.checkpoint.state import State
from shoal.data.ledger import Ledger, Place
from shoal.spec.errors import UserError
from shoal.spec.strategy import Local
from shoal.train.flat import shorten
from shoal.train.settings import Settings

FIXED = ("seed", "shuffle", "exact")
"""Settings that decide which samples come and what they do: a run does not continue under others."""


def write_progress(
    place: Place,
    settings: Settings,
    ledger: Ledger,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    counts: Sequence[Mapping[str, float]],
) -> dict[str, Fact]:
    """Everything but the tensors; `counts` are the optimizer's. No worker count appears in it."""
    return {
        "position": place.position,
        "epoch": place.epoch,
        "offset": place.offset,
        **sizes_of(settings, ledger),
        "sync": str(settings.sync),
        "settings": {name: getattr(settings, name) for name in FIXED},
        "optimizer": type(optimizer).__name__,
        "groups": [hyper_parameters(group) for group in optimizer.param_groups],
        "counts": list(counts),
        "scheduler": plain(scheduler.state_dict()) if scheduler is not None else None,
        "torch": str(torch.__version__),
    }


def sizes_of(settings: Settings, ledger: Ledger) -> dict[str, Fact]:
    return {
        "batch_size": settings.batch_size,
        "num_samples": ledger.num_samples,
        "num_shards": ledger.num_shards,
    }


def hyper_parameters(group: Mapping[str, Any]) -> Fact:
    return plain({name: value for name, value in group.items() if name != "params"})


def plain(value: Any) -> Any:
    """Values of a state_dict as plain data; what has none (functions, objects) is left to the script."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items() if is_plain(item)}
    if isinstance(value, list | tuple):
        items = [plain(item) for item in value if is_plain(item)]
        return items if isinstance(value, list) else tuple(items)
    return value


def is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | list | tuple | Mapping | torch.Tensor)


def read_progress(
    state: State,
    ledger: Ledger,
    settings: Settings,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    shapes: Mapping[str, torch.Size],
) -> tuple[Place, list[dict[str, float]]]:
    """Put hyper-parameters and scheduler back; returns the place in the data and what the optimizer counted."""
    facts: Mapping[str, Any] = state.facts
    _check_settings(facts, ledger, settings)
    _check_model(state, shapes)
    _check_optimizer(facts, optimizer)
    for group, saved in zip(optimizer.param_groups, facts["groups"], strict=True):
        group.update(saved)
    if scheduler is not None and facts["scheduler"] is not None:
        scheduler.load_state_dict(facts["scheduler"])
    place = ledger.place(int(facts["position"]))
    if ledger.num_samples is None:
        place = Place(step=state.step, epoch=facts["epoch"], offset=facts["offset"], position=facts["position"])
    return place, facts["counts"]


def _check_settings(facts: Mapping[str, Any], ledger: Ledger, settings: Settings) -> None:
    asked = {name: getattr(settings, name) for name in FIXED} | sizes_of(settings, ledger)
    saved = {**facts.get("settings", {}), **{name: facts.get(name) for name in sizes_of(settings, ledger)}}
    changed = [name for name, value in asked.items() if saved.get(name) != value]
    # Where copies train by themselves, the number of shards follows from the number of workers.
    if isinstance(settings.sync, Local) or str(facts.get("sync", "")).startswith("local:"):
        changed = [name for name in changed if name != "num_shards"]
    # The number of shards follows from the others unless it alone was changed.
    changed = [name for name in changed if name != "num_shards" or len(changed) == 1]
    if changed:
        raise _different(
            "; ".join(f"{name} was {saved.get(name)!r} and is now {asked[name]!r}" for name in changed),
            why="the same samples would not come in the same order, so this would not be a continuation",
        )


def _check_model(state: State, found: Mapping[str, torch.Size]) -> None:
    saved = {name.removeprefix("model/"): t.shape for name, t in state.tensors.items() if name.startswith("model/")}
    odd = [
        f"{name} {_shape(saved.get(name))} -> {_shape(found.get(name))}"
        for name in {**found, **saved}
        if _shape(saved.get(name)) != _shape(found.get(name))
    ]
    if odd:
        raise _different(f"{len(odd)} layer(s) of the model: {shorten(odd)}", why="its values do not fit this model")


def _shape(shape: torch.Size | None) -> str:
    return "absent" if shape is None else str(list(shape))


def _check_optimizer(facts: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
    name, now = facts.get("optimizer"), type(optimizer).__name__
    if name is not None and name != now:
        raise _different(
            f"the optimizer was {name} and is now {now}", why="each optimizer keeps a state of its own kind"
        )
    before, groups = len(facts.get("groups", ())), len(optimizer.param_groups)
    if before != groups:
        raise _different(
            f"the optimizer had {before} parameter group(s) and has now {groups}",
            why="the state of each group could not be put back",
        )


def _different(what: str, why: str) -> UserError:
    return UserError(
        f"The checkpoint is of a different run: {what}.",
        why=why,
        hint="resume with what it was made with, or start anew from its weights with `init_from=`",
    )
