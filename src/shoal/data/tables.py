"""Tables in files (Parquet, Arrow, Feather, CSV) and in memory as columns. Needs pyarrow.

Parquet and CSV are decoded once into the memory of each worker. An uncompressed Arrow file is mapped: rows are read
from it as they are needed and all workers of a machine share its pages. Number columns, and lists of numbers of one
length, become tensors (double precision becomes the default type of torch); all else stays a list of Python values.
"""

import csv
import glob
import os
import socket
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoal.data import cache
from shoal.data.columns import Array, Column, ColumnSource, NumberColumn
from shoal.data.shuffle import Ids
from shoal.files import Url, is_url, locate
from shoal.spec.errors import UserError

_NUMBER = r"^\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*$"


class ListColumn:
    """Values that are no numbers: text, dates, lists of different lengths."""

    def __init__(self, values: Any) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def take(self, ids: Ids) -> list[Any]:
        return list(self._values.take(ids).to_pylist())


def file_source(paths: Sequence[str | os.PathLike[str]], copies: Path | None = None) -> ColumnSource:
    """The rows of one or several files, one after the other, as samples: a dict of columns.

    Files that have a URL are copied to the folder `copies` first.
    """
    found = [file for path in paths for file in _find(os.fspath(path))]
    files = [str(file) for file in found]
    tables = [_read(str(file), copied(file, copies)) for file in found]
    names = _common_columns(files, tables)
    if sum(len(table) for table in tables) == 0:
        raise _empty(", ".join(files))

    def place(number: int, row: int) -> str:
        return f"{files[number]}, row {row + 1}"

    columns = [table_column(name, [table[name] for table in tables], place) for name in names]
    return ColumnSource(columns, lambda values: dict(zip(names, values, strict=True)))


def _empty(files: str) -> UserError:
    return UserError(
        f"The dataset is empty: there is no row in {files}.",
        why="without a sample there is nothing to train on",
        hint="check what wrote it",
    )


def table_column(
    name: str, parts: Sequence[Any], place: Callable[[int, int], str], doubles: torch.dtype | None = None
) -> Column:
    """One column of several tables. `place(part, row)` names a row, for messages.

    `doubles` is what double precision becomes; without it, the default type of torch.
    """
    arrays: list[Array | None] = []
    for number, part in enumerate(parts):
        first = 0
        for chunk in part.chunks:
            arrays.append(_numbers(chunk, name, partial(_place_after, place, number, first)))
            first += len(chunk)
    numbers = [array for array in arrays if array is not None]
    same_shape = len({array.shape[1:] for array in numbers}) == 1
    return _number_column(numbers, doubles) if same_shape and len(numbers) == len(arrays) else _list_column(parts)


def _place_after(place: Callable[[int, int], str], part: int, first: int, row: int) -> str:
    return place(part, first + row)


def _number_column(arrays: Sequence[Array], doubles: torch.dtype | None) -> Column:
    common = np.result_type(*arrays)
    dtype = torch.from_numpy(np.empty(0, common)).dtype
    to = (doubles or torch.get_default_dtype()) if dtype == torch.float64 else dtype
    return NumberColumn([array.astype(common, copy=False) for array in arrays], dtype, to)


def _list_column(parts: Sequence[Any]) -> ListColumn:
    import pyarrow as pa

    chunks = [chunk for part in parts for chunk in part.chunks]
    kinds = {chunk.type for chunk in chunks}
    return ListColumn(pa.chunked_array(chunks if len(kinds) == 1 else [pa.array(c.to_pylist()) for c in chunks]))


def _numbers(chunk: Any, name: str, place: Callable[[int], str]) -> Array | None:
    """A chunk as an array of one row for each value, without a copy where possible; None where it has no numbers."""
    import pyarrow as pa

    kind = chunk.type
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        _check_complete(chunk, name, place)
        numbers: Array = chunk.to_numpy(zero_copy_only=False)
        return numbers
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        return None
    lengths = set(chunk.value_lengths().unique().to_pylist())
    if len(lengths) != 1 or None in lengths:
        return None
    length = lengths.pop()
    inner = _numbers(chunk.flatten(), name, lambda row: place(row // length))
    return None if inner is None else inner.reshape(len(chunk), length, *inner.shape[1:])


def _check_complete(chunk: Any, name: str, place: Callable[[int], str]) -> None:
    if chunk.null_count == 0:
        return
    raise UserError(
        f"A value is missing in column {name!r} of {place(chunk.is_null().index(True).as_py())}.",
        why="the column holds numbers, and a tensor has no way to say that one is missing",
        hint="fill it in or drop the row before training",
    )


def _common_columns(files: Sequence[str], tables: Sequence[Any]) -> list[str]:
    names = list(tables[0].column_names)
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(
            f"Two columns of {files[0]} are called {twice!r}.",
            why="a batch is a dict of columns by name",
            hint="rename one of them",
        )
    for file, table in zip(files, tables, strict=True):
        if set(table.column_names) != set(names):
            odd = sorted(set(names) ^ set(table.column_names))
            raise UserError(
                f"{files[0]} and {file} have different columns: only one of them has {', '.join(map(repr, odd))}.",
                why="files that are read as one dataset need the same columns",
                hint="read them as two datasets, or write them alike",
            )
    return names


def copied(file: str | Url, copies: Path | None) -> str:
    """The path of a file; that of its copy, if it has a URL."""
    return str(cache.fetch(file, copies or Path("~/.shoal/cache").expanduser())) if isinstance(file, Url) else file


def _find(path: str) -> Sequence[str | Url]:
    if is_url(path):
        place = locate(path)
        return cache.find(place) if isinstance(place, Url) else _find(str(place))
    path = os.path.expanduser(path)
    if os.path.isfile(path):
        return [path]
    if os.path.isdir(path):
        raise UserError(
            f"{path} is a folder, not a file.",
            why="it does not say which of its files are the data",
            hint=f"name its files: '{path.rstrip('/')}/*.parquet'",
        )
    found = sorted(file for file in glob.glob(path, recursive=True) if os.path.isfile(file))
    if not found:
        kind = "No file matches" if glob.has_magic(path) else "There is no file"
        raise UserError(
            f"{kind} {path}",
            why=f"looked in {os.path.abspath(os.path.dirname(path) or '.')} on {socket.gethostname()}",
            hint="check the path and the folder you are in; every machine of a run needs the file at the same path",
        )
    return found


def _read(file: str, path: str) -> Any:
    """The table in the file at `path`, which people know as `file`."""
    suffix = Path(file).suffix.lower()
    if suffix not in READERS:
        raise UserError(
            f"{file} is of a kind that cannot be read.",
            why="the end of its name says what a file is",
            hint=f"use one of {', '.join(READERS)}",
        )
    try:
        import pyarrow as pa
    except ImportError:
        raise UserError(
            f"Reading {file} needs pyarrow, which is not installed.",
            why="files of tables are an extra of shoal",
            hint="run `pip install 'shoal[features]'`",
        ) from None
    try:
        table = READERS[suffix](path)
        table.validate()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{file} cannot be read.",
            why=str(error).splitlines()[0],
            hint=f"check that it is a whole {suffix} file, or write it anew",
        ) from error
    return table


def _read_parquet(file: str) -> Any:
    import pyarrow.parquet as parquet

    with parquet.ParquetFile(file) as opened:
        return opened.read().combine_chunks()


def _read_arrow(file: str) -> Any:
    """Map an Arrow file of either format; what is compressed inside it is unpacked into memory."""
    import pyarrow as pa

    source = pa.memory_map(file)
    try:
        return pa.ipc.open_file(source).read_all()
    except pa.ArrowInvalid:
        source.seek(0)
        return pa.ipc.open_stream(source).read_all()


def _read_csv(file: str) -> Any:
    """The first line names the columns unless one of its values is a number; then they are called f0, f1, ..."""
    import pyarrow.csv as arrow_csv

    with open(file, newline="") as opened:
        first = next(csv.reader(opened), [])
    if not first:
        raise _empty(file)
    has_names = not any(_is_number(value) for value in first)
    options = arrow_csv.ReadOptions(autogenerate_column_names=not has_names)
    table = arrow_csv.read_csv(file, read_options=options).combine_chunks()
    for name, column in zip(table.column_names, table.columns, strict=True):
        _check_text_is_text(file, name, column)
    return table


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _check_text_is_text(file: str, name: str, column: Any) -> None:
    """Refuse a column that holds numbers but for a few values: one typing error would turn it into text."""
    import pyarrow as pa
    import pyarrow.compute as compute

    if not pa.types.is_string(column.type):
        return
    numbers = compute.match_substring_regex(column, _NUMBER)
    odd = compute.index(numbers, False).as_py()
    if odd < 0 or 2 * (compute.sum(numbers).as_py() or 0) <= len(column):
        return
    raise UserError(
        f"{file}: column {name!r} holds numbers, but row {odd + 1} has {column[odd].as_py()!r}.",
        why="a column is read as text if one of its values is",
        hint="correct the value or drop the row before training",
    )


READERS = {".parquet": _read_parquet, ".arrow": _read_arrow, ".feather": _read_arrow, ".csv": _read_csv}
