"""What a checkpoint says besides tensors: where the run was, and how it was going on."""

from collections.abc import Mapping
from typing import Any

import torch

from shoal.checkpoint.facts import Fact
from shoal.checkpoint.state import State
from shoal.data.ledger import Ledger, Place
from shoal.spec.errors import UserError
from shoal.train.replica import Replica
from shoal.train.settings import Settings

FIXED = ("seed", "shuffle", "exact")
"""Settings that decide which samples come and what they do: a run does not continue under others."""


def write_progress(
    place: Place,
    settings: Settings,
    ledger: Ledger,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    replica: Replica,
) -> dict[str, Fact]:
    """Everything but the tensors. No worker count appears in it."""
    return {
        "position": place.position,
        "epoch": place.epoch,
        "offset": place.offset,
        **sizes_of(settings, ledger),
        "settings": {name: getattr(settings, name) for name in FIXED},
        "groups": [hyper_parameters(group) for group in optimizer.param_groups],
        "counts": replica.scalars(),
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
        return {str(key): plain(item) for key, item in value.items() if is_plain(item)}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value if is_plain(item)]
    return value


def is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | list | tuple | Mapping | torch.Tensor)


def read_progress(
    state: State, ledger: Ledger, settings: Settings, optimizer: torch.optim.Optimizer, scheduler: Any
) -> tuple[Place, list[dict[str, float]]]:
    """Put hyper-parameters and scheduler back; returns the place in the data and what the optimizer counted."""
    facts: Mapping[str, Any] = state.facts
    _check(facts, ledger, settings, len(optimizer.param_groups))
    for group, saved in zip(optimizer.param_groups, facts["groups"], strict=True):
        group.update({name: _like(value, group.get(name)) for name, value in saved.items()})
    if scheduler is not None and facts["scheduler"] is not None:
        scheduler.load_state_dict(facts["scheduler"])
    place = ledger.place(int(facts["position"]))
    if ledger.num_samples is None:
        place = Place(step=state.step, epoch=facts["epoch"], offset=facts["offset"], position=facts["position"])
    return place, facts["counts"]


def _like(value: Any, old: Any) -> Any:
    """JSON has no tuples: give back the kind that was there."""
    return tuple(value) if isinstance(old, tuple) and isinstance(value, list) else value


def _check(facts: Mapping[str, Any], ledger: Ledger, settings: Settings, num_groups: int) -> None:
    asked = {name: getattr(settings, name) for name in FIXED} | sizes_of(settings, ledger)
    saved = {**facts.get("settings", {}), **{name: facts.get(name) for name in sizes_of(settings, ledger)}}
    changed = [name for name, value in asked.items() if saved.get(name) != value]
    different = [f"{name} was {saved.get(name)!r} and is now {asked[name]!r}" for name in changed]
    if len(facts.get("groups", ())) != num_groups:
        different.append(f"the optimizer had {len(facts.get('groups', ()))} parameter groups, now {num_groups}")
    if different:
        raise UserError(
            f"The checkpoint is of a different run: {'; '.join(different)}.",
            why="the same samples would not come in the same order, so this would not be a continuation",
            hint="resume with the settings it was made with, or start anew from its weights with `init_from=`",
        )
