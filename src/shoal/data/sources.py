"""What a user may call a dataset, and how each kind gives batches."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from shoal.data.columns import ColumnSource, column_source, is_array
from shoal.data.frames_read import as_shards, shards_source
from shoal.data.huggingface import HuggingFaceSource, check_split, huggingface_kind, huggingface_source
from shoal.data.samples import Collate, MapSource
from shoal.data.shuffle import Ids
from shoal.data.stream import StreamSource
from shoal.data.tables import file_source
from shoal.spec.errors import UserError


class IndexedSource(Protocol):
    """A dataset that can give any of its samples.

    `draws` says whether reading draws from the random generators of the process: see `randomness.py`.
    """

    num_samples: int

    @property
    def draws(self) -> bool: ...
    def __len__(self) -> int: ...
    def fetch(self, ids: Ids, before: Callable[[int], None] | None = None) -> Any:
        """A batch of these samples, ready for the loss; `before` is called before each piece of the user's code."""


Source = IndexedSource | StreamSource


def as_source(dataset: Any, *, collate: Collate | None = None, copies: Path | None = None) -> Source:
    """Recognise a dataset; raise UserError for what is none.

    `collate` takes a list of samples and makes a batch of them. Without it, columns are gathered as they are and
    samples are stacked by torch's default. `copies` is the folder for copies of files that have a URL.
    """
    if isinstance(dataset, (ColumnSource, HuggingFaceSource, MapSource, StreamSource)):
        return dataset
    if (shards := as_shards(dataset)) is not None:
        return _gathered(shards_source(shards, copies), collate)
    if isinstance(dataset, (str, os.PathLike)):
        dataset = [dataset]
    if _are_paths(dataset):
        return _gathered(file_source(dataset, copies), collate)
    if isinstance(dataset, DataLoader):
        raise UserError(
            "The dataset is a DataLoader, which makes batches of its own.",
            why="shoal orders and loads the samples itself, so that any number of workers uses each of them once",
            hint="pass what the DataLoader was made of: `dataset=loader.dataset`",
        )
    if _is_columns(dataset, collate):
        return _gathered(column_source(dataset), collate)
    if isinstance(dataset, TensorDataset):
        return _gathered(column_source(dataset.tensors), collate)
    return _as_user_source(dataset, collate)


def _as_user_source(dataset: Any, collate: Collate | None) -> Source:
    """Datasets that run code which is not ours."""
    check_split(dataset)
    if huggingface_kind(dataset) == "Dataset":
        return huggingface_source(dataset, collate)
    if isinstance(dataset, IterableDataset) or huggingface_kind(dataset) == "IterableDataset":
        return StreamSource(dataset, collate)
    if hasattr(dataset, "__getitem__") and not isinstance(dataset, Mapping):
        if isinstance(dataset, Dataset) or hasattr(dataset, "__len__"):
            return MapSource(dataset, collate)
    elif hasattr(dataset, "__iter__") and not isinstance(dataset, (Mapping, set, frozenset)):
        return StreamSource(dataset, collate)
    raise UserError(
        f"The dataset is of type {type(dataset).__name__}, which cannot be used as one.",
        why="a dict needs one tensor or array for each name"
        if isinstance(dataset, Mapping)
        else "it has neither samples that can be counted nor a stream of them",
        hint="pass tensors, numpy arrays, a torch or Hugging Face dataset, an iterable, or paths of .parquet, "
        ".arrow, .feather or .csv files",
    )


def _gathered(source: ColumnSource, collate: Collate | None) -> Source:
    return source if collate is None else MapSource(source, collate)


def _are_paths(dataset: Any) -> bool:
    is_list = isinstance(dataset, (tuple, list)) and len(dataset) > 0
    return is_list and all(isinstance(each, (str, os.PathLike)) for each in dataset)


def _is_columns(dataset: Any, collate: Collate | None) -> bool:
    """Whether these are columns rather than samples.

    A list is columns only where it is shorter than the columns would be, and there is no `collate` for samples: a
    list of a thousand images of 28 rows is a thousand samples.
    """
    if is_array(dataset):
        return True
    if isinstance(dataset, Mapping):
        return bool(dataset) and all(is_array(value) for value in dataset.values())
    if not (isinstance(dataset, (tuple, list)) and dataset and all(is_array(value) for value in dataset)):
        return False
    if isinstance(dataset, tuple):
        return True
    return collate is None and all(value.ndim and len(dataset) <= len(value) for value in dataset)
