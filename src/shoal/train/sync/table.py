"""A small table that all workers fill and read in every step: one row a shard, one row a rank."""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from shoal.comm.group import Group
from shoal.spec.errors import BugError, UserError
from shoal.train.divergence import Diverged
from shoal.train.flat import FlatLayout, shorten
from shoal.train.noise import Parts, estimate
from shoal.train.sync.sync import Noise, Row, Standing, Totals

T = TypeVar("T")

WEIGHT, LOSS, SAMPLES, BUFFERS = 0, 1, 2, 8
"""Columns of a shard's row."""
SPEED, WISH, STEP, CHECKSUM, DOUBT, OWN, RATIO, PARTS = range(8)
"""Columns of a rank's row."""
LOST, DIFFERENT = 1, 2
"""What may be in doubt in another part of the model: a loss is no number, or copies are not equal."""


class StepTable:
    """What the shards of a step weigh and lost, how fast each rank is, and what it wishes to do after the step.

    `allocate(num_elements)` gives a float64 buffer, called at the first `write`, when the width is known: by then
    a forward has shown which of the model's buffers change. Doubles hold floats and counts exactly, and all sums
    over rows are taken in shard order (or correctly rounded), so they are the same on every rank.
    """

    def __init__(self, num_shards: int, num_ranks: int, allocate: Callable[[int], torch.Tensor]) -> None:
        self._num_shards = num_shards
        self._num_ranks = num_ranks
        self._allocate = allocate
        self.values: torch.Tensor | None = None

    def write(self, rows: Sequence[Row], mine: range, rank: int, standing: Standing) -> None:
        """Fill in the rows of the shards in `mine`; merged shards leave the rest of their rows empty."""
        table = self._rows(rows)
        table[mine.start : mine.stop] = 0
        for row in rows:
            _add(table[row.shard], row)
        table[self._num_shards + rank, [SPEED, WISH, STEP, CHECKSUM]] = (
            standing.seconds_per_sample,
            standing.wish,
            standing.step,
            standing.checksum,
        )

    def _rows(self, rows: Sequence[Row] = ()) -> np.ndarray:
        height = self._num_shards + self._num_ranks
        if self.values is None:
            buffers = rows[0].buffers if rows else None
            width = BUFFERS + (0 if buffers is None else buffers.numel())
            self.values = self._allocate(height * width)
        return self.values.numpy().reshape(height, -1)

    def arrive(self, rank: int, own_seconds: float) -> None:
        """How long this rank was busy with its own part of the step, since all had done with the last one."""
        self._rows()[self._num_shards + rank, OWN] = own_seconds

    def arrivals(self) -> list[float]:
        """What each rank told of that."""
        return [float(seconds) for seconds in self._rows()[self._num_shards :, OWN]]

    def weight_of(self, shards: range) -> float:
        return math.fsum(self._rows()[shards.start : shards.stop, WEIGHT])

    def tell_parts(self, rank: int, parts: Parts) -> None:
        """What this rank knows of the noise of its gradients, in a step in which all tell."""
        self._rows()[self._num_shards + rank, [RATIO, PARTS]] = parts.ratio, parts.count

    def noise(self, num_shards: int, norm: float, own: Parts) -> Noise | None:
        """What all told of it, beside the `norm` of the whole gradient."""
        table = self._rows()
        rows, ranks = table[:num_shards], table[self._num_shards :]
        return estimate(
            math.fsum(ranks[:, RATIO]),
            int(ranks[:, PARTS].sum()),
            own.first,
            square=norm**2,
            weight=math.fsum(rows[:, WEIGHT]),
            num_samples=float(rows[:, SAMPLES].sum()),
        )

    def clear(self) -> None:
        """Empty all rows, for tables that are added up rather than shared."""
        if self.values is not None:
            self.values.zero_()

    def standings(self) -> torch.Tensor:
        """How fast each rank is, what it wishes and what is in doubt: parts of a copy must see this alike.

        `correct` puts it back.
        """
        table = self._rows()
        rows, ranks = table[: self._num_shards], table[self._num_shards :]
        is_different, is_lost = np.ptp(ranks[:, CHECKSUM]) > 0, not np.isfinite(rows[:, LOSS]).all()
        ranks[:, DOUBT] = DIFFERENT if is_different else LOST * is_lost
        return torch.from_numpy(np.ascontiguousarray(ranks[:, [SPEED, WISH, DOUBT]]))

    def correct(self, standings: torch.Tensor) -> None:
        self._rows()[self._num_shards :, [SPEED, WISH, DOUBT]] = standings.numpy()

    def check_copies(self) -> None:
        """Raise Diverged on every rank, and in every part, where copies of the parameters are not equal."""
        ranks = self._rows()[self._num_shards :]
        _check_steps(ranks[:, STEP])
        if np.ptp(ranks[:, CHECKSUM]) > 0 or ranks[:, DOUBT].max() == DIFFERENT:
            raise Diverged(ranks[:, CHECKSUM].tolist())

    def read(self, num_shards: int) -> Totals:
        """Combine the rows of the step's `num_shards` shards."""
        table = self._rows()
        rows = table[:num_shards]
        samples = rows[:, SAMPLES]
        ranks = table[self._num_shards :]
        _check_steps(ranks[:, STEP])
        check_finite(rows)
        if ranks[:, DOUBT].max() == LOST:
            raise NotFinite("The loss is no number in another part of the model.", why="the step was not taken")
        weight = math.fsum(rows[:, WEIGHT])
        loss = math.fsum(rows[:, LOSS])
        buffers = _mean(rows[:, BUFFERS:], samples) if table.shape[1] > BUFFERS else None
        return Totals(
            weight=weight,
            loss=loss / weight,
            buffers=buffers,
            seconds_per_sample=tuple(ranks[:, SPEED].tolist()),
            wish=int(ranks[:, WISH].max()),
        )


def _check_steps(steps: np.ndarray) -> None:
    """What belongs to different steps must never be added up."""
    if steps.min() != steps.max():
        raise BugError(f"The workers are in different steps: {steps.astype(int).tolist()}.")


def _add(line: np.ndarray, row: Row) -> None:
    """Several pieces of one shard share its line: sums add up, buffers are the mean over its samples."""
    is_first = line[SAMPLES] == 0
    line[: SAMPLES + 1] += row.weight, row.loss, row.num_samples
    if row.buffers is not None:
        share = 1.0 if is_first else row.num_samples / line[SAMPLES]
        line[BUFFERS:] += share * (row.buffers.numpy() - line[BUFFERS:])


def _mean(rows: np.ndarray, samples: np.ndarray) -> torch.Tensor:
    """The mean over samples, one row after the other: a library's matrix product may order its sums otherwise."""
    total = np.zeros(rows.shape[1])
    for row, count in zip(rows, samples, strict=True):
        total += row * count
    return torch.from_numpy(total / samples.sum())


class NotFinite(UserError):
    """A step whose loss or gradient is no number. It was not taken, on any rank.

    `shards` are those whose gradients did it, empty where nobody knows. `samples` are the ids, once they are named.
    """

    shards: Sequence[range] = ()
    samples: Sequence[int] = ()


class LossNotFinite(NotFinite):
    """A loss that is no number: `value` in the first of `spans`, (shard, number of samples from its beginning on)."""

    value: float
    spans: Sequence[tuple[int, int]]


def check_finite(rows: np.ndarray) -> None:
    """Raise the same error on every rank where a loss is not a number."""
    bad = [int(shard) for shard in np.flatnonzero(~np.isfinite(rows[:, LOSS]))]
    if bad:
        raise _bad_loss(float(rows[bad[0], LOSS]), [(shard, int(rows[shard, SAMPLES])) for shard in bad])
    if math.fsum(rows[:, WEIGHT]) <= 0:
        raise UserError(
            "The weights of the whole batch add up to zero.",
            why="the loss returned (sum, weight) pairs and every weight was 0",
            hint="leave samples without targets out of the dataset, or check the mask",
        )


def check_losses(rows: Sequence[Row]) -> None:
    """Raise where the loss of a worker's own rows is not a number."""
    bad = [row for row in rows if not math.isfinite(row.loss)]
    if bad:
        sizes = {row.shard: sum(each.num_samples for each in rows if each.shard == row.shard) for row in bad}
        raise _bad_loss(bad[0].loss, list(sizes.items()))


def _bad_loss(value: float, spans: Sequence[tuple[int, int]]) -> LossNotFinite:
    error = LossNotFinite(
        f"The loss is {value} in shard {spans[0][0]}.",
        why="a step with it would destroy the parameters; it was not taken",
        hint="lower the learning rate, clip with `max_norm=1.0`, or look at the samples of that shard",
    )
    error.value, error.spans = value, spans
    return error


def checked_norm(
    squares: Sequence[float],
    find_names: Callable[[int], Sequence[str]],
    find_shards: Callable[[int], Sequence[range]] = lambda index: (),
) -> float:
    """The gradient's norm from the sum of squares of each chunk; the same error on every rank if it is no number.

    `find_names` is then asked which parameters of a chunk are to blame, and `find_shards` which shards.
    """
    norm = math.sqrt(math.fsum(squares))
    if math.isfinite(norm):
        return norm
    bad = next((index for index, square in enumerate(squares) if not math.isfinite(square)), 0)
    error = NotFinite(
        f"The gradient is {norm}, though the loss is a number: in {shorten(find_names(bad))}.",
        why="a step with it would destroy the parameters; it was not taken",
        hint="look for a square root, logarithm or division at 0 in the loss, or lower the learning rate",
    )
    error.shards = find_shards(bad)
    raise error


def look(group: Group, read: Callable[..., T], *args: Any) -> T:
    """Read what all share. Where it raises it does so on all ranks; none goes on before all have looked."""
    try:
        return read(*args)
    except UserError:
        group.barrier()
        raise


def not_finite(layout: FlatLayout, index: int, values: torch.Tensor) -> list[str]:
    """The names of the parameters that have no number somewhere in `values`, which are those of one chunk."""
    start, stop = layout.chunks[index].start, layout.chunks[index].stop
    spans = [
        (name, max(at, start) - start, min(at + size, stop) - start)
        for name, at, size in zip(layout.names, layout.offsets, layout.sizes, strict=True)
    ]
    return [name for name, first, end in spans if first < end and not values[first:end].isfinite().all()]
