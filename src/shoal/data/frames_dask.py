"""A DataFrame of Dask as shards."""

import os
from collections.abc import Iterable, Sequence
from typing import Any

from shoal.data.frames_shards import (
    Shards,
    check_columns,
    key_of,
    make_shards,
    not_a_frame,
    not_computed,
    not_installed,
)
from shoal.data.frames_write import Order, write_shard


def from_dask(
    ddf: Any,
    *,
    columns: Sequence[str] | None = None,
    dir: str | os.PathLike[str] | None = None,
    dtype: str | None = None,
    is_fresh: bool = False,
) -> Shards:
    """Have Dask write a DataFrame for training, a shard for each partition; returns once all of it is there.

    It runs where Dask runs: on the cluster of the current client, else in threads. `dir` is a folder that all nodes
    share; without it, each node writes into its own temporary folder, which is enough on one machine. Given a
    `dir`, a DataFrame with the same token is not written twice; `is_fresh=True` writes it all the same. The index is
    not written: `reset_index()` makes it a column.
    """
    try:
        import dask.dataframe as dataframe
        from dask.base import tokenize
    except ImportError:
        raise not_installed("Dask", "dask") from None
    if not isinstance(ddf, dataframe.DataFrame):
        raise not_a_frame(ddf, "a DataFrame of Dask")
    chosen = ddf[check_columns(columns, list(ddf.columns))]
    key = key_of(tokenize(chosen), dtype) if dir is not None else None
    return make_shards(lambda order: _write(chosen, order), dir=dir, key=key, dtype=dtype, is_fresh=is_fresh)


def _write(ddf: Any, order: Order) -> Iterable[bytes]:
    from dask.delayed import delayed

    write = delayed(_write_partition, pure=False)
    reports = delayed(list)([write(part, order, number) for number, part in enumerate(ddf.to_delayed())])
    try:
        return list(reports.compute())
    except Exception as error:
        raise not_computed("Dask", error) from error


def _write_partition(frame: Any, order: Order, partition: int) -> bytes:
    return write_shard([_table(frame)], order, partition)


def _table(frame: Any) -> Any:
    import pyarrow as pa

    return pa.table({name: _array(frame[name]) for name in frame.columns})


def _array(values: Any) -> Any:
    """Numbers as they are: read as a column of pandas, NaN would be a value that is missing."""
    import pyarrow as pa

    if values.dtype.kind in "biuf" and hasattr(values.dtype, "isnative"):
        return pa.array(values.to_numpy())
    return pa.Array.from_pandas(values)
