"""Hugging Face datasets, recognised without importing the library."""

from collections.abc import Callable
from typing import Any

import numpy as np

from shoal.data.failures import blame
from shoal.data.samples import Collate, MapSource
from shoal.data.shuffle import Ids
from shoal.data.tables import table_column
from shoal.spec.errors import UserError


class HuggingFaceSource:
    """A `datasets.Dataset` without a format of its own: a batch is a dict of columns.

    Plain columns are read as Arrow, which is several times faster than the library's own tensors; images, audio and
    other columns that need decoding go through `with_format("torch")`.
    """

    draws = False

    def __init__(self, dataset: Any) -> None:
        self._is_plain = all(_is_plain(feature) for feature in dataset.features.values())
        self._dataset = dataset.with_format("arrow" if self._is_plain else "torch")
        self.num_samples = len(dataset)

    def __len__(self) -> int:
        return self.num_samples

    def fetch(self, ids: Ids, before: Callable[[int], None] | None = None) -> Any:
        try:
            rows = self._dataset[ids.tolist()]
        except Exception as error:
            hint = f"try `dataset[{ids[:3].tolist()}]` by itself"
            raise blame(error, f"Reading samples {ids[0]} to {ids[-1]} of the dataset failed.", hint=hint) from error
        if not self._is_plain:
            return dict(rows)
        everything = np.arange(len(ids))

        def place(part: int, row: int) -> str:
            return f"sample {ids[row]}"

        return {name: table_column(name, [rows[name]], place).take(everything) for name in rows.column_names}


def huggingface_source(dataset: Any, collate: Collate | None) -> HuggingFaceSource | MapSource:
    """One that has a format or a transform of its own is read sample by sample, as it asks to be."""
    if len(dataset) == 0:
        raise UserError(
            "The dataset is empty.",
            why="without a sample there is nothing to train on",
            hint="check the split or the filter that produced it",
        )
    if dataset.format["type"] is not None:
        return MapSource(dataset, collate)
    return MapSource(dataset.with_format("torch"), collate) if collate else HuggingFaceSource(dataset)


def huggingface_kind(dataset: Any) -> str:
    """The name of the library's class this is an object of, or an empty string."""
    modules = ("datasets.arrow_dataset", "datasets.iterable_dataset", "datasets.dataset_dict")
    return next((base.__name__ for base in type(dataset).__mro__ if base.__module__ in modules), "")


def check_split(dataset: Any) -> None:
    if huggingface_kind(dataset) in ("DatasetDict", "IterableDatasetDict"):
        splits = ", ".join(map(repr, dataset))
        raise UserError(
            f"The dataset is a {type(dataset).__name__} of several splits: {splits}.",
            why="a run trains on one of them",
            hint="choose one of them, such as `dataset['train']`",
        )


def _is_plain(feature: Any) -> bool:
    """Whether a column holds numbers, text or lists of those: what needs no decoding."""
    inner = getattr(feature, "feature", None)
    if inner is not None:
        return _is_plain(inner)
    return type(feature).__name__ in ("Value", "ClassLabel")
