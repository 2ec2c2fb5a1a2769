"""A copy that learns from each shard by itself, instead of adding up the gradients of a step."""

from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from typing import Any

from shoal.data.ledger import StepPlan
from shoal.spec.errors import MemberLost
from shoal.train.groups import Groups
from shoal.train.split.split import Forward, Split, Work
from shoal.train.sync.local import LocalSync
from shoal.train.sync.table import NotFinite
from shoal.train.traits import ChangingBuffers


class InnerSteps:
    """Any Split around which each shard is an inner batch: computed, then learned from, before the next one.

    A batch whose loss or gradient is no number is left out by this copy alone; `leave_out` is told of it.
    """

    def __init__(
        self, split: Split, buffers: ChangingBuffers, leave_out: Callable[[StepPlan, NotFinite], None]
    ) -> None:
        self._split, self._buffers, self._leave_out = split, buffers, leave_out

    @property
    def idle(self) -> float:
        return self._split.idle

    def run(self, work: Work) -> None:
        sync = work.sync
        assert isinstance(sync, LocalSync)
        for part in inner_batches(work):
            at_start = self._buffers.read() if self._buffers else None
            sync.open_batch()
            try:
                self._split.run(replace(part, at_start=at_start))
                sync.learn()
            except MemberLost:
                self._buffers.write(at_start)
                raise
            except NotFinite as error:
                self._buffers.write(at_start)
                self._leave_out(work.plan, error)
        if not work.pieces:
            sync.open_batch()
            sync.post([], work.mine, work.standing())
        sync.close_step(work.plan.after)

    def use(self, function: Forward, batch: Any) -> Any:
        return self._split.use(function, batch)

    def meet(self, groups: Groups) -> None:
        self._split.meet(groups)


def inner_batches(work: Work) -> list[Work]:
    """The work of each shard: its pieces are neighbours, for they are in the order of shards."""
    pairs = zip(work.plan.pieces, work.pieces, strict=True)
    groups = [list(group) for _, group in groupby(pairs, key=lambda pair: pair[0].shards)]
    return [
        replace(
            work,
            plan=replace(work.plan, pieces=tuple(piece for piece, _ in group)),
            pieces=tuple(data for _, data in group),
            mine=group[0][0].shards,
        )
        for group in groups
    ]
