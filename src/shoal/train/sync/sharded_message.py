"""Copies that exchange messages and divide state among them: of the optimizer, of gradients, of parameters."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from shoal.comm.group import Group, Op
from shoal.elastic.commit import Report, outcome_of
from shoal.spec.strategy import Level
from shoal.train.summing import square_of
from shoal.train.sync.across import Across
from shoal.train.sync.sharded_blocks import Blocks
from shoal.train.sync.sharded_state import Shards
from shoal.train.sync.sharded_sums import UnitGradients
from shoal.train.sync.stopwatch import Arrivals
from shoal.train.sync.sync import Outcome, Row, Standing
from shoal.train.sync.table import NotFinite, StepTable, checked_norm


class MessageShardedSync:
    """Every copy gets its part of the summed gradient, updates its part of the parameters, and gives that to all.

    "optimizer": each keeps a whole gradient and all parameters, and 1/n of the optimizer's state. "gradients": 1/n of
    the gradient, and a few buckets of it on the way. "parameters": 1/n of these, too, besides those of the blocks of
    layers that are being computed; see `Blocks`.

    Sums are taken as the group takes them, in an order that may be another than that of `all_reduce`, and pieces
    of a step are added up piece by piece over all copies; so results agree to rounding.

    With `is_mirrored` each copy also keeps a mirror of another's part, and updates it with that one's gradient, which
    travels before all vote: whoever has voted can take the step, for itself and for the one whose mirror it has.
    """

    is_round_over = True

    def __init__(
        self,
        group: Group,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        level: Level,
        blocks: Mapping[str, Sequence[str]] | None,
        num_shards: int,
        max_norm: float | None = None,
        ema_decay: float | None = None,
        source: int | None = 0,
        is_elastic: bool = False,
        is_mirrored: bool = False,
        reach: Callable[[str], None] = lambda point: None,
        across: Across | None = None,
    ) -> None:
        self._reach, self._group, self._max_norm, self._across = reach, group, max_norm, across
        self._is_elastic = is_elastic
        self._turn = self._voted = self._committed = 0
        self._is_open = False
        self._waited = 0.0
        self.replica = Shards(
            group, model, optimizer, blocks=blocks, source=source, ema_decay=ema_decay, is_mirrored=is_mirrored
        )
        self._blocks = None if blocks is None else Blocks(self.replica, model)
        self.gradients = UnitGradients(group, self.replica, keeps_all=level == "optimizer", blocks=self._blocks)
        self._table = StepTable(num_shards, group.size, lambda size: torch.zeros(size, dtype=torch.float64))
        self._arrivals = Arrivals(group.rank)

    def begin(self, num_shards: int, assignment: Sequence[range]) -> None:
        self._turn += 1
        self._num_shards = num_shards
        self._table.clear()
        self.gradients.begin()
        if self._blocks is not None:
            self._blocks.begin()

    def post(self, rows: Sequence[Row], mine: range, standing: Standing) -> None:
        self._table.write(rows, mine, self._group.rank, standing)
        self._reach("posted")

    def finish(self) -> Outcome:
        started = time.perf_counter()
        stalled = self.gradients.stalled
        self.gradients.finish()
        if self._blocks is not None:
            self._blocks.end()
        assert self._table.values is not None, "every worker has a shard in the first step"
        self._table.arrive(self._group.rank, self._arrivals.arrive(started - stalled))
        self._group.all_reduce(self._table.values).wait()
        wait, last = self._arrivals.judge(self._table.arrivals(), time.perf_counter() - started + stalled)
        self._waited = wait
        if self._across is not None:
            standings = self._table.standings()
            self._across.largest(standings)
            self._table.correct(standings)
        self._result = self._judge()
        self._vote()
        outcome = self._update()
        self.replica.spread()
        self._arrivals.done(time.perf_counter())
        self._is_open = False
        self._reach("updated")
        communicate = time.perf_counter() - started + stalled - wait
        return replace(outcome, communicate=communicate, wait=wait, waited_for=last)

    def _judge(self) -> Outcome | NotFinite:
        """What the step comes to, the same on all copies. Our part of the gradient is as the optimizer needs it then,
        but for clipping; nothing else has changed.
        """
        try:
            totals = self._table.read(self._num_shards)
            self.replica.gradient.mul_(1.0 / totals.weight)
            norm = checked_norm([self._square()], lambda index: self._find_not_finite())
        except NotFinite as error:
            return error
        self.replica.mirror()
        return Outcome(totals=totals, norm=norm, communicate=0.0, wait=0.0, waited_for=None)

    def _vote(self) -> None:
        """All that an update needs is here. Without this a loss could find the step taken by some and not by all."""
        self._voted = self._turn
        self._reach("summed")
        if self._is_elastic:
            (self._across.vote if self._across is not None else self._group.barrier)()
        self._reach("updating")

    def _update(self) -> Outcome:
        """The step counts from here on. It is open until all copies have what it made of the parameters."""
        self._committed = self._turn
        if isinstance(self._result, NotFinite):
            raise self._result
        self._is_open = True
        norm = self._result.norm
        if self._max_norm is not None and norm > self._max_norm:
            self.replica.clip(self._max_norm / norm)
        self.replica.update()
        return self._result

    def _square(self) -> float:
        """The sum of squares of the whole gradient, of which each copy has its part, and each part of the model."""
        names, gradient = self.replica.flat.layout.names, self.replica.gradient
        pieces = [
            piece
            for unit in self.replica.units
            for segment in unit.segments
            if self._across is None or self._across.counts(names[segment.index])
            for piece in gradient[segment.at : segment.at + segment.stop - segment.start].split(2**16)
        ]
        squares = [square_of(piece) for piece in pieces]
        total = torch.stack(squares).double().sum().cpu().view(1) if squares else torch.zeros(1, dtype=torch.float64)
        self._group.all_reduce(total).wait()
        return float(total) if self._across is None else self._across.add(float(total), self._waited)

    def _find_not_finite(self) -> list[str]:
        """The same on all copies."""
        names, gradient = self.replica.flat.layout.names, self.replica.gradient
        is_bad = torch.zeros(len(names), dtype=torch.int32)
        for unit in self.replica.units:
            for segment in unit.segments:
                values = gradient[segment.at : segment.at + segment.stop - segment.start]
                is_bad[segment.index] |= int(not values.isfinite().all())
        self._group.all_reduce(is_bad, Op.MAX).wait()
        return [name for name, bad in zip(names, is_bad.tolist(), strict=True) if bad] or [
            "another part of the model"
        ]

    def agree(self) -> None:
        """All have the same parameters after every step."""

    def resolve(
        self, survivors: Sequence[int], gather: Callable[[str, str], list[str]], *, is_first: bool
    ) -> Outcome | NotFinite | None:
        """If a survivor took the step that was under way, all had voted for it, and the others take it now.

        What it made of the parameters is not with everybody then: the parts are put together in the next World.
        """
        told = [text.split() for text in gather("judged", f"{self._committed} {self._voted}")]
        reports = [Report(committed=int(each[0]), voted=int(each[1])) for each in told if each]
        is_due = outcome_of(reports).turn > self._committed
        gather("settled", "")
        if is_due:
            try:
                self._update()
            except NotFinite as error:
                return error
        is_open, self._is_open = self._is_open, False
        return self._result if is_open else None

    def tensors(self) -> dict[str, torch.Tensor]:
        return dict(self.replica.tensors())

    def checksum(self, step: int) -> int:
        return 0

    def detach(self) -> None:
        self.gradients.detach()
        if self._blocks is not None:
            self._blocks.detach()
        self.replica.optimizer.release()

    def close(self) -> None:
        self.detach()
        self.replica.release()
