"""What executors do: write one partition as an Arrow file that can be mapped into memory, and report it.

Runs in processes of Spark, Ray and Dask, and imports neither torch nor numpy: that takes longer than the writing.
"""

import os
import socket
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import msgspec

from shoal.data.frames_place import landing, writing_to
from shoal.spec.errors import UserError

CHUNK_BYTES = 256 * 2**20
"""Rows are gathered into chunks of about this size, since a batch is picked out of one chunk after the other."""


@dataclass(frozen=True, slots=True)
class Order:
    """What executors are told: where to write, the name of this attempt, and the type for floating-point numbers."""

    folder: str
    attempt: str
    dtype: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What became of one partition. `problem` is what a UserError says: message, why, hint."""

    path: str = ""
    num_rows: int = 0
    num_bytes: int = 0
    node: str = ""
    schema: dict[str, str] = field(default_factory=dict)
    problem: tuple[str, str, str] | None = None


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a chunk of rows begins, for messages."""

    partition: int | None
    first: int

    def of(self, row: int) -> str:
        partition = "a block" if self.partition is None else f"partition {self.partition}"
        return f"in row {self.first + row + 1} of {partition}"


def write_shard(tables: Iterable[Any], order: Order, partition: int | None = None) -> bytes:
    """Write tables or record batches, in this order, into one file; returns the Report as JSON.

    A partition without rows makes no file. Nothing is raised for what the user has to mend: engines would try again,
    and wrap it up in traces of their own.
    """
    try:
        with writing_to(order.folder, node_name()):
            report = _write(tables, order, partition)
    except UserError as error:
        report = Report(problem=(error.message, error.why, error.hint))
    return msgspec.json.encode(report)


def node_name() -> str:
    return socket.gethostname()


def _write(tables: Iterable[Any], order: Order, partition: int | None) -> Report:
    chunks = _tidy_chunks(tables, partition, order.dtype)
    first = next(chunks, None)
    if first is None:
        return Report()
    number = "part" if partition is None else f"{partition:05d}"
    name = f"{number}-{order.attempt}-{uuid.uuid4().hex[:8]}.arrow"
    with landing(order.folder, name) as path:
        num_rows = _write_file(path, first, chunks)
        num_bytes = os.stat(path).st_size
    return Report(
        path=os.path.join(order.folder, name),
        num_rows=num_rows,
        num_bytes=num_bytes,
        node=node_name(),
        schema={field.name: str(field.type) for field in first.schema},
    )


def _write_file(path: str, first: Any, others: Iterable[Any]) -> int:
    """Write the chunks and count their rows."""
    import pyarrow as pa

    num_rows = 0
    with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, first.schema) as writer:
        for chunk in chain([first], others):
            writer.write_table(chunk)
            num_rows += len(chunk)
    return num_rows


def _tidy_chunks(tables: Iterable[Any], partition: int | None, dtype: str | None) -> Iterator[Any]:
    import pyarrow as pa

    num_rows = 0
    for chunk in _chunks(tables):
        place = _Place(partition, num_rows)
        yield pa.table({name: _tidy(chunk[name], name, place, dtype) for name in chunk.column_names})
        num_rows += len(chunk)


def _chunks(tables: Iterable[Any]) -> Iterator[Any]:
    """The rows as tables of one chunk each."""
    gathered: list[Any] = []
    num_bytes = 0
    for table in tables:
        if table.num_rows:
            gathered.append(table)
            num_bytes += table.nbytes
        if num_bytes >= CHUNK_BYTES:
            yield _together(gathered)
            gathered, num_bytes = [], 0
    if gathered:
        yield _together(gathered)


def _together(tables: list[Any]) -> Any:
    import pyarrow as pa

    if isinstance(tables[0], pa.RecordBatch):
        return pa.Table.from_batches(tables).combine_chunks()
    return pa.concat_tables(tables).combine_chunks()


def _tidy(column: Any, name: str, place: _Place, dtype: str | None) -> Any:
    """A column as it is written: complete if it holds numbers, and of a type that a batch can have."""
    import pyarrow as pa

    array = _plain(column.chunk(0))
    if pa.types.is_null(array.type) or not _is_supported(array.type):
        raise UserError(
            f"Column {name!r} is of type {array.type}, which cannot be trained on.",
            why="a batch has numbers, lists of numbers, text, bytes, dates and times",
            hint=f"leave it out with `columns=`, or turn it into numbers before{_advice(array.type)}",
        )
    if _leaf(array.type) is not None:
        missing = _first_missing(array)
        if missing is not None:
            raise UserError(
                f"A value is missing in column {name!r}, {place.of(missing)}.",
                why="the column holds numbers, and a tensor has no way to say that one is missing",
                hint="fill it in or drop the row before training, such as with `fillna` or `dropna`",
            )
    return array.cast(_as_floats(array.type, dtype)) if dtype else array


def _plain(array: Any) -> Any:
    """Without the clothes of other libraries: categories as values, tensors of Ray as lists of fixed size."""
    import pyarrow as pa

    if pa.types.is_dictionary(array.type):
        return array.dictionary_decode()
    if not isinstance(array.type, pa.BaseExtensionType):
        return array
    shape = getattr(array.type, "shape", None)
    if shape is None or None in shape:
        return array.storage
    values = array.storage.flatten()
    for size in reversed(shape):
        values = pa.FixedSizeListArray.from_arrays(values, size)
    return values


def _leaf(kind: Any) -> Any:
    """The type of the numbers in it, however deep the lists; None where it holds none."""
    import pyarrow.types as types

    while types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        kind = kind.value_type
    is_number = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
    return kind if is_number else None


def _is_supported(kind: Any) -> bool:
    import pyarrow.types as types

    while types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        kind = kind.value_type
    text = (
        types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind)
    )
    when = types.is_date(kind) or types.is_time(kind) or types.is_timestamp(kind)
    return text or when or _leaf(kind) is not None


def _advice(kind: Any) -> str:
    import pyarrow.types as types

    if types.is_decimal(kind):
        return ": cast it to double"
    if types.is_struct(kind):
        return ": select its fields as columns"
    return ""


def _first_missing(array: Any) -> int | None:
    """The first row that is missing or has something missing in it."""
    import pyarrow as pa

    if array.null_count:
        return int(array.is_null().index(True).as_py())
    if pa.types.is_primitive(array.type) or not len(array):
        return None
    inner = _first_missing(array.flatten())
    if inner is None:
        return None
    if pa.types.is_fixed_size_list(array.type):
        return inner // int(array.type.list_size)
    return int(array.value_parent_indices()[inner].as_py()) if hasattr(array, "value_parent_indices") else 0


def _as_floats(kind: Any, dtype: str) -> Any:
    import pyarrow as pa

    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_as_floats(kind.value_type, dtype), kind.list_size)
    if pa.types.is_large_list(kind):
        return pa.large_list(_as_floats(kind.value_type, dtype))
    if pa.types.is_list(kind):
        return pa.list_(_as_floats(kind.value_type, dtype))
    return pa.type_for_alias(dtype) if pa.types.is_floating(kind) else kind
