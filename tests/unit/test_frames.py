"""Shards of rows without an engine: what executors write, what workers read, and what is said when it cannot be."""

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from shoal.data import frames, frames_dask, frames_ray, frames_spark, frames_write
from shoal.data.frames_shards import key_of, make_shards
from shoal.data.frames_write import Order, Report, write_shard
from shoal.data.sources import as_source
from shoal.spec.errors import UserError

pa = pytest.importorskip("pyarrow")


def table_of(size: int, first: int = 0) -> Any:
    numbers = np.arange(first, first + size)
    return pa.table(
        {
            "i": pa.array(numbers),
            "f": pa.array(numbers.astype("f4")),
            "d": pa.array(numbers / 4),
            "b": pa.array(numbers % 2 == 0),
            "v": pa.array([[float(number), 1.0] for number in numbers], pa.list_(pa.float32())),
            "s": pa.array([None if number == 2 else f"row {number}" for number in numbers]),
        }
    )


def shards_of(dir: Path | str, *tables: Any, **how: Any) -> frames.Shards:
    """What the driver gets if executors have these tables."""

    def write(order: Order) -> list[bytes]:
        return [write_shard([table], order, number) for number, table in enumerate(tables)]

    return make_shards(write, dir=dir, **how)


def error_of(dir: Path | str, *tables: Any, **how: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        shards_of(dir, *tables, **how)
    return caught.value


def files_in(folder: Path | str) -> list[str]:
    return sorted(path.name for path in Path(folder).rglob("*") if path.is_file())


def test_rows_are_those_of_the_partitions_one_after_the_other(tmp_path: Path) -> None:
    shards = shards_of(tmp_path, table_of(4), table_of(0), table_of(3, first=4))
    assert (shards.num_rows, [shard.num_rows for shard in shards.shards]) == (7, [4, 3])
    batch = as_source(shards).fetch(np.array([5, 0, 2]))
    assert (batch["i"].dtype, batch["i"].tolist()) == (torch.int64, [5, 0, 2])
    assert (batch["f"].dtype, batch["f"].tolist()) == (torch.float32, [5.0, 0.0, 2.0])
    assert (batch["d"].dtype, batch["d"].tolist()) == (torch.float32, [1.25, 0.0, 0.5])
    assert batch["b"].tolist() == [False, True, True]
    assert batch["v"].tolist() == [[5.0, 1.0], [0.0, 1.0], [2.0, 1.0]]
    assert batch["s"] == ["row 5", "row 0", None]


def test_shards_are_pickled_and_found_again(tmp_path: Path) -> None:
    shards = shards_of(tmp_path, table_of(4))
    assert pickle.loads(pickle.dumps(shards)) == shards
    assert frames.open_shards(shards.folder) == shards
    assert list(shards.schema) == ["i", "f", "d", "b", "v", "s"]


def test_shards_in_a_store_that_has_a_url(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    url = f"memory://{tmp_path.name}/rows"
    shards = shards_of(url, table_of(4), table_of(3, first=4), key="k")
    assert shards.folder == f"{url}/k"
    assert frames.open_shards(shards.folder) == shards
    assert as_source(shards, copies=tmp_path).fetch(np.array([6, 1]))["i"].tolist() == [6, 1]
    assert len([path for path in tmp_path.iterdir() if path.suffix == ".arrow"]) == 2
    assert shards_of(url, table_of(5), key="k") == shards
    assert shards_of(url, table_of(5), key="k", is_fresh=True).num_rows == 5
    with pytest.raises(UserError, match="There is no file memory://"):
        as_source(shards, copies=tmp_path)
    with pytest.raises(UserError, match="There are no shards in"):
        frames.open_shards(f"{url}/other")
    assert "is empty" in error_of(url, table_of(0)).message


def test_collate_gets_rows(tmp_path: Path) -> None:
    rows = as_source(shards_of(tmp_path, table_of(4)), collate=list).fetch(np.array([3, 1]))
    assert [(int(row["i"]), row["s"]) for row in rows] == [(3, "row 3"), (1, "row 1")]


def test_numbers_are_mapped_not_loaded(tmp_path: Path) -> None:
    size = 2_000_000
    shards = shards_of(tmp_path, pa.table({"x": np.zeros(size), "y": np.zeros(size, "f4")}))
    before = pa.total_allocated_bytes()
    assert as_source(shards).fetch(np.array([size - 1]))["x"].tolist() == [0.0]
    assert pa.total_allocated_bytes() - before < size


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_dtype_says_what_floats_become(tmp_path: Path, dtype: str) -> None:
    batch = as_source(shards_of(tmp_path, table_of(4), dtype=dtype)).fetch(np.array([1]))
    assert {batch[name].dtype for name in ("f", "d", "v")} == {getattr(torch, dtype)}
    assert batch["i"].dtype == torch.int64


def test_large_partitions_are_written_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames_write, "CHUNK_BYTES", 1000)
    batches = table_of(100).to_batches(max_chunksize=10)
    shards = make_shards(lambda order: [write_shard(batches, order, 0)], dir=tmp_path)
    with pa.memory_map(shards.shards[0].path) as file:
        assert 1 < pa.ipc.open_file(file).num_record_batches < 10
    assert as_source(shards).fetch(np.arange(100))["i"].tolist() == list(range(100))


def test_the_same_key_is_written_once(tmp_path: Path) -> None:
    first = shards_of(tmp_path, table_of(4), key="k")
    assert shards_of(tmp_path, table_of(5), key="k") == first
    assert shards_of(tmp_path, table_of(5), key="other").num_rows == 5
    fresh = shards_of(tmp_path, table_of(6), key="k", is_fresh=True)
    assert fresh.num_rows == 6
    assert len(files_in(fresh.folder)) == 2, "the shards that were replaced are gone"
    os.unlink(fresh.shards[0].path)
    assert shards_of(tmp_path, table_of(7), key="k").num_rows == 7
    assert key_of("a", 1) != key_of("a", 2)


def test_attempts_that_nobody_reported_are_never_read_and_removed(tmp_path: Path) -> None:
    """A task that is tried again, or runs twice because it is slow, writes twice; engines count one of them."""

    def write(order: Order) -> list[bytes]:
        write_shard([table_of(4)], order, 0)
        return [write_shard([table_of(4)], order, 0)]

    shards = make_shards(write, dir=tmp_path)
    assert shards.num_rows == 4
    assert files_in(tmp_path) == sorted([os.path.basename(shards.shards[0].path), "shards.json"])


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    def write(order: Order) -> list[bytes]:
        write_shard([table_of(4)], order, 0)
        raise RuntimeError("lost")

    with pytest.raises(RuntimeError):
        make_shards(write, dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_writer_that_dies_leaves_no_name(tmp_path: Path) -> None:
    def broken() -> Any:
        yield table_of(4)
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        write_shard(broken(), Order(str(tmp_path), "a", None), 0)
    assert files_in(tmp_path) == []


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([1, None, 3]), "A value is missing in column 'x', in row 2 of partition 0"),
        (pa.array([[1.0], [2.0, None]]), "A value is missing in column 'x', in row 2 of partition 0"),
        (pa.array([[1.0], None]), "A value is missing in column 'x', in row 2 of partition 0"),
        (pa.array([None, None]), "Column 'x' is of type null"),
        (pa.array([{"a": 1}]), "Column 'x' is of type struct"),
        (pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())), "Column 'x' is of type map"),
        (pa.array([1]).cast(pa.decimal128(21, 2)), "Column 'x' is of type decimal128"),
    ],
)
def test_what_is_said_about_a_column_that_cannot_be_used(tmp_path: Path, column: Any, message: str) -> None:
    error = error_of(tmp_path, pa.table({"x": column}))
    assert message in error.message
    assert error.why
    assert error.hint
    assert list(tmp_path.iterdir()) == []


def test_dates_bytes_and_categories(tmp_path: Path) -> None:
    import datetime

    day = datetime.date(2024, 2, 29)
    table = pa.table({"d": [day], "b": [b"x"], "c": pa.array(["u"]).dictionary_encode()})
    batch = as_source(shards_of(tmp_path, table)).fetch(np.array([0]))
    assert (batch["d"], batch["b"], batch["c"]) == ([day], [b"x"], ["u"])


def test_lists_of_different_lengths_stay_lists(tmp_path: Path) -> None:
    shards = shards_of(tmp_path, pa.table({"x": [[1], [1, 2]]}), pa.table({"x": [[3]]}))
    assert as_source(shards).fetch(np.array([2, 1]))["x"] == [[3], [1, 2]]


def test_partitions_that_differ_are_refused(tmp_path: Path) -> None:
    error = error_of(tmp_path, pa.table({"x": [1]}), pa.table({"x": ["a"]}))
    assert error.message == "Column 'x' is not the same in all partitions: int64 in one, string in another."


def test_no_rows(tmp_path: Path) -> None:
    assert "empty" in error_of(tmp_path, table_of(0)).message
    assert "empty" in error_of(tmp_path).message


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    error = error_of(tmp_path / "file" / "below", table_of(1))
    assert "cannot write to" in error.message
    assert "`dir=`" in error.hint
    report = msgspec.json.decode(write_shard([table_of(1)], Order(f"{tmp_path}/file/x", "a", None), 0), type=Report)
    assert report.problem is not None
    assert "cannot write to" in report.problem[0]


def test_a_wrong_dtype(tmp_path: Path) -> None:
    assert error_of(tmp_path, table_of(1), dtype="int8").message == "dtype is 'int8'."


def opening_error(shards: frames.Shards) -> UserError:
    with pytest.raises(UserError) as caught:
        as_source(shards)
    return caught.value


def test_a_shard_that_is_gone_or_changed_is_named(tmp_path: Path) -> None:
    shards = shards_of(tmp_path, table_of(2), table_of(2))
    path = Path(shards.shards[1].path)
    path.write_bytes(path.read_bytes()[:-1])
    assert opening_error(shards).message == f"Shard 1 of 2, {path}, is not the file that was written."
    path.write_bytes(bytes(shards.shards[1].num_bytes))
    assert opening_error(shards).message == f"Shard 1 of 2, {path}, cannot be read."
    path.unlink()
    assert opening_error(shards).message == f"Shard 1 of 2, {path}, is gone."


def test_a_shard_on_another_node_is_named_with_both(tmp_path: Path) -> None:
    from dataclasses import replace

    shards = shards_of(tmp_path, table_of(2))
    far = replace(shards, shards=(replace(shards.shards[0], path="/nowhere/a.arrow", node="far"),))
    error = opening_error(far)
    assert "Shard 0 of 1, /nowhere/a.arrow, lies on node far, and this is node" in error.message
    assert "a folder that all nodes share" in error.hint


def test_a_folder_without_shards(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="There are no shards in"):
        frames.open_shards(tmp_path)
    (tmp_path / "shards.json").write_text('{"shards": 1}')
    with pytest.raises(UserError, match="cannot be read"):
        frames.open_shards(tmp_path)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (["x", "z"], "There is no column 'z'."),
        ([], "There are no columns."),
        (["x", "x"], "Two columns are called 'x'."),
    ],
)
def test_columns_that_cannot_be_chosen(wanted: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        frames_spark.check_columns(wanted, ["x", "y"])
    assert caught.value.message == message


@pytest.mark.parametrize(
    ("package", "function", "extra"),
    [
        ("ray.data", frames_ray.from_ray, "ray"),
        ("dask.dataframe", frames_dask.from_dask, "dask"),
        ("pyspark", frames_spark.from_spark, "spark"),
    ],
)
def test_without_the_engine_the_command_to_install_it_is_said(
    package: str, function: Any, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError) as caught:
        function(object())
    assert caught.value.hint == f"run `pip install 'shoal[{extra}]'`"


def test_a_collection_is_told_how_to_become_shards() -> None:
    class DataFrame:
        columns = ("x",)

    DataFrame.__module__ = "pyspark.sql.classic.dataframe"
    with pytest.raises(UserError) as caught:
        as_source(DataFrame())
    assert "`shoal.data.frames.from_spark(...)`" in caught.value.hint


def test_what_executors_import_is_light() -> None:
    import subprocess

    code = "import sys, shoal.data.frames\nassert not {'torch', 'numpy', 'pyarrow', 'ray', 'dask'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
