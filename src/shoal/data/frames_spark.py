"""A DataFrame of Spark as shards."""

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
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
from shoal.spec.errors import UserError

_NUMBERS = ("boolean", "byte", "short", "integer", "long", "float", "double", "date", "timestamp", "timestamp_ntz")
_REFUSED = {"decimal": ": `col.cast('double')`", "map": "", "variant": "", "void": "", "interval": ""}
_MAX_BYTES, _MAX_ROWS = "spark.sql.execution.arrow.maxBytesPerBatch", "spark.sql.execution.arrow.maxRecordsPerBatch"
_NO_LIMIT = str(2**31 - 1)


def from_spark(
    df: Any,
    *,
    columns: Sequence[str] | None = None,
    dir: str | os.PathLike[str] | None = None,
    dtype: str | None = None,
    is_fresh: bool = False,
) -> Shards:
    """Have the executors write a DataFrame for training; returns once all of it is there.

    `dir` is a folder that all nodes share; without it, each node writes into its own temporary folder, which is
    enough on one machine. Given a `dir`, the same DataFrame is not written twice: the same plan over the same
    files, as Spark lists them, or over rows that are part of the plan. `is_fresh=True` writes it all the same.
    Vectors of Spark ML become arrays. `dtype` turns floating-point columns into another type, "float32" say.
    """
    if not find_spec("pyspark"):
        raise not_installed("pyspark", "spark")
    if not hasattr(df, "mapInArrow"):
        raise not_a_frame(df, "a DataFrame of Spark")
    names = check_columns(columns, df.columns)
    _check_types(df, names)
    # Spark takes a dot in a name for a field of a struct; files have the names that the user gave.
    chosen = df.select(*(_column(df, name, dtype).alias(f"c{number}") for number, name in enumerate(names)))
    key = _key(chosen, names, dtype) if dir is not None else None
    return make_shards(lambda order: _write(chosen, names, order), dir=dir, key=key, dtype=dtype, is_fresh=is_fresh)


def _check_types(df: Any, names: Sequence[str]) -> None:
    for name in names:
        kind = df.schema[name].dataType
        bad = next((each for each in _REFUSED if kind.typeName().split()[0].endswith(each)), None)
        if bad is not None:
            raise UserError(
                f"Column {name!r} is of type {kind.simpleString()}, which cannot be trained on.",
                why="a batch has numbers, lists of numbers, text, bytes, dates and times",
                hint=f"leave it out with `columns=`, or turn it into numbers before{_REFUSED[bad]}",
            )


def _column(df: Any, name: str, dtype: str | None) -> Any:
    import pyspark.sql.functions as functions

    column = functions.col("`" + name.replace("`", "``") + "`")
    if type(df.schema[name].dataType).__name__ != "VectorUDT":
        return column
    from pyspark.ml.functions import vector_to_array

    return vector_to_array(column, "float32" if dtype == "float32" else "float64")


def _write(df: Any, names: Sequence[str], order: Order) -> Iterable[bytes]:
    try:
        with _quick_batches(df):
            rows = df.mapInArrow(_task(order, names), "partition int, report binary").collect()
    except Exception as error:
        raise not_computed("Spark", error) from error
    return [bytes(row.report) for row in sorted(rows, key=lambda row: row.partition)]


def _task(order: Order, names: Sequence[str]) -> Callable[[Iterator[Any]], Iterator[Any]]:
    def write(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        number = context.partitionId()
        report = write_shard((batch.rename_columns(names) for batch in batches), order, number)
        yield pa.record_batch({"partition": pa.array([number], pa.int32()), "report": [report]})

    return write


@contextlib.contextmanager
def _quick_batches(df: Any) -> Iterator[None]:
    """No limit of bytes for Arrow batches while rows of fixed width are written.

    Spark weighs the batch after each row, which takes longer than all else together. Where every row is as long as
    the next, the limit of rows says the same.
    """
    conf = df.sparkSession.conf
    is_fixed = all(field.dataType.typeName() in _NUMBERS for field in df.schema)
    if not is_fixed or int(conf.get(_MAX_ROWS)) <= 0:
        yield
        return
    before = conf.get(_MAX_BYTES, None)
    conf.set(_MAX_BYTES, _NO_LIMIT)
    try:
        yield
    finally:
        if before is None:
            conf.unset(_MAX_BYTES)
        else:
            conf.set(_MAX_BYTES, before)


def _key(df: Any, names: Sequence[str], dtype: str | None) -> str | None:
    """Names the rows by how they come about; None where the plan does not say it.

    Plans over RDDs and tables of other systems are hashed by the object that reads them, which may be the same for
    other rows. Spark Connect shows no plan.
    """
    try:
        leaves = df._jdf.queryExecution().analyzed().collectLeaves()
        facts = [_leaf_facts(leaves.apply(number)) for number in range(leaves.size())]
    except Exception:
        return None
    if None in facts:
        return None
    return key_of(df.semanticHash(), df.schema.json(), names, facts, dtype)


def _leaf_facts(leaf: Any) -> tuple[Any, ...] | None:
    name = leaf.getClass().getSimpleName()
    if name in ("Range", "LocalRelation", "OneRowRelation"):
        return (name,)
    if name != "LogicalRelation" or leaf.relation().getClass().getSimpleName() != "HadoopFsRelation":
        return None
    files = leaf.relation().location().allFiles().mkString("\n")
    found = re.findall(r"path=(.*?);.*?length=(\d+);.*?modification_time=(\d+)", files)
    return (name, *sorted(found)) if found else None
