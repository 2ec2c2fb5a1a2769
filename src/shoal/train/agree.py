"""Whether all workers were given the same: what they add up must belong together."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from shoal.comm.group import Group
from shoal.data.ledger import Ledger
from shoal.data.sources import Source
from shoal.data.stream import StreamSource
from shoal.spec.errors import UserError
from shoal.train.resume import hyper_parameters, plain
from shoal.train.settings import Settings, values_of

OWN = ("compile", "device", "keep", "loaders", "memory", "microbatch_size", "precision", "threads", "timeout_seconds")
"""Settings that each worker may have for itself. In exact mode precision is part of the result."""

OF_A_COPY = ("microbatch_size", "precision")
"""Those of them that the workers of one copy must have in common: they compute the same pieces together."""

SHOWN_BYTES = 80
"""Of a value that differs, how much is told."""

HINT = "give every worker the same, whatever its rank: shoal divides the samples itself"


def check_same(group: Group, model: nn.Module, optimizer: torch.optim.Optimizer, facts: Mapping[str, object]) -> None:
    """Raise UserError unless all workers have the same model, optimizer and other facts."""
    if group.size > 1:
        check_same_model(group, model, optimizer)
        check_agreement(group, {**facts, "the optimizer": type(optimizer).__name__})
        check_agreement(group, hyper_facts(optimizer))


def check_copies(group: Group, settings: Settings, num_parts: int) -> None:
    """Raise UserError unless the workers of each copy, `num_parts` neighbours, are to compute alike."""
    if num_parts > 1:
        facts = {name: getattr(settings, name) for name in OF_A_COPY}
        check_agreement(group, facts, num_together=num_parts, why="they hold one copy of the model together")


def check_agreement(
    group: Group,
    facts: Mapping[str, object],
    *,
    num_together: int | None = None,
    why: str = "they train one model together, on one dataset",
) -> None:
    """Raise the same error on every rank for the first fact that is not the same on all; its values are told.

    With `num_together`, on so many neighbours. Names must be the same everywhere. Costs one small all_gather.
    """
    if group.size == 1:
        return
    mine = torch.tensor([_number(value) for value in facts.values()])
    everyone = _gather(group, mine)
    first_of = [rank - rank % (num_together or group.size) for rank in range(group.size)]
    for column, (name, value) in enumerate(facts.items()):
        odd = [rank for rank in range(group.size) if everyone[rank, column] != everyone[first_of[rank], column]]
        if odd:
            first, other = first_of[odd[0]], odd[0]
            here, there = _texts(group, str(value), (first, other))
            raise UserError(
                f"The workers do not agree: {name} is {here} on rank {first} and {there} on rank {other}.",
                why=why,
                hint=HINT,
            ).blame("disagreement", find_odd(everyone[:, column].tolist())[0] if num_together is None else odd)


def check_same_model(group: Group, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Workers that built different models would add up what does not belong together."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [[names.get(id(parameter)) for parameter in held["params"]] for held in optimizer.param_groups]
    tensors = [(name, value) for name, value in model.state_dict(keep_vars=True).items() if _is_tensor(value)]
    state = [(name, tuple(value.shape), value.dtype, value.requires_grad) for name, value in tensors]
    everyone = _gather(group, torch.tensor([_number((state, groups))]))
    odd, usual = find_odd(everyone[:, 0].tolist())
    if odd:
        raise UserError(
            f"The workers built different models: rank {odd[0]} differs from rank {usual}.",
            why=_find_difference(group, state, (odd[0], usual))
            or "names, shapes, types or groups of parameters, or which are frozen, are not the same on all workers",
            hint="build the model the same way everywhere, not from the rank or from this worker's data",
        ).blame("shape_mismatch", odd)


def find_odd(numbers: Sequence[int]) -> tuple[list[int], int]:
    """The ranks whose number is not that of most, and the first that has it. Of two halves rank 0's counts."""
    counts = Counter(numbers)
    usual = max(counts, key=lambda number: (counts[number], number == numbers[0]))
    return [rank for rank, number in enumerate(numbers) if number != usual], list(numbers).index(usual)


def _find_difference(group: Group, state: Sequence[tuple[Any, ...]], ranks: tuple[int, int]) -> str:
    """The first tensor that two ranks have different, in words; nothing where they are not even as many."""
    sizes = _gather(group, torch.tensor([len(state)])).view(-1).tolist()
    if len(set(sizes)) > 1:
        return f"its model has {sizes[ranks[0]]} tensors, and that of rank {ranks[1]} {sizes[ranks[1]]}"
    everyone = _gather(group, torch.tensor([_number(entry) for entry in state] or [0]))
    columns = (everyone[ranks[0]] != everyone[ranks[1]]).nonzero().view(-1).tolist()
    if not columns:
        return ""
    name, shape, kind, _ = state[columns[0]]
    here, there = _texts(group, f"{name} {list(shape)} {str(kind).removeprefix('torch.')}", ranks)
    return f"it has {here} where rank {ranks[1]} has {there}"


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def facts_of(settings: Settings, ledger: Ledger, scheduler: Any) -> dict[str, object]:
    """What must be the same on all workers, by the names that people know it by."""
    facts: dict[str, object] = {k: v for k, v in values_of(settings).items() if k not in OWN}
    facts |= {"precision": settings.precision} if settings.exact else {}
    facts |= {"the number of samples": ledger.num_samples, "the number of shards": ledger.num_shards}
    facts["the scheduler"] = type(scheduler).__name__
    return facts | {"the state of the scheduler": plain(scheduler.state_dict()) if scheduler is not None else None}


def hyper_facts(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """The optimizer's own settings, of one type of optimizer."""
    groups: list[Any] = [hyper_parameters(group) for group in optimizer.param_groups]
    return {f"{k} of parameter group {number}": v for number, group in enumerate(groups) for k, v in group.items()}


def find_different_data(group: Group, source: Source) -> int | None:
    """The first rank whose first, middle or last sample is not that of rank 0, as where datasets were cut by rank.

    None if all are the same, and for data that does not give the same sample twice.
    """
    number = 0
    if not isinstance(source, StreamSource) and not source.draws:
        some = np.array(sorted({0, source.num_samples // 2, source.num_samples - 1}))
        number = _number(list(_contents(source.fetch(some))))
    numbers = _gather(group, torch.tensor([number])).view(-1).tolist()
    return None if 0 in numbers else next((rank for rank, other in enumerate(numbers) if other != numbers[0]), None)


def _contents(batch: Any) -> Iterator[object]:
    if isinstance(batch, torch.Tensor) and batch.layout == torch.strided:
        yield hashlib.sha256(batch.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data).hexdigest()
    elif isinstance(batch, Mapping):
        yield from _contents(list(batch.values()))
    elif isinstance(batch, list | tuple):
        for part in batch:
            yield from _contents(part)
    elif isinstance(batch, int | float | str | bytes):
        yield batch


def _number(value: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7])


def _gather(group: Group, mine: torch.Tensor) -> torch.Tensor:
    everyone = torch.empty(group.size * mine.numel(), dtype=mine.dtype)
    group.all_gather(everyone, mine).wait()
    return everyone.view(group.size, -1)


def _texts(group: Group, text: str, ranks: tuple[int, int]) -> tuple[str, str]:
    """The texts of two ranks."""
    mine = torch.zeros(SHOWN_BYTES, dtype=torch.uint8)
    data = text.encode()[:SHOWN_BYTES]
    mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else 0
    everyone = _gather(group, mine)
    both = [bytes(everyone[each].tolist()).rstrip(b"\0").decode(errors="ignore") for each in ranks]
    return both[0], both[1]
