"""A Dataset of Ray Data as shards."""

import os
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from shoal.data.frames_shards import Shards, check_columns, make_shards, not_a_frame, not_computed, not_installed
from shoal.data.frames_write import Order, write_shard
from shoal.spec.errors import UserError


def from_ray(
    dataset: Any,
    *,
    columns: Sequence[str] | None = None,
    dir: str | os.PathLike[str] | None = None,
    dtype: str | None = None,
) -> Shards:
    """Have Ray write a Dataset for training, a shard for each block; returns once all of it is there.

    `dir` is a folder that all nodes share; without it, each node writes into its own temporary folder, which is
    enough on one machine. Ray does not say whether two Datasets are the same: each call writes anew. Keep
    `Shards.folder` and use `open_shards` to read what is there. Columns of tensors keep their shape.
    """
    try:
        import ray.data
    except ImportError:
        raise not_installed("Ray", "ray") from None
    if not isinstance(dataset, ray.data.Dataset):
        raise not_a_frame(dataset, "a Dataset of Ray Data")
    return make_shards(lambda order: _write(dataset, columns, order), dir=dir, dtype=dtype)


def _write(dataset: Any, columns: Sequence[str] | None, order: Order) -> Iterable[bytes]:
    options = dataset.context.execution_options
    before, options.preserve_order = options.preserve_order, True
    try:
        names = check_columns(columns, _names(dataset))
        task = partial(_write_block, order, names)
        rows = dataset.map_batches(task, batch_size=None, batch_format="pyarrow", zero_copy_batch=True).take_all()
    except UserError:
        raise
    except Exception as error:
        raise not_computed("Ray", error) from error
    finally:
        options.preserve_order = before
    return [row["report"] for row in rows]


def _names(dataset: Any) -> list[str]:
    schema = dataset.schema()
    if schema is None or not schema.names:
        raise UserError(
            "The dataset is empty: it has no block with columns.",
            why="without a sample there is nothing to train on",
            hint="check the filter or the path that produced it",
        )
    return list(schema.names)


def _write_block(order: Order, names: Sequence[str], block: Any) -> dict[str, list[bytes]]:
    return {"report": [write_shard([block.select(names)], order)]}
