"""Copies that take steps of their own and agree now and then: local SGD, DiLoCo, streaming DiLoCo."""

import contextlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from shoal.comm.group import Group
from shoal.data.ledger import Place
from shoal.spec.strategy import Local
from shoal.train.replica import own_replica
from shoal.train.sync.across import Across
from shoal.train.sync.local_agreement import Agreement
from shoal.train.sync.local_book import Owed
from shoal.train.sync.local_gradients import OwnGradients, scale
from shoal.train.sync.sync import Outcome, Row, Standing, Totals
from shoal.train.sync.table import NotFinite, check_losses, checked_norm
from shoal.train.traits import ChangingBuffers


class LocalSync:
    """Each copy learns from its own inner batches with its own optimizer; nothing is exchanged in a step.

    A step is `begin`, then for each inner batch `open_batch`, a forward and backward, and `learn`, then `close_step`;
    then `finish`, in which what copies say to each other leaves and arrives (`Agreement`). Only after `agree` all
    copies have the same parameters. `loss` is that of the last step in which this copy had a batch.

    Where a copy is held in parts, these learn from a batch together. A loss may find some of them beyond it and
    others not, which then have all they need but the others' squares: `resolve` completes it.
    """

    is_round_over = False
    _num_learned = 0
    _square = 0.0
    _incomplete: Callable[[list[float]], None] | None = None

    def __init__(
        self,
        group: Group,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        sync: Local,
        *,
        num_shards: int,
        buffers: ChangingBuffers | None = None,
        max_norm: float | None = None,
        ema_decay: float | None = None,
        source: int = 0,
        is_elastic: bool = False,
        reach: Callable[[str], None] = lambda point: None,
        across: Across | None = None,
    ) -> None:
        self._max_norm, self._reach, self._across = max_norm, reach, across
        self._buffers = buffers if buffers else None
        self.replica = own_replica(model, optimizer, ema_decay=None, is_alone=True)
        flat = self.replica.flat
        group.broadcast(flat.values, root=source).wait()
        if ema_decay is not None:  # of what is agreed on, which an inner step does not change
            self.replica.average = flat.values.clone()
        self.gradients = OwnGradients(flat.parameters)
        self.loss = math.nan
        self._agreement = Agreement(
            group,
            self.replica,
            sync,
            num_shards=num_shards,
            buffers=buffers,
            ema_decay=ema_decay,
            is_elastic=is_elastic,
            reach=reach,
            across=across,
        )

    # A step, of this copy alone.

    def start_at(self, place: Place) -> Place:
        """Go on here, or where all copies stand after a change of World, which is returned."""
        return self._agreement.start_at(place)

    @property
    def owed(self) -> Owed:
        """What of the steps before us must be learned again, by whomever."""
        return self._agreement.owed

    def begin(self, num_shards: int, assignment: Sequence[range]) -> None:
        self._weight = self._total = self._norm = 0.0
        self._num_bad = 0

    def open_batch(self) -> None:
        """The next forwards and backwards belong to one inner batch."""
        self._rows: Sequence[Row] = ()
        self.gradients.begin()

    def post(self, rows: Sequence[Row], mine: range, standing: Standing) -> None:
        self._rows, self._standing = list(rows), standing
        self._reach("posted")

    def learn(self) -> None:
        """Take an inner step. Raises NotFinite where loss or gradient is no number; nothing was changed then."""
        step, rows = self._standing.step, self._rows
        weight = math.fsum(row.weight for row in rows)
        gradients = self.gradients.take()
        self.gradients.detach()
        squares = scale(gradients, 1.0 / weight if weight > 0 else 0.0)  # of the batch's mean

        def complete(squares: list[float]) -> None:
            self._num_learned, self._incomplete = self._num_learned + 1, None
            self._agreement.learn(step, rows[0].shard, lambda: self._learn(rows, gradients, weight, squares))

        if self._across is not None:  # before anything can raise, for all parts take part in it
            self._incomplete = complete
            squares = [self._add_up(squares, self._across)]
        complete(squares)

    def _add_up(self, squares: Sequence[float], across: Across) -> float:
        """Of all parts of this copy."""
        named = zip(self.replica.flat.layout.names, squares, strict=True)
        self._square = across.add(math.fsum(each for name, each in named if across.counts(name)))
        return self._square

    def _learn(
        self, rows: Sequence[Row], gradients: Sequence[torch.Tensor], weight: float, squares: Sequence[float]
    ) -> int:
        try:
            check_losses(rows)
            mine = [range(rows[0].shard, rows[0].shard + 1)]
            find_names = lambda index: self._find_not_finite(gradients)  # noqa: E731
            norm = checked_norm(squares, find_names, lambda index: mine) if weight > 0 else 0.0
        except NotFinite:
            self._num_bad += 1
            raise
        if weight <= 0:
            return 0
        if self._max_norm is not None and norm > self._max_norm:
            scale(gradients, self._max_norm / norm)
        self.replica.update(gradients)
        self._norm = norm
        self._weight += weight
        self._total += math.fsum(row.loss for row in rows)
        if self._buffers is not None:
            self._buffers.write(_mean_buffers(rows))
        return sum(row.num_samples for row in rows)

    def _find_not_finite(self, gradients: Sequence[torch.Tensor]) -> list[str]:
        named = zip(self.replica.flat.layout.names, gradients, strict=True)
        return [name for name, each in named if not each.isfinite().all()] or ["another part of the model"]

    def close_step(self, after: Place) -> None:
        """All inner batches of a step were learned from."""
        self._agreement.reach(after)
        if self._weight:
            self.loss = self._total / self._weight

    def finish(self) -> Outcome:
        """The step is over for this copy. One that had no batch in it says what it lost in the last that it had."""
        started = time.perf_counter()
        agreement = self._agreement
        wish = agreement.finish(self._standing)
        self.is_round_over = agreement.is_round_over
        self._reach("updated")
        totals = Totals(
            weight=self._weight,
            loss=math.nan if self._num_bad and not self._weight else self.loss,
            buffers=None,
            seconds_per_sample=agreement.speeds,
            wish=wish,
            has_news=agreement.has_news,
        )
        agreement.has_news = False
        wait, last = agreement.late
        spent = time.perf_counter() - started
        return Outcome(totals=totals, norm=self._norm, communicate=spent - wait, wait=wait, waited_for=last)

    def agree(self) -> None:
        """Have the same parameters as everybody. Copies that are within a round take their mean and go on with it."""
        self._agreement.agree()

    # From one World to the next.

    def resolve(
        self, survivors: Sequence[int], gather: Callable[[str, str], list[str]], *, is_first: bool
    ) -> Outcome | NotFinite | None:
        """A step is nobody else's: there is none to complete, only what was on its way, and within a copy a batch."""
        is_taken_in = self._agreement.judge(gather)
        place, copy = asdict(self._agreement.place), self._agreement.copy
        mine = {"copy": copy, "learned": self._num_learned, "square": self._square.hex(), "place": place}
        told = [json.loads(text) for text in gather("settled", json.dumps(mine)) if text]
        self._stand_with([each for each in told if each["copy"] == copy])
        self._agreement.settle(is_taken_in=is_taken_in)
        return None

    def _stand_with(self, mates: Sequence[Mapping[str, Any]]) -> None:
        """Have learned from what the other parts of this copy have, if one was through when we were interrupted."""
        furthest = max(mates, key=lambda mate: (mate["learned"], mate["place"]["step"]))
        if furthest["learned"] > self._num_learned:
            assert self._incomplete is not None
            with contextlib.suppress(NotFinite):  # whoever was through has told of it
                self._incomplete([float.fromhex(furthest["square"])])
        self._incomplete = None
        if furthest["place"]["step"] > self._agreement.place.step:
            self._agreement.reach(Place(**furthest["place"]))

    def inherit(self, old: "LocalSync | None") -> None:
        """Go on where the copies of the World before were. See `Agreement.inherit`."""
        if old is not None:
            self.loss = old.loss
        self._agreement.inherit(old._agreement if old is not None else None)

    # State.

    def tensors(self) -> dict[str, torch.Tensor]:
        """After `agree`. The optimizer's state is that of this copy."""
        return {**dict(self.replica.tensors()), **self._agreement.tensors()}

    def restart(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """The parameters were put back from a checkpoint: go on from there, with what it says was agreed on."""
        self._agreement.restart(tensors)
        if self.replica.average is not None and not any(name.startswith("ema/") for name in tensors):
            self.replica.average.copy_(self.replica.flat.values)

    def checksum(self, step: int) -> int:
        return 0

    def detach(self) -> None:
        self._agreement.stop()
        self._incomplete = None
        self.gradients.detach()
        self.replica.optimizer.release()

    def close(self) -> None:
        self._agreement.leave_off()
        self.detach()
        self.replica.flat.release()


def _mean_buffers(rows: Sequence[Row]) -> torch.Tensor | None:
    """Of the pieces of one batch, over its samples."""
    held = [(row.buffers, row.num_samples) for row in rows if row.buffers is not None]
    total = sum(count for _, count in held)
    if not total:
        return None
    return torch.stack([values * (count / total) for values, count in held]).sum(0)
