"""Which samples made a loss that is no number."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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


@contextmanager
def naming_samples(
    ledger: Ledger, source: Source, plan: StepPlan, assignment: Sequence[Sequence[int]]
) -> Iterator[None]:
    """Say of a loss that is no number which samples it was computed from, and whether they themselves are to blame.

    Every worker finds out for itself, from the plan and the dataset alone, so that all of them say the same.
    """
    try:
        yield
    except LossNotFinite as error:
        start, _ = shard_bounds(error.shard, plan.count, ledger.num_shards)
        ids = ledger.ids(plan.epoch, plan.offset + start, plan.offset + start + error.num_samples)
        bad = find_bad(source, ids[:MAX_SAMPLES].tolist())
        owner = next(rank for rank, mine in enumerate(assignment) if error.shard in mine)
        explained = _explain(error, ids.tolist(), bad, f"rank {owner}, shard {error.shard}")
        explained.samples = ids.tolist()
        raise explained.at(step=plan.step) from None


def _explain(error: LossNotFinite, ids: list[int], bad: list[int], place: str) -> NotFinite:
    plural = "samples" if len(ids) > 1 else "sample"
    message = f"The loss is {error.value} for {plural} {shorten([str(i) for i in ids])} ({place})."
    if bad:
        return NotFinite(
            message,
            why=f"sample {shorten([str(i) for i in bad])} holds nan or inf itself; the step was not taken",
            hint=f"look at `dataset[{bad[0]}]`; clean the data, or leave such samples out",
        )
    return NotFinite(
        message,
        why="the step was not taken, for it would have destroyed the parameters",
        hint="lower the learning rate, clip with `max_norm=1.0`, or look for a logarithm or division at 0",
    )


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
