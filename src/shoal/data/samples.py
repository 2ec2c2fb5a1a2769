"""Map-style datasets: the user's `__getitem__`, sample by sample, then a collate function."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from torch.utils.data import default_collate

from shoal.data.failures import blame, collate_failed
from shoal.data.randomness import drew_from_generators
from shoal.data.shuffle import Ids
from shoal.spec.errors import UserError

Collate = Callable[[list[Any]], Any]


class MapSource:
    """A dataset with `__getitem__` and `__len__`."""

    def __init__(self, dataset: Any, collate: Collate | None = None) -> None:
        self._dataset = dataset
        self._collate = collate or default_collate
        self._together = hasattr(dataset, "__getitems__")
        self.num_samples = _length(dataset)

    def __len__(self) -> int:
        return self.num_samples

    @cached_property
    def draws(self) -> bool:
        """Whether it draws random numbers from the generators of the process (augmentation, for example).

        Found out by reading the first, the middle and the last sample; the generators are put back. A dataset that is
        broken for these fails here, before anything was trained.
        """
        some = np.array(sorted({0, self.num_samples // 2, self.num_samples - 1}))
        drew = drew_from_generators(lambda: self.fetch(some))
        self._together = self._together and not drew
        return drew

    def fetch(self, ids: Ids, before: Callable[[int], None] | None = None) -> Any:
        """The collated samples.

        `before` is called with the id before each sample that is read on its own, and with -1 - (first id) before
        collating. Samples are read together, by `__getitems__`, where the dataset has it and draws no random numbers.
        """
        before = before or _nothing
        numbers = ids.tolist()
        samples = self._read(numbers, before)
        before(-1 - numbers[0])
        return collated(self._collate, samples, numbers)

    def _read(self, numbers: list[int], before: Callable[[int], None]) -> list[Any]:
        if self._together:
            return _read_together(self._dataset, numbers)
        samples = []
        for number in numbers:
            before(number)
            samples.append(_read_one(self._dataset, number))
        return samples


def _nothing(sample: int) -> None:
    """What is done before a sample where nothing needs to be."""


def collated(collate: Collate, samples: list[Any], numbers: Sequence[int]) -> Any:
    """Put samples together; a failure names the samples that do not fit."""
    try:
        return collate(samples)
    except UserError:
        raise
    except Exception as error:
        raise collate_failed(error, samples, numbers) from error


def _read_one(dataset: Any, number: int) -> Any:
    try:
        return dataset[number]
    except UserError:
        raise
    except Exception as error:
        raise blame(
            error, f"Reading sample {number} of the dataset failed.", hint=f"try `dataset[{number}]` by itself"
        ) from error


def _read_together(dataset: Any, numbers: list[int]) -> list[Any]:
    try:
        return list(dataset.__getitems__(numbers))
    except UserError:
        raise
    except Exception as error:
        raise blame(
            error,
            f"Reading samples {numbers[0]} to {numbers[-1]} of the dataset failed.",
            hint=f"try `dataset.__getitems__({numbers[:3]})` by itself",
        ) from error


def _length(dataset: Any) -> int:
    name = type(dataset).__name__
    try:
        length = len(dataset)
    except Exception as error:
        raise blame(
            error,
            f"The length of the dataset ({name}) is not known.",
            hint="define `__len__`, or make it a torch IterableDataset to train on it as a stream",
        ) from error
    if length < 1:
        raise UserError(
            f"The dataset ({name}) is empty.",
            why="without a sample there is nothing to train on",
            hint="check the path or the filter that produced it",
        )
    return length
