"""Datasets that can only be walked from the start: every worker walks the same stream and keeps its own samples.

Nobody needs to be asked who has what, so every sample is used exactly once; the price is that each worker reads,
though does not collate, all of it. The epoch ends when the stream ends, however long it was the last time. Resuming
walks to where it was.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset, default_collate

from shoal.data.failures import blame
from shoal.data.ledger import Ledger, Place, StepPlan, plan_at
from shoal.data.randomness import preserved_generators, read_generators, seed_generators, write_generators
from shoal.data.samples import Collate, collated
from shoal.spec.errors import UserError

_HINT = "walk it by itself: `for sample in dataset: pass`"
_ENDLESS = Ledger(num_samples=None, batch_size=1)


class StreamSource:
    """A dataset with `__iter__` only, which must start anew and give the same samples to every worker.

    `set_epoch(epoch)` is called before each epoch where the dataset has it. Generators of the process are seeded with
    (seed, epoch) before, so a stream that shuffles by them does it alike everywhere.
    """

    num_samples = None
    draws = True

    def __init__(self, dataset: Any, collate: Collate | None = None) -> None:
        self._dataset = dataset
        self.name = type(dataset).__name__
        self.collate = collate or default_collate
        # An IterableDataset may be its own iterator and still start anew; if it does not, the second epoch is empty.
        if isinstance(dataset, Iterator) and not isinstance(dataset, IterableDataset):
            raise UserError(
                f"The dataset is a {self.name}, which can be walked only once.",
                why="every epoch, and every resumed run, starts the stream anew",
                hint="pass an object whose `__iter__` starts from the beginning, such as a torch IterableDataset",
            )

    def first(self, count: int) -> Any:
        """A batch of the first samples, before anything is trained; generators are as before afterwards."""
        with preserved_generators():
            try:
                samples = list(islice(self.open(0), count))
            except Exception as error:
                raise blame(error, f"The stream ({self.name}) failed at its start.", hint=_HINT) from error
            if not samples:
                raise self.empty(0)
            return collated(self.collate, samples, range(len(samples)))

    def empty(self, epoch: int) -> UserError:
        return UserError(
            f"The stream ({self.name}) gave no sample in epoch {epoch}.",
            why="it is empty" if epoch == 0 else "it gave samples before, so it may not start anew",
            hint="its `__iter__` must start from the beginning each time it is called",
        )

    def open(self, epoch: int) -> Iterator[Any]:
        """The stream of an epoch from its first sample."""
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)
        return iter(self._dataset)


class StreamReader:
    """Walks a stream step by step. It knows best where it is, so it corrects the place and count of each plan."""

    def __init__(self, source: StreamSource, seed: int, stop_epoch: int | None = None) -> None:
        self._source = source
        self._seed = seed
        self._stop_epoch = stop_epoch
        self._stream: Iterator[Any] | None = None
        self._generators: Any = None
        self._ahead: list[Any] = []
        self._place: Place | None = None

    def load(self, plan: StepPlan) -> tuple[StepPlan, tuple[Any, ...]] | None:
        """The next step, cut as planned; None when the last epoch is over. Holds one global batch of raw samples."""
        if self._place is None:
            self._walk_to(plan.place)
        samples: list[Any] = []
        while not samples:
            if self._stop_epoch is not None and self._here.epoch >= self._stop_epoch:
                return None
            place = replace(self._here, step=plan.step)
            samples = self._read_step(plan.count)
        after = replace(self._here, step=plan.step + 1)
        plan = replace(plan_at(_ENDLESS, place, plan.cut, len(samples)), after=after)
        return plan, self._collate(plan, samples)

    def _read_step(self, count: int) -> list[Any]:
        """The next samples of this epoch; reads one more, which tells whether these are the last, and moves on."""
        samples = self._ahead + self._read(count + 1 - len(self._ahead))
        self._ahead = samples[count:]
        self._move(len(samples[:count]), ended=not self._ahead)
        return samples[:count]

    def _move(self, count: int, ended: bool) -> None:
        here = self._here
        offset, position = here.offset + count, here.position + count
        if not ended:
            self._place = replace(here, offset=offset, position=position)
            return
        self._check_not_empty(offset)
        self._stream = None
        self._place = replace(here, epoch=here.epoch + 1, offset=0, position=position)

    def _walk_to(self, place: Place) -> None:
        """Skip what was used before, through as many epochs as it takes."""
        missing = place.offset
        self._place = replace(place, offset=0, position=place.position - place.offset)
        while (length := self._skip(missing)) < missing:
            self._move(length, ended=True)
            missing -= length
        self._move(missing, ended=False)

    def _skip(self, count: int) -> int:
        """Walk over samples without keeping them; how many there were."""
        done = 0
        while done < count and (walked := len(self._read(min(1024, count - done)))):
            done += walked
        return done

    def _read(self, count: int) -> list[Any]:
        """Up to `count` samples, with the stream's own random numbers."""
        with preserved_generators():
            try:
                if self._stream is None:
                    self._stream = self._open()
                else:
                    write_generators(self._generators)
                samples = list(islice(self._stream, count))
            except UserError:
                raise
            except Exception as error:
                where = f"epoch {self._here.epoch}, after sample {self._here.offset}"
                raise blame(error, f"The stream ({self._source.name}) failed in {where}.", hint=_HINT) from error
            self._generators = read_generators()
        return samples

    def _open(self) -> Iterator[Any]:
        seed_generators(self._seed, self._here.epoch)
        return self._source.open(self._here.epoch)

    @property
    def _here(self) -> Place:
        assert self._place is not None
        return self._place

    def _check_not_empty(self, length: int) -> None:
        if length == 0:
            raise self._source.empty(self._here.epoch)

    def _collate(self, plan: StepPlan, samples: list[Any]) -> tuple[Any, ...]:
        """This worker's pieces. Its random numbers must not disturb those of the stream, which all workers share."""
        batches = []
        with preserved_generators():
            for piece in plan.pieces:
                numbers = piece.ids.tolist()
                seed_generators(self._seed, plan.epoch, -1 - numbers[0])
                mine = [samples[number - plan.offset] for number in numbers]
                batches.append(collated(self._source.collate, mine, numbers))
        return tuple(batches)
