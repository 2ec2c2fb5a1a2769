"""Shards as a dataset of a worker: every shard mapped into memory, rows picked out as they are needed."""

import errno
import os
from pathlib import Path
from typing import Any

import torch

from shoal.data.columns import ColumnSource
from shoal.data.frames_shards import Shard, Shards
from shoal.data.frames_write import node_name
from shoal.data.tables import copied, table_column
from shoal.files import Url, locate
from shoal.spec.errors import UserError

_MADE_BY = {"pyspark": "from_spark", "ray": "from_ray", "dask": "from_dask"}


def as_shards(dataset: Any) -> Shards | None:
    """The dataset if it is Shards. Refuses a collection that could become Shards, and names the function for that."""
    if isinstance(dataset, Shards):
        return dataset
    package = type(dataset).__module__.partition(".")[0]
    if package in _MADE_BY and hasattr(dataset, "columns"):
        raise UserError(
            f"The dataset is a {type(dataset).__name__} of {package}, which has no rows of its own.",
            why="a worker needs any row at any time, and a collection computes all of them",
            hint=f"have it written once: `shoal.data.frames.{_MADE_BY[package]}(...)`, and pass what that returns",
        )
    return None


def shards_source(shards: Shards, copies: Path | None = None) -> ColumnSource:
    """All rows of all shards as samples: a dict of columns. Shards that have a URL are copied to `copies` first."""
    num_shards = len(shards.shards)
    tables = [
        _open(shard, f"Shard {n} of {num_shards}, {shard.path},", copies) for n, shard in enumerate(shards.shards)
    ]
    names = list(shards.schema)
    doubles = torch.float64 if shards.dtype == "float64" else None

    def place(number: int, row: int) -> str:
        return f"{shards.shards[number].path}, row {row + 1}"

    columns = [table_column(name, [table[name] for table in tables], place, doubles) for name in names]
    return ColumnSource(columns, lambda values: dict(zip(names, values, strict=True)))


def _open(shard: Shard, called: str, copies: Path | None) -> Any:
    try:
        import pyarrow as pa
    except ImportError:
        raise UserError(
            "Reading shards needs pyarrow, which is not installed.",
            why="files of tables are an extra of shoal",
            hint="run `pip install 'shoal[features]'`",
        ) from None
    place = locate(shard.path)
    path = copied(place if isinstance(place, Url) else shard.path, copies)
    try:
        num_bytes = os.stat(path).st_size
        if num_bytes == shard.num_bytes:
            return pa.ipc.open_file(pa.memory_map(path)).read_all()
    except FileNotFoundError:
        raise _not_here(shard, called) from None
    except (pa.ArrowException, OSError) as error:
        is_crowd = getattr(error, "errno", None) == errno.EMFILE
        raise UserError(
            f"{called} cannot be read.",
            why=str(error).splitlines()[0],
            hint="write fewer, larger partitions, or raise `ulimit -n`: each shard is an open file"
            if is_crowd
            else "write the shards anew with `is_fresh=True`",
        ) from error
    raise UserError(
        f"{called} is not the file that was written.",
        why=f"it had {shard.num_bytes} bytes, and has {num_bytes}",
        hint="write the shards anew with `is_fresh=True`",
    )


def _not_here(shard: Shard, called: str) -> UserError:
    here = node_name()
    if shard.node == here:
        return UserError(
            f"{called} is gone.",
            why="it was written on this node and has been removed since",
            hint="write the shards anew: call from_spark, from_ray or from_dask again",
        )
    return UserError(
        f"{called} lies on node {shard.node}, and this is node {here}.",
        why="every worker needs all rows, and the folder is not shared by the nodes",
        hint="give `dir=` a folder that all nodes share, or copy the file to the same path on this node",
    )
