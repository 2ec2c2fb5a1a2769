"""Who reads which sample: a step's samples, cut into shards, given to workers. Pure functions of one integer.

The order of an epoch is a function of (seed, epoch). A step owns the next `batch_size` positions of it, fewer at
the end of an epoch. They are cut into `num_shards` shards, fixed for the run, and a worker takes a range of those.
No worker count appears here, so a run may go on from its position with any number of workers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from shoal.data.shuffle import MAX_SAMPLES, Ids, order
from shoal.spec.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a run is in its data: before a step, `position` samples into the run, `offset` samples into the epoch."""

    step: int
    epoch: int
    offset: int
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The order in which a run uses its samples, from the first epoch to the last.

    A position is one integer: how many samples were used since the run began, over all epochs. It is all the state
    there is. `num_samples` None means a stream, whose length nobody knows before it ends (see `stream.py`).
    """

    num_samples: int | None
    batch_size: int
    num_shards: int = 1
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.num_samples is not None:
            check_batch_size(self.num_samples, min(self.batch_size, self.num_samples))
        check_batch_size(MAX_SAMPLES, self.batch_size)
        if self.num_shards < 1:
            raise UserError(f"A step cannot be cut into {self.num_shards} shards.", hint="use at least one shard")

    @property
    def steps_per_epoch(self) -> int | None:
        """How many steps an epoch has, the smaller last one included; None for a stream."""
        return None if self.num_samples is None else -(-self.num_samples // self.batch_size)

    def place(self, position: int) -> Place:
        """Where a run is that has used `position` samples.

        A position inside a step (saved under another batch size) is allowed: the next step begins right there, and
        step numbers are those of the new batch size. For a stream this says epoch 0, which walking it corrects, and
        guesses the step; keep the Place of a stream to know both.
        """
        if self.num_samples is None:
            return Place(step=position // self.batch_size, epoch=0, offset=position, position=position)
        epoch, offset = divmod(position, self.num_samples)
        steps = -(-self.num_samples // self.batch_size)
        return Place(step=epoch * steps + offset // self.batch_size, epoch=epoch, offset=offset, position=position)

    def position(self, step: int) -> int:
        """How many samples were used before step `step`, when every step before it was a whole one of its epoch."""
        if self.num_samples is None:
            return step * self.batch_size
        epoch, number = divmod(step, -(-self.num_samples // self.batch_size))
        return epoch * self.num_samples + number * self.batch_size

    def count(self, place: Place) -> int:
        """How many samples the step at this place has."""
        if self.num_samples is None:
            return self.batch_size
        return min(self.batch_size, self.num_samples - place.offset)

    def advance(self, place: Place, count: int) -> Place:
        """The place after a step of `count` samples."""
        offset = place.offset + count
        ended = offset == self.num_samples
        return Place(
            step=place.step + 1,
            epoch=place.epoch + ended,
            offset=0 if ended else offset,
            position=place.position + count,
        )

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        """The sample ids at [start, stop) of an epoch; for a stream these are the positions themselves."""
        if self.num_samples is None:
            return order(0, 0, MAX_SAMPLES, start, stop, shuffle=False)
        return order(self.seed, epoch, self.num_samples, start, stop, self.shuffle)

    def shards(self, count: int) -> tuple[tuple[int, int], ...]:
        """The (start, stop) of each shard within a step of `count` samples: sizes differ by one at most."""
        return tuple(shard_bounds(shard, count, self.num_shards) for shard in range(self.num_shards))


def check_batch_size(num_samples: int, batch_size: int) -> None:
    """Refuse a global batch that is not a positive integer or that the dataset cannot fill once."""
    if num_samples < 1:
        raise UserError(
            "The dataset is empty.",
            why="without a sample there is nothing to train on",
            hint="check the path or the filter that produced it",
        )
    if num_samples > MAX_SAMPLES:
        raise UserError(
            f"The dataset says it has {num_samples} samples.",
            why="at most 2**62 can be ordered",
            hint="correct its `__len__`",
        )
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise UserError(
            f"batch_size={batch_size!r} is not a positive integer.",
            why="it is how many samples a step has, over all workers",
            hint="for example: batch_size=32",
        )
    if batch_size > num_samples:
        raise UserError(
            f"The dataset has {num_samples} samples, fewer than one batch of {batch_size}.",
            why="batch_size counts the samples of a step over all workers together",
            hint=f"use batch_size={num_samples} or less, or a larger dataset",
        )


def shard_bounds(shard: int, count: int, num_shards: int) -> tuple[int, int]:
    return shard * count // num_shards, (shard + 1) * count // num_shards


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How a worker's part of a step is cut into pieces, each of which is one forward and backward.

    `mine` are the worker's shards, in order. Without `merge` every shard is a piece of its own; with it, neighbours
    are joined, and there must be no gaps between them. No piece has more than `max_piece` samples: cuts fall between
    shards where possible, inside one where it is larger.
    """

    num_shards: int
    mine: Sequence[int]
    merge: bool = True
    max_piece: int | None = None

    def __post_init__(self) -> None:
        if self.max_piece is not None and self.max_piece < 1:
            raise UserError(f"A micro-batch of {self.max_piece} samples cannot be computed.", hint="use at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Samples that are computed together, and the shards they belong to; a shard that was cut appears in several."""

    shards: range
    ids: Ids

    @property
    def num_samples(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One worker's part of one step, which begins at a place and ends at the place `after`.

    `count` is the samples of all workers together; `pieces` may be empty.
    """

    step: int
    epoch: int
    offset: int
    position: int
    count: int
    after: Place
    cut: Cut
    pieces: tuple[Piece, ...]

    @property
    def num_samples(self) -> int:
        """How many of the step's samples are this worker's."""
        return sum(piece.num_samples for piece in self.pieces)

    @property
    def place(self) -> Place:
        return Place(step=self.step, epoch=self.epoch, offset=self.offset, position=self.position)


@lru_cache(maxsize=64)
def cut_step(count: int, cut: Cut) -> tuple[tuple[range, int, int], ...]:
    """The pieces of a step of `count` samples as (shards, start, stop), in order, none of them empty."""
    limit = count if cut.max_piece is None else cut.max_piece
    room = limit if cut.merge else 0
    groups: list[tuple[range, int, int]] = []
    for shard in cut.mine:
        start, stop = shard_bounds(shard, count, cut.num_shards)
        if groups and stop - groups[-1][1] <= room:
            groups[-1] = (range(groups[-1][0].start, shard + 1), groups[-1][1], stop)
        elif start < stop:
            groups.append((range(shard, shard + 1), start, stop))
    return tuple(
        (shards, first, min(first + limit, stop))
        for shards, start, stop in groups
        for first in range(start, stop, limit)
    )


def plan_at(ledger: Ledger, place: Place, cut: Cut, count: int) -> StepPlan:
    """A worker's part of the step of `count` samples at `place`."""
    spans = cut_step(count, cut)
    first = spans[0][1] if spans else 0
    last = spans[-1][2] if spans else 0
    ids = ledger.ids(place.epoch, place.offset + first, place.offset + last)
    return StepPlan(
        step=place.step,
        epoch=place.epoch,
        offset=place.offset,
        position=place.position,
        count=count,
        after=ledger.advance(place, count),
        cut=cut,
        pieces=tuple(Piece(shards=shards, ids=ids[start - first : stop - first]) for shards, start, stop in spans),
    )


def plan_step(
    ledger: Ledger, position: int, mine: Sequence[int], merge: bool = True, max_piece: int | None = None
) -> StepPlan:
    """A worker's part of the step that begins at `position`. `mine` are its shards: see `shares.assign`."""
    place = ledger.place(position)
    cut = Cut(num_shards=ledger.num_shards, mine=mine, merge=merge, max_piece=max_piece)
    return plan_at(ledger, place, cut, ledger.count(place))


def plan_steps(
    ledger: Ledger,
    place: Place,
    mine: Callable[[int], Sequence[int]],
    *,
    merge: bool = True,
    max_piece: int | None = None,
    stop_step: int | None = None,
    stop_epoch: int | None = None,
) -> Iterator[StepPlan]:
    """A worker's part of every step from `place` on, until (not including) `stop_step` and `stop_epoch`.

    `mine(step)` says which shards are the worker's in that step. It is asked when the step is planned, which is up
    to the loader's depth before it is used, so it must be a function of the step alone: see `shares.Schedule`.
    """
    cut = Cut(num_shards=ledger.num_shards, mine=range(0), merge=merge, max_piece=max_piece)
    while (stop_step is None or place.step < stop_step) and (stop_epoch is None or place.epoch < stop_epoch):
        plan = plan_at(ledger, place, replace(cut, mine=mine(place.step)), ledger.count(place))
        yield plan
        place = plan.after
