"""A step of workers that share memory: posted, summed and updated by all, and settled when a member is lost."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch

from shoal.comm.shm import ShmGroup
from shoal.elastic.commit import is_committed
from shoal.train.flat import Chunk
from shoal.train.noise import Parts
from shoal.train.replica import Replica
from shoal.train.sync.stopwatch import Stopwatch
from shoal.train.sync.sync import Noise, Outcome, Row, Standing, Totals
from shoal.train.sync.table import NotFinite, StepTable, checked_norm, look
from shoal.train.undo import Undo


class Sums(Protocol):
    """How gradients of all workers are added up."""

    def end(self) -> None:
        """The step's last backward is over."""
        ...

    def add_up(self, scale: float) -> None:
        """Leave sums times `scale` in the replica's gradients, and each chunk's square in the step's `squares`."""
        ...

    def recall(self, chunk: Chunk, scale: float, out: torch.Tensor) -> None:
        """Put into `out` what `add_up` has left on the rank that owns the chunk, out of memory that outlives it."""
        ...

    def find_not_finite(self, index: int) -> list[str]:
        """Which parameters of a chunk have a gradient that is no number; the same on all ranks."""
        ...

    def find_shards(self, index: int) -> list[range]:
        """Which shards did that, the same on all ranks; none where nobody can tell any more."""
        ...


class SharedStep:
    """Takes one step after the other, together with all others, on one set of parameters in shared memory.

    `channel` is the first of three: rows posted, sums made, parameters updated. A step counts exactly if everybody
    has made its sums, because then all that the update needs is in shared memory. In an elastic run survivors
    complete from there what a dead worker has not done. `squares` has the sum of squares of every chunk's gradient.
    In steps in which all look at the noise of their gradients, whoever sums leaves what it found in `parts`.
    """

    def __init__(
        self,
        group: ShmGroup,
        replica: Replica,
        sums: Sums,
        *,
        num_shards: int,
        channel: int,
        max_norm: float | None,
        is_elastic: bool,
        reach: Callable[[str], None],
    ) -> None:
        self._group, self._replica, self._sums, self._reach = group, replica, sums, reach
        self._posted, self._summed, self._updated = range(channel, channel + 3)
        self._max_norm, self._is_elastic = max_norm, is_elastic
        self._table = StepTable(num_shards, group.size, partial(_make_table, group))
        self._unposted: tuple[Sequence[Row], range, Standing] | None = None
        self.squares = group.common(4 * len(replica.flat.layout.chunks)).view(torch.float32)
        self.watch = Stopwatch(group)
        self.turn = 0
        self._is_open = self._is_updated = False
        self._totals: Totals | None = None
        self._norm: float | None = None
        self._noise: Noise | None = None
        self.parts: Parts | None = None
        self._initial: torch.Tensor | None = None
        self._undos: list[Undo] = []

    def begin(self, num_shards: int) -> None:
        self.turn += 1
        self.watch.start()
        self._num_shards = num_shards
        self._totals = self._norm = self._noise = self.parts = None
        self._is_open, self._is_updated = True, False
        if self._is_elastic and not self._undos:
            self._prepare_undo()

    def _prepare_undo(self) -> None:
        """Have a record of everybody's updates. All make it together, before anyone computes.

        So nobody writes into memory that has gone over from another World while somebody may still fail to enter.
        Before its first step an optimizer has no state that others could see; then all parameters and their average
        are kept instead.
        """
        flat, average = self._replica.flat, self._replica.average
        if self.turn == 1 and not self._replica.optimizer.state_names:
            whole = [flat.values] if average is None else [flat.values, average]
            self._initial = self._group.common(len(whole) * flat.values.nbytes).view(flat.dtype)
            if self._group.rank == 0:
                torch.cat(whole, out=self._initial)
            return
        self._initial = None
        kept = self._group.share(self._replica.num_kept * flat.dtype.itemsize, "undo")
        words = self._group.common(16 * self._group.size).view(torch.int64).view(-1, 2).numpy()
        self._undos = [Undo(memory, words[rank], self._reach) for rank, memory in enumerate(kept.all)]

    def post(self, rows: Sequence[Row], mine: range, standing: Standing) -> None:
        # All make the table together: not here, where others may wait for gradients that come after this.
        self._unposted = rows, mine, standing
        if self._table.values is not None:
            self._post()
        self._reach("posted")

    def _post(self) -> None:
        if self._unposted is not None:
            rows, mine, standing = self._unposted
            self._table.write(rows, mine, self._group.rank, standing)
            self._unposted = None
            self._group.signal(self._posted, self.turn)

    def finish(self) -> Outcome:
        """Sum, agree and update. Where a value is not finite all ranks raise NotFinite, and nothing was changed."""
        started, waited = time.perf_counter(), self.watch.seconds
        self._sums.end()
        self._post()
        try:
            self._agree()
        except NotFinite:
            self._is_open = False  # for us and, as all have found it, for everybody
            raise
        self._update()
        self._reach("updated")
        self.watch.wait(self._updated, self.turn)
        self._is_open = False
        spent = time.perf_counter() - started - (self.watch.seconds - waited)
        return self._outcome(communicate=spent, waited_for=self.watch.waited_for)

    def _agree(self) -> None:
        """Make our sums, and know what all have made of the step."""
        self.watch.wait(self._posted, self.turn)
        self._totals = look(self._group, self._table.read, self._num_shards)
        self._sums.add_up(1.0 / self._totals.weight)
        if self.parts is not None:
            self._table.tell_parts(self._group.rank, self.parts)
        self._group.signal(self._summed, self.turn)
        self._reach("summed")
        self.watch.wait(self._summed, self.turn)
        self._norm = look(self._group, self._find_norm)
        if self.parts is not None:
            self._noise = self._table.noise(self._num_shards, self._norm, self.parts)

    def weight_of(self, shards: range) -> float:
        """What these shards weigh. Everybody has posted."""
        return self._table.weight_of(shards)

    def _find_norm(self) -> float:
        return checked_norm(self.squares.tolist(), self._sums.find_not_finite, self._sums.find_shards)

    def _update(self) -> None:
        """Update the owned part."""
        factor = self._clip()
        if self._undos:
            self._replica.update_with(self._undos[self._group.rank], self.turn, factor)
        else:
            if factor is not None:
                self._replica.scale(factor)
            self._replica.update()
            self._reach("updating")
        self._is_updated = True
        self._group.signal(self._updated, self.turn)

    def _clip(self) -> float | None:
        """What gradients are multiplied by, so that their norm is not too large."""
        assert self._norm is not None
        return self._max_norm / self._norm if self._max_norm is not None and self._norm > self._max_norm else None

    def _outcome(self, *, communicate: float = 0.0, waited_for: int | None = None) -> Outcome:
        assert self._totals is not None
        assert self._norm is not None
        return Outcome(
            totals=self._totals,
            norm=self._norm,
            communicate=communicate,
            wait=self.watch.seconds,
            waited_for=waited_for,
            noise=self._noise,
        )

    # When a member is lost.

    def resolve(
        self, survivors: Sequence[int], gather: Callable[[str, str], list[str]], *, is_first: bool
    ) -> Outcome | NotFinite | None:
        """See to the step that was under way when a member was lost. Those who can `gather` all stand still.

        If everybody had made its sums, the dead included, it counts: it is completed, from what the dead have left in
        shared memory. If all had posted and a loss is no number, it counts as such. Else it never happened: None.
        Each answer follows from memory that all see, so survivors who are in the same step come to the same one. May
        be called again, should another one die meanwhile.
        """
        result = self._judge() if self._is_open else None
        gather("judged", "")
        if isinstance(result, Outcome) and is_first:
            for rank in set(range(self._group.size)) - set(survivors):
                self._complete(rank)
        gather("settled", "")
        self._is_open = False
        return result

    def _judge(self) -> Outcome | NotFinite | None:
        if not is_committed(self._group.counters(self._posted), self.turn):
            return None
        try:
            # What we know already is not read again: those who have done with the step may be in the next one.
            self._totals = self._totals or self._table.read(self._num_shards)
            if not is_committed(self._group.counters(self._summed), self.turn) or self._undo_first():
                return None
            if self._norm is None:
                self._norm = self._find_norm()
        except NotFinite as error:
            return error
        if not self._is_updated:
            self._update()
        return self._outcome()  # ranks, such as whom we waited for, are others by now

    def _undo_first(self) -> bool:
        """A first step that was not completed is taken back: nobody can see the optimizer's state of the dead."""
        if self._initial is None or min(self._group.counters(self._updated)) >= self.turn:
            return False
        self._replica.take_back(self._initial)
        return True

    def _complete(self, rank: int) -> None:
        """Do what is left of the update of a dead worker."""
        if not self._undos:
            return  # it was the first step, and all have completed it
        assert self._totals is not None
        scale, factor = 1.0 / self._totals.weight, self._clip()

        def fill(chunk: Chunk, out: torch.Tensor) -> None:
            self._sums.recall(chunk, scale, out)
            if factor is not None:
                out.mul_(factor)

        self._replica.complete(self._undos[rank], self.turn, rank, fill)


def _make_table(group: ShmGroup, size: int) -> torch.Tensor:
    """Whoever has nothing to compute in this step does not know how large it is, but others do."""
    group.post(np.array([size]))
    return group.common(8 * int(group.peers().max())).view(torch.float64)
