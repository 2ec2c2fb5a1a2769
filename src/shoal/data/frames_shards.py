"""The description of rows that executors have written, where it is kept, and how it comes about.

    executor:  write under a hidden name -> give it a name that no other attempt has -> report it
    driver:    collect one report for each partition -> write shards.json -> remove what nobody reported

An engine counts one attempt of a task, however many it started. So the reports name each partition once, and files of
attempts that failed, or came second, are never read.
"""

import contextlib
import hashlib
import os
import re
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import msgspec

from shoal.data.frames_place import list_sizes, prepare, read_small, remove, write_small, writing_to
from shoal.data.frames_write import Order, Report, node_name
from shoal.files import is_url
from shoal.spec.errors import UserError

MANIFEST = "shards.json"
FLOATS = ("float16", "float32", "float64")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One file of rows, and the node that wrote it."""

    path: str
    num_rows: int
    num_bytes: int
    node: str

    @property
    def name(self) -> str:
        return os.path.basename(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """Rows in files, as a dataset: the rows of the first shard, then those of the second, and so on.

    It can be pickled and holds no row. `schema` says the Arrow type of each column. `dtype` is what columns of
    floating-point numbers were turned into, None if they are as they were. `folder` holds the files and this
    description, for `open_shards`.
    """

    shards: tuple[Shard, ...]
    schema: dict[str, str]
    folder: str
    dtype: str | None = None

    @property
    def num_rows(self) -> int:
        return sum(shard.num_rows for shard in self.shards)


def open_shards(folder: str | os.PathLike[str]) -> Shards:
    """The shards of a folder, `Shards.folder` of those that were written: for a script that is started later."""
    folder = os.fspath(folder)
    try:
        return msgspec.json.decode(read_small(folder, MANIFEST), type=Shards)
    except UserError:
        raise
    except OSError as error:
        raise UserError(
            f"There are no shards in {folder}.",
            why=f"{MANIFEST}: {error.strerror or 'there is no such file'}",
            hint="name the folder that `from_spark`, `from_ray` or `from_dask` returned as `.folder`",
        ) from None
    except msgspec.MsgspecError as error:
        raise UserError(
            f"{folder}/{MANIFEST} cannot be read.", why=str(error), hint="write the shards anew"
        ) from None


def key_of(*facts: object) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def make_shards(
    write: Callable[[Order], Iterable[bytes]],
    *,
    dir: str | os.PathLike[str] | None,
    key: str | None = None,
    dtype: str | None = None,
    is_fresh: bool = False,
) -> Shards:
    """Let `write` have the rows written and return the reports in the order of the partitions.

    What was written for the same `key` into the same `dir` is used again unless `is_fresh`; without a key everything
    is written anew. If writing fails, none of its files is left where the driver can see them.
    """
    _check_dtype(dtype)
    attempt = uuid.uuid4().hex[:12]
    folder = _folder(dir, key or attempt)
    old = _find_whole(folder)
    if old is not None and not is_fresh:
        return old
    with _taken_back(folder, attempt), writing_to(folder, node_name()):
        reports = [msgspec.json.decode(report, type=Report) for report in write(Order(folder, attempt, dtype))]
        shards = _shards_of(reports, folder, dtype)
        write_small(folder, MANIFEST, msgspec.json.format(msgspec.json.encode(shards), indent=1))
    replaced = _names(old) if old is not None else set()
    remove(folder, (_written_by(attempt, folder) | replaced) - _names(shards))
    return shards


def check_columns(wanted: Sequence[str] | None, present: Sequence[str]) -> list[str]:
    """The columns that are asked for; all of them where nothing was said."""
    if isinstance(wanted, str):
        wanted = [wanted]
    names = list(present if wanted is None else wanted)
    missing = [name for name in names if name not in present]
    if missing or not names:
        raise UserError(
            f"There is no column {', '.join(map(repr, missing))}." if missing else "There are no columns.",
            why=f"the columns are {', '.join(map(repr, present))}",
            hint="check the names in `columns=`",
        )
    twice = next((name for name in names if names.count(name) > 1 or list(present).count(name) > 1), None)
    if twice is not None:
        raise UserError(
            f"Two columns are called {twice!r}.",
            why="a batch is a dict of columns by name",
            hint="rename one of them, or name each column once",
        )
    return names


def not_computed(engine: str, error: BaseException) -> UserError:
    """What is said when the rows themselves could not be computed, or shoal is missing where they are.

    The words of an engine hold traces of several processes: the last line that names an exception says most.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if re.match(r"(\w+\.)*\w*(Error|Exception|Invalid)\w*: ", line)]
    cause = (causes or lines[:1] or [type(error).__name__])[-1]
    return UserError(
        f"{engine} could not write the rows.",
        why=cause,
        hint="install shoal with pyarrow where the executors run"
        if "No module named 'shoal" in cause
        else f"try to compute them in {engine} alone, such as by counting them",
    )


def not_installed(package: str, extra: str) -> UserError:
    return UserError(
        f"{package} is not installed.",
        why="it is an extra of shoal",
        hint=f"run `pip install 'shoal[{extra}]'`",
    )


def not_a_frame(given: object, wanted: str) -> UserError:
    return UserError(
        f"{type(given).__module__}.{type(given).__name__} is not {wanted}.",
        why="each kind of collection has a function of its own",
        hint="use from_spark, from_ray or from_dask; tensors, arrays and paths go to the Trainer as they are",
    )


def _check_dtype(dtype: str | None) -> None:
    if dtype is not None and dtype not in FLOATS:
        raise UserError(
            f"dtype is {dtype!r}.",
            why="it says what columns of floating-point numbers are turned into",
            hint=f"use one of {', '.join(map(repr, FLOATS))}, or leave it out",
        )


def _folder(dir: str | os.PathLike[str] | None, name: str) -> str:
    base = os.path.join(tempfile.gettempdir(), "shoal-frames") if dir is None else os.fspath(dir)
    base = base.rstrip("/") if is_url(base) else os.path.abspath(os.path.expanduser(base))
    folder = os.path.join(base, name)
    with writing_to(folder, node_name()):
        prepare(folder)
    return folder


def _find_whole(folder: str) -> Shards | None:
    """Shards that were written before and are there, as far as can be seen from here."""
    sizes = list_sizes(folder)
    if MANIFEST not in sizes:
        return None
    try:
        shards = open_shards(folder)
    except UserError:
        return None
    is_seen = is_url(folder)
    here = [shard for shard in shards.shards if is_seen or shard.node == node_name() or shard.name in sizes]
    return shards if all(sizes.get(shard.name) == shard.num_bytes for shard in here) else None


def _names(shards: Shards) -> set[str]:
    return {shard.name for shard in shards.shards}


def _written_by(attempt: str, folder: str) -> set[str]:
    return {name for name in list_sizes(folder) if attempt in name}


def _shards_of(reports: Sequence[Report], folder: str, dtype: str | None) -> Shards:
    problem = next((report.problem for report in reports if report.problem), None)
    if problem:
        message, why, hint = problem
        raise UserError(message, why=why, hint=hint)
    written = [report for report in reports if report.num_rows]
    if not written:
        raise UserError(
            "The dataset is empty: no partition has a row.",
            why="without a sample there is nothing to train on",
            hint="check the filter or the path that produced it",
        )
    _check_alike(written)
    return Shards(
        shards=tuple(
            Shard(path=each.path, num_rows=each.num_rows, num_bytes=each.num_bytes, node=each.node)
            for each in written
        ),
        schema=written[0].schema,
        folder=folder,
        dtype=dtype,
    )


def _check_alike(written: Sequence[Report]) -> None:
    """Partitions of Ray and Dask may differ in their columns, which shows only when they are computed."""
    (_, first), *others = [(schema, next(alike)) for schema, alike in groupby(written, lambda each: each.schema)]
    for _, other in others:
        odd = sorted(name for name, _ in first.schema.items() ^ other.schema.items())[0]
        raise UserError(
            f"Column {odd!r} is not the same in all partitions: {first.schema.get(odd, 'missing')} in one, "
            f"{other.schema.get(odd, 'missing')} in another.",
            why="the rows of all of them are samples of one dataset",
            hint="give the column one type before, such as with `astype`",
        )


@contextlib.contextmanager
def _taken_back(folder: str, attempt: str) -> Iterator[None]:
    """If writing fails, remove what was written."""
    try:
        yield
    except BaseException:
        remove(folder, _written_by(attempt, folder))
        raise
