"""Copies that do not share memory: each worker keeps all parameters, and gradients travel as messages."""

import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from shoal.comm.group import Group, Work
from shoal.elastic.commit import Report, outcome_of
from shoal.spec.spans import timed
from shoal.train import tree
from shoal.train.divergence import Diverged, checksum_of, part_of
from shoal.train.gradients import Gradients
from shoal.train.noise import Parts, is_due, parts_of, square_of_all
from shoal.train.replica import own_replica
from shoal.train.summing import StepSum, square_of
from shoal.train.sync.across import Across
from shoal.train.sync.stopwatch import Arrivals
from shoal.train.sync.sync import Outcome, Row, Standing
from shoal.train.sync.table import NotFinite, StepTable, checked_norm, not_finite

BUCKET_ELEMENTS = 2**20
"""Gradients are sent in buckets of this size: large enough to fill a link, small enough to start early."""


SPREAD_EVERY = 16
"""Where CPUs and GPUs update their copies, so many steps until all take the first one's: they round differently."""


class MessageSync:
    """Sums gradients bucket by bucket while backward goes on; every worker then makes the same update.

    Works over any Group and with any optimizer. In exact mode the workers exchange the sums of whole subtrees and
    each adds them up along the step's tree, which moves more bytes but does not depend on who had which shard.

    `is_mixed`: some members compute on a GPU and others do not, so copies agree to rounding only.
    """

    is_round_over = True

    def __init__(
        self,
        group: Group,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        num_shards: int,
        exact: bool,
        max_norm: float | None = None,
        ema_decay: float | None = None,
        source: int = 0,
        is_elastic: bool = False,
        reach: Callable[[str], None] = lambda point: None,
        across: Across | None = None,
        is_mixed: bool = False,
    ) -> None:
        self._reach = reach
        self._across = across
        self._is_mixed = is_mixed
        self._square = 0.0
        self._is_elastic = is_elastic
        self._turn = self._voted = self._committed = 0
        self._group = group
        self._exact = exact
        self._max_norm = max_norm
        self.replica = own_replica(model, optimizer, ema_decay=ema_decay)
        group.broadcast(self.replica.flat.values, root=source).wait()
        layout = self.replica.flat.layout
        self._total = layout.total
        self._stops = [*range(BUCKET_ELEMENTS, layout.total, BUCKET_ELEMENTS), layout.total]
        # In exact mode sums of subtrees come first; without it buckets are summed where the optimizer reads them.
        num_slots = tree.most_nodes(num_shards) if exact else 0
        self._slots = [torch.zeros_like(self.replica.gradient) for _ in range(num_slots)] or [self.replica.gradient]
        self.gradients = Gradients(
            self.replica.flat.parameters, layout, self._slots, exact=exact, on_ready=self._send
        )
        self._table = StepTable(num_shards, group.size, lambda size: torch.zeros(size, dtype=torch.float64))
        self._sent: list[Work] = []
        self._arrivals = Arrivals(group.rank)

    def begin(self, num_shards: int, assignment: Sequence[range]) -> None:
        if self._is_mixed and self._turn and self._turn % SPREAD_EVERY == 0:
            self._group.broadcast(self.replica.flat.values).wait()
        self._turn += 1
        self._num_shards = num_shards
        self._assignment = assignment
        self._sent = []
        self._table.clear()
        # Parts of a model each have some of the gradient only.
        self._looks = is_due(self._turn) and self._across is None
        self._parts: Parts | None = None
        self._sent_square = 0.0
        self.gradients.begin(num_shards, assignment[self._group.rank], looks=self._looks and self._group.size == 1)

    def post(self, rows: Sequence[Row], mine: range, standing: Standing) -> None:
        self._rows = rows
        self._table.write(rows, mine, self._group.rank, standing)
        self._reach("posted")

    def _send(self, num_elements: int) -> None:
        """Send every bucket that is now final."""
        for stop in self._stops[len(self._sent) : bisect_right(self._stops, num_elements)]:
            start = self._stops[len(self._sent) - 1] if self._sent else 0
            if self._looks:  # from here on it is the sum of all
                self._sent_square += square_of_all(self._slots[0][start:stop])
            self._sent.append(self._group.all_reduce(self._slots[0][start:stop]))

    def finish(self) -> Outcome:
        started = time.perf_counter()
        self.gradients.end()
        if not self.gradients.nodes:
            self._slots[0].zero_()
            if not self._exact:
                self._send(self._total)
        assert self._table.values is not None, "every worker has a shard in the first step"
        if self._looks:
            self._tell_parts()
        self._table.arrive(self._group.rank, self._arrivals.arrive(started))
        work = self._group.all_reduce(self._table.values)
        if self._exact:
            self._gather()
        for sent in [*self._sent, work]:
            sent.wait()
        self._arrivals.done(time.perf_counter())
        wait, last = self._arrivals.judge(self._table.arrivals(), time.perf_counter() - started)
        self._result = self._judge(wait)
        self._vote()
        outcome = self._update()
        self._reach("updated")
        communicate = time.perf_counter() - started - wait
        return replace(outcome, communicate=communicate, wait=wait, waited_for=last)

    def _tell_parts(self) -> None:
        def square(slot: int) -> float:
            return square_of_all(self._slots[slot]) if self._exact else self._sent_square

        self._parts = parts_of(self.gradients.nodes, self._rows, square, self.gradients.first_square)
        self._table.tell_parts(self._group.rank, self._parts)

    @timed("judge", "agree")
    def _judge(self, waited: float) -> Outcome | NotFinite:
        """What the step comes to, the same on all copies. Raises Diverged where these were not equal before it.

        The gradient is as the optimizer needs it then, but for clipping; nothing else has changed.
        """
        if self._across is not None:
            self._square = self._across.square(self.replica.flat, self.replica.gradient, waited)
            standings = self._table.standings()
            self._across.largest(standings)
            self._table.correct(standings)
        self._table.check_copies()
        try:
            totals = self._table.read(self._num_shards)
            self.replica.gradient.mul_(1.0 / totals.weight)
            norm = checked_norm(self._squares(totals.weight), self._find_not_finite)
        except NotFinite as error:
            self._compare_all()
            return error
        noise = None if self._parts is None else self._table.noise(self._num_shards, norm, self._parts)
        return Outcome(totals=totals, norm=norm, communicate=0.0, wait=0.0, waited_for=None, noise=noise)

    def _compare_all(self) -> None:
        """Raise Diverged if copies differ anywhere: one whose parameters are wrong may have made a step no number."""
        if self._is_mixed:
            return
        everyone = torch.empty(self._group.size, dtype=torch.int64)
        self._group.all_gather(everyone, torch.tensor([checksum_of(self.replica.flat.values)])).wait()
        differs = (everyone != everyone[0]).any().double().view(1)
        if self._across is not None:
            self._across.largest(differs)
        if differs:
            raise Diverged(everyone.tolist())

    @timed("vote", "agree")
    def _vote(self) -> None:
        """Everybody holds the sums. Without this a loss could find the step taken by some and not by others."""
        self._voted = self._turn
        if self._is_elastic:
            self._reach("summed")
            (self._across.vote if self._across is not None else self._group.barrier)()
            self._arrivals.done(time.perf_counter())
            self._reach("updating")

    def _update(self) -> Outcome:
        self._committed = self._turn
        if isinstance(self._result, NotFinite):
            raise self._result
        norm = self._result.norm
        if self._max_norm is not None and norm > self._max_norm:
            self.replica.gradient.mul_(self._max_norm / norm)
        self.replica.update()
        return self._result

    def agree(self) -> None:
        """All have the same parameters after every step."""

    def resolve(
        self, survivors: Sequence[int], gather: Callable[[str, str], list[str]], *, is_first: bool
    ) -> Outcome | NotFinite | None:
        """If a survivor took the step that was under way, all had voted for it, and the others take it now."""
        told = [text.split() for text in gather("judged", f"{self._committed} {self._voted}")]
        reports = [Report(committed=int(each[0]), voted=int(each[1])) for each in told if each]
        is_due = outcome_of(reports).turn > self._committed
        gather("settled", "")
        if not is_due:
            return None
        try:
            return self._update()
        except NotFinite as error:
            return error

    def _squares(self, weight: float) -> list[float]:
        """Chunk by chunk, as the workers that share memory do, so that the result is the same to the last bit."""
        if self._across is not None:
            return [self._square / weight**2]
        return list(torch.stack([square_of(chunk) for chunk in self.replica.gradients]).tolist())

    def _find_not_finite(self, index: int) -> list[str]:
        if self._across is not None:
            views = self.replica.flat.named(self.replica.gradient)
            return [name for name, view in views if not view.isfinite().all()] or ["another part of the model"]
        return not_finite(self.replica.flat.layout, index, self.replica.gradients[index])

    def _gather(self) -> None:
        """Collect every worker's subtree sums and add them up along the tree, a bucket at a time."""
        addition = StepSum(self._assignment, self._num_shards, exact=True)
        num_slots = addition.num_slots
        registers = [self._slots[0].new_empty(BUCKET_ELEMENTS) for _ in range(tree.most_registers(self._num_shards))]
        start = 0
        for stop in self._stops:
            mine = torch.cat([slot[start:stop] for slot in self._slots[:num_slots]])
            gathered = mine.new_empty(self._group.size * mine.numel())
            self._group.all_gather(gathered, mine).wait()
            parts = gathered.view(self._group.size, num_slots, stop - start)
            addition.into(self.replica.gradient[start:stop], parts.__getitem__, registers)
            start = stop

    def tensors(self) -> dict[str, torch.Tensor]:
        return dict(self.replica.tensors())

    def checksum(self, step: int) -> int:
        return 0 if self._is_mixed else checksum_of(part_of(self.replica.flat.values, step))

    def detach(self) -> None:
        self.gradients.detach()
        self.replica.optimizer.release()

    def close(self) -> None:
        self.detach()
        self.replica.flat.release()
