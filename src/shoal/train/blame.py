"""Which samples made a step that is no number."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from shoal.data.ledger import Ledger, StepPlan, shard_bounds
from shoal.data.sources import Source
from shoal.data.stream import StreamSource
from shoal.train.flat import shorten
from shoal.train.sync.table import LossNotFinite, NotFinite

MAX_SAMPLES = 10_000
"""Samples that are looked through again for values that are no numbers."""


def name_samples(
    error: NotFinite, ledger: Ledger, source: Source, plan: StepPlan, assignment: Sequence[Sequence[int]]
) -> NotFinite:
    """Say of a step that is no number which samples it was computed from, and whether they themselves are to blame.

    Every worker finds out for itself, from the plan and the dataset alone, so that all of them say the same. What is
    returned has in `samples` those that hold nan or inf; where none does, all that had a part in it.
    """
    spans = find_spans(error, plan.count, ledger.num_shards)
    ids = [int(i) for start, stop in spans for i in ledger.ids(plan.epoch, plan.offset + start, plan.offset + stop)]
    bad = find_bad(source, ids[:MAX_SAMPLES])
    named = _explain(error, ids, bad)
    if isinstance(error, LossNotFinite):
        named = _explain_loss(error, ids[: error.spans[0][1]], bad, assignment)
    named.samples = bad or ids
    ranks = [rank for rank, mine in enumerate(assignment) if _shards_of(error) & {*mine}]
    return named.blame("nan", ranks).at(rank=error.rank, step=error.step)


def _shards_of(error: NotFinite) -> set[int]:
    """The shards that did it; none where nobody knows."""
    if isinstance(error, LossNotFinite):
        return {shard for shard, _ in error.spans}
    return {shard for shards in error.shards for shard in shards}


def find_spans(error: NotFinite, count: int, num_shards: int) -> list[tuple[int, int]]:
    """Where in a step of `count` samples those are that may have done it: all of it, where nobody knows."""
    if isinstance(error, LossNotFinite):
        starts = [(shard_bounds(shard, count, num_shards)[0], size) for shard, size in error.spans]
        return [(start, start + size) for start, size in starts]
    shards = error.shards or [range(num_shards)]
    bounds = [[shard_bounds(shard, count, num_shards) for shard in (mine[0], mine[-1])] for mine in shards]
    return sorted((first[0], last[1]) for first, last in bounds)


def _explain(error: NotFinite, ids: Sequence[int], bad: Sequence[int]) -> NotFinite:
    """Of a gradient: its message says in which parameters it is bad."""
    why = f"{error.why}; it had the samples {_list(ids)}"
    return NotFinite(error.message, why=_blame(bad) if bad else why, hint=_hint(bad) if bad else error.hint)


def _explain_loss(
    error: LossNotFinite, ids: Sequence[int], bad: Sequence[int], assignment: Sequence[Sequence[int]]
) -> NotFinite:
    shard = error.spans[0][0]
    owner = next(rank for rank, mine in enumerate(assignment) if shard in mine)
    plural = "samples" if len(ids) > 1 else "sample"
    message = f"The loss is {error.value} for {plural} {_list(ids)} (rank {owner}, shard {shard})."
    if bad:
        return NotFinite(message, why=_blame(bad), hint=_hint(bad))
    return NotFinite(
        message,
        why="the step was not taken, for it would have destroyed the parameters",
        hint="lower the learning rate, clip with `max_norm=1.0`, or look for a logarithm or division at 0",
    )


def _list(ids: Sequence[int]) -> str:
    return shorten([str(i) for i in ids])


def _blame(bad: Sequence[int]) -> str:
    return f"sample {_list(bad)} holds nan or inf itself; the step was not taken"


def _hint(bad: Sequence[int]) -> str:
    return f"look at `dataset[{bad[0]}]`; clean the data, or leave such samples out"


def find_bad(source: Source, ids: Sequence[int]) -> list[int]:
    """The samples that hold nan or inf. Data that cannot be read twice alike is not looked at."""
    if isinstance(source, StreamSource) or source.draws:
        return []
    try:
        return [sample for sample in ids if not is_finite(source.fetch(np.array([sample])))]
    except Exception:  # a second look must not hide what was found
        return []


def is_finite(batch: Any) -> bool:
    if isinstance(batch, torch.Tensor):
        return not (batch.is_floating_point() or batch.is_complex()) or bool(batch.isfinite().all())
    if isinstance(batch, Mapping):
        return all(map(is_finite, batch.values()))
    return not isinstance(batch, list | tuple) or all(map(is_finite, batch))
