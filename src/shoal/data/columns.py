"""Datasets that are columns of equal length: tensors, numpy arrays, tables. A batch is a gather of rows.

Rows are always copied out, shuffled or not: a batch that is changed in place must never change the dataset, and a
batch begins at a 64-byte boundary in every process, as kernels may sum in another order where it does not.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from shoal.data.shuffle import Ids
from shoal.spec.errors import UserError

Array = npt.NDArray[Any]


class Column(Protocol):
    """One field of every sample."""

    def __len__(self) -> int: ...
    def take(self, ids: Ids) -> Any:
        """The rows with these ids, in this order: a tensor, or a list where values have no number form."""


class NumberColumn:
    """Numbers of one shape, in one or several stretches of memory (the chunks of a file). One thread, no GIL held."""

    def __init__(self, chunks: Sequence[Array], dtype: torch.dtype, to: torch.dtype | None = None) -> None:
        self._chunks = [_bits(np.ascontiguousarray(chunk)) for chunk in chunks]
        self._stops = np.cumsum([len(chunk) for chunk in chunks])
        self._starts = np.concatenate([[0], self._stops[:-1]])
        self._dtype = dtype
        self._to = to or dtype

    def __len__(self) -> int:
        return int(self._stops[-1])

    def take(self, ids: Ids) -> torch.Tensor:
        rows = torch.empty((len(ids), *self._chunks[0].shape[1:]), dtype=self._dtype)
        out = _bits_of(rows)
        if len(self._chunks) == 1:
            # Ids come from the ledger and are in range: "clip" only spares numpy a buffer.
            np.take(self._chunks[0], ids, axis=0, out=out, mode="clip")
        else:
            self._take_from_chunks(ids, out)
        return rows.to(self._to)

    def _take_from_chunks(self, ids: Ids, out: Array) -> None:
        """Chunk by chunk, each row once: a file of many parts has more chunks than the batch has rows in each."""
        chunk_of = np.searchsorted(self._stops, ids, side="right")
        order = np.argsort(chunk_of, kind="stable")
        numbers, firsts = np.unique(chunk_of[order], return_index=True)
        rows = (ids - self._starts[chunk_of])[order]
        sorted_out = np.empty_like(out)
        bounds = pairwise([*firsts.tolist(), len(ids)])
        for number, (first, stop) in zip(numbers.tolist(), bounds, strict=True):
            self._chunks[number].take(rows[first:stop], axis=0, out=sorted_out[first:stop], mode="clip")
        out[order] = sorted_out


class DeviceColumn:
    """A tensor that is not in main memory; rows are gathered where it is."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __len__(self) -> int:
        return len(self._tensor)

    def take(self, ids: Ids) -> torch.Tensor:
        return self._tensor.index_select(0, torch.from_numpy(ids).to(self._tensor.device))


class ColumnSource:
    """Columns as a dataset. `build` makes a batch of the gathered columns: a tensor, a tuple or a dict."""

    draws = False

    def __init__(self, columns: Sequence[Column], build: Callable[[list[Any]], Any]) -> None:
        self._columns = list(columns)
        self._build = build
        self.num_samples = len(self._columns[0])

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, sample: int) -> Any:
        return self.__getitems__([sample])[0]

    def __getitems__(self, samples: Sequence[int]) -> list[Any]:
        """Samples one by one, for a `collate` function."""
        columns = [column.take(np.asarray(samples, dtype=np.int64)) for column in self._columns]
        return [self._build(list(row)) for row in zip(*columns, strict=True)]

    def fetch(self, ids: Ids, before: Callable[[int], None] | None = None) -> Any:
        return self._build([column.take(ids) for column in self._columns])


def column_source(data: Any) -> ColumnSource:
    """A dataset out of a tensor or array, or of a tuple, list or dict of them with equal first dimensions."""
    if is_array(data):
        return ColumnSource([array_column(data, "the tensor")], lambda columns: columns[0])
    if isinstance(data, Mapping):
        names = list(data)
        columns = [array_column(value, f"column {name!r}") for name, value in data.items()]
        _check_lengths({f"column {name!r}": column for name, column in zip(names, columns, strict=True)})
        return ColumnSource(columns, lambda rows: dict(zip(names, rows, strict=True)))
    columns = [array_column(value, f"tensor {number}") for number, value in enumerate(data)]
    _check_lengths({f"tensor {number}": column for number, column in enumerate(columns)})
    return ColumnSource(columns, tuple)


def is_array(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, np.ndarray))


def array_column(value: Any, name: str) -> Column:
    if value.ndim == 0:
        raise UserError(
            f"As a dataset, {name} is a single number.",
            why="the first dimension counts the samples, and it has none",
            hint="pass a tensor or an array with one row a sample",
        )
    if len(value) == 0:
        raise UserError(
            f"The dataset is empty: {name} has shape {tuple(value.shape)}.",
            why="the first dimension counts the samples, and there are none",
            hint="check the path or the filter that produced it",
        )
    if isinstance(value, np.ndarray):
        return NumberColumn([np.asarray(value)], _dtype_of(value, name))
    value = value.detach()
    if value.device.type != "cpu" or value.layout != torch.strided:
        return DeviceColumn(value)
    return NumberColumn([_bits_of(value.contiguous())], value.dtype)


# Rows are moved as integers of the same width, because numpy lacks some types of torch, such as bfloat16.
_WIDTHS = {
    1: (torch.uint8, np.uint8),
    2: (torch.int16, np.int16),
    4: (torch.int32, np.int32),
    8: (torch.int64, np.int64),
}


def _bits(array: Array) -> Array:
    return array.view(_WIDTHS[array.itemsize][1]) if array.itemsize in _WIDTHS else array


def _bits_of(tensor: torch.Tensor) -> Array:
    same = tensor.view(_WIDTHS[tensor.itemsize][0]) if tensor.itemsize in _WIDTHS else tensor
    return np.asarray(same.numpy())


def _dtype_of(array: Array, name: str) -> torch.dtype:
    try:
        return torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype
    except (TypeError, ValueError) as error:
        raise UserError(
            f"As a dataset, {name} has type {array.dtype}, which no tensor can hold.",
            why=str(error),
            hint="convert it to numbers of this machine, such as `array.astype('float32')`",
        ) from error


def _check_lengths(columns: Mapping[str, Column]) -> None:
    if not columns:
        raise UserError(
            "The dataset is empty: it has no tensors.",
            why="without a sample there is nothing to train on",
            hint="pass at least one tensor",
        )
    (first, column), *others = columns.items()
    for name, other in others:
        if len(other) != len(column):
            raise UserError(
                f"The tensors of the dataset have different lengths: {first} has {len(column)} samples, {name} has "
                f"{len(other)}.",
                why="the first dimension counts samples, so it must be the same in all of them",
                hint="if these are samples rather than columns, wrap them in a torch Dataset or stack them",
            )
