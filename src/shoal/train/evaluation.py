"""Using a model on a dataset with all workers: measure it, or collect what it answers."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from shoal.comm.group import Group
from shoal.data.shares import assign
from shoal.spec.errors import UserError
from shoal.train.errors import in_user_code
from shoal.train.loss import Loss, as_sum, move

Forward = Callable[[nn.Module, Any], Any]
"""(model, batch) -> tensors whose first dimension is the batch's samples."""

Use = Callable[[Callable[[nn.Module, Any], Any], Any], Any]
"""(function, batch) -> what `function(model, batch)` gives, whoever has the model."""


def call_model(model: nn.Module, batch: Any) -> Any:
    """Feed a batch to a model as most expect it: a tensor, the first of a tuple, or keywords from a dict."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(batch[0] if isinstance(batch, list | tuple) else batch)


def evaluate(
    model: nn.Module,
    use: Use,
    loss: Loss,
    source: Any,
    group: Group,
    block: int,
    device: torch.device,
    piece: int | None = None,
) -> dict[str, float]:
    """The mean over all samples of what `loss` returns: a scalar, (sum, weight), or a dict of names to either.

    The dataset is cut into blocks of a fixed size, which are divided among the workers; block results are added up
    exactly. So the answer does not depend on the number of workers, to the last bit; but for rounding where `piece`
    says that this one computes fewer samples at a time.
    """
    blocks = cut_blocks(count_samples(source), block)
    mine = assign(len(blocks), [1.0] * group.size)[group.rank]
    rows: dict[int, list[float]] = {}
    with evaluating(model):
        # A worker without a block computes the first one, only to learn what is measured.
        for index in mine or range(1):
            parts: list[list[float]] = []
            for ids in cut_ids(blocks[index], piece):
                batch = move(source.fetch(ids), device)
                with in_user_code(group.rank, None, batch, f"evaluating samples {ids[0]} to {ids[-1]}", loss):
                    names, part = measure(use(loss, batch), len(ids))
                parts.append(part if mine else [0.0] * len(part))
            rows[index] = [sum(column) for column in zip(*parts, strict=True)]
    table = gather_rows(rows, len(blocks), group)
    sums = [(math.fsum(table[:, 2 * i]), math.fsum(table[:, 2 * i + 1])) for i in range(len(names))]
    return {name: total / weight if weight else math.nan for name, (total, weight) in zip(names, sums, strict=True)}


def count_samples(source: Any) -> int:
    if source.num_samples is None:
        raise UserError(
            f"A stream ({source.name}) cannot be evaluated or predicted on.",
            why="it is divided among the workers by sample number, and a stream has none",
            hint="pass tensors, files, or a dataset with `__len__` and `__getitem__`, such as `list(stream)`",
        )
    return int(source.num_samples)


def cut_blocks(num_samples: int, block: int) -> list[tuple[int, int]]:
    return [(start, min(start + block, num_samples)) for start in range(0, num_samples, block)]


def cut_ids(span: tuple[int, int], piece: int | None) -> list[np.ndarray]:
    """The samples of a block, in pieces of at most so many."""
    start, stop = span
    size = piece or stop - start
    return [np.arange(at, min(at + size, stop)) for at in range(start, stop, size)]


def measure(result: Any, num_samples: int) -> tuple[tuple[str, ...], list[float]]:
    """Names, and a (sum, weight) for each."""
    named = result if isinstance(result, Mapping) else {"loss": result}
    row: list[float] = []
    for value in named.values():
        if isinstance(value, int | float):  # nothing is differentiated here, so a plain number will do
            value = torch.tensor(float(value), dtype=torch.float64)
        total, factor, weight = as_sum(value, num_samples)
        row += [float(total) * factor, weight]
    return tuple(named), row


def gather_rows(rows: Mapping[int, list[float]], num_rows: int, group: Group) -> np.ndarray:
    """All workers' rows as one table. Every cell has one writer, so adding the tables up copies them."""
    table = torch.zeros(num_rows, len(next(iter(rows.values()))), dtype=torch.float64)
    for index, row in rows.items():
        table[index] = torch.tensor(row, dtype=torch.float64)
    group.all_reduce(table).wait()
    return table.numpy()


def predict(
    model: nn.Module,
    use: Use,
    forward: Forward,
    source: Any,
    group: Group,
    block: int,
    device: torch.device,
    piece: int | None = None,
) -> Any:
    """The model's outputs for every sample, in the dataset's order, on every worker.

    Outputs are tensors, or tuples or dicts of tensors.
    """
    blocks = cut_blocks(count_samples(source), block)
    ranges = assign(len(blocks), [1.0] * group.size)
    outputs: list[Any] = []
    with evaluating(model):
        # A worker without a block computes the first one, only to learn the shapes.
        for index in ranges[group.rank] or range(1):
            for ids in cut_ids(blocks[index], piece):
                batch = move(source.fetch(ids), device)
                with in_user_code(group.rank, None, batch, f"predicting samples {ids[0]} to {ids[-1]}", forward):
                    outputs.append(check_output(use(forward, batch), len(ids)))
    counts = [sum(blocks[i][1] - blocks[i][0] for i in of_rank) for of_rank in ranges]
    return join(outputs, counts, group)


def check_output(output: Any, num_samples: int) -> Any:
    for part in parts_of(output):
        if part.dim() == 0 or part.shape[0] != num_samples:
            raise UserError(
                f"The model gave an output of shape {tuple(part.shape)} for {num_samples} samples.",
                why="predictions are put together along the first dimension, one entry a sample",
                hint="pass `forward=` a function that returns one row a sample",
            )
    return output


def parts_of(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, Mapping):
        return [part for value in output.values() for part in parts_of(value)]
    if isinstance(output, list | tuple):
        return [part for value in output for part in parts_of(value)]
    raise UserError(
        f"The model's output holds a {type(output).__name__}.",
        why="predictions are tensors, or tuples and dicts of tensors",
        hint="pass `forward=` a function that returns tensors",
    )


def join(outputs: list[Any], counts: list[int], group: Group) -> Any:
    """Everybody's outputs along the first dimension."""
    first = outputs[0]
    if isinstance(first, Mapping):
        return {key: join([output[key] for output in outputs], counts, group) for key in first}
    if isinstance(first, list | tuple):
        return tuple(join([output[i] for output in outputs], counts, group) for i in range(len(first)))
    mine = torch.cat(outputs)[: counts[group.rank]].cpu().contiguous()
    row_bytes = first[:1].numel() * first.element_size()
    # As bytes, because a group moves only some types.
    padded = torch.zeros(max(counts) * row_bytes, dtype=torch.uint8)
    padded[: mine.numel() * mine.element_size()] = mine.reshape(-1).view(torch.uint8)
    everyone = torch.empty(group.size * padded.numel(), dtype=torch.uint8)
    group.all_gather(everyone, padded).wait()
    parts = [part[: count * row_bytes] for part, count in zip(everyone.split(padded.numel()), counts, strict=True)]
    return torch.cat(parts).view(first.dtype).view(sum(counts), *first.shape[1:])


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and no gradients inside; each module's own mode is back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
