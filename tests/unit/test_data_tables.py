"""Files of rows and Hugging Face datasets: what is read, what stays where it is, what is said when it cannot be."""

import re
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.data.sources import as_source
from shoal.data.stream import StreamSource
from shoal.spec.errors import UserError

pa = pytest.importorskip("pyarrow")
import pyarrow.feather as feather  # noqa: E402
import pyarrow.parquet as parquet  # noqa: E402

IDS = np.array([5, 0, 3, 5])


def some_table(size: int = 6, first: int = 0) -> Any:
    numbers = np.arange(first, first + size)
    return pa.table(
        {
            "i": numbers,
            "f": numbers / 2,
            "b": numbers % 2 == 0,
            "s": [f"row {number}" for number in numbers],
            "v": pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(numbers, 2).astype("f4")), 2),
            "w": [[float(number)] * 3 for number in numbers],
            "r": [list(range(number)) for number in numbers],
        }
    )


def check_batch(batch: dict[str, Any]) -> None:
    assert list(batch) == ["i", "f", "b", "s", "v", "w", "r"]
    assert (batch["i"].dtype, batch["i"].tolist()) == (torch.int64, [5, 0, 3, 5])
    assert (batch["f"].dtype, batch["f"].tolist()) == (torch.float32, [2.5, 0.0, 1.5, 2.5])
    assert batch["b"].tolist() == [False, True, False, False]
    assert batch["s"] == ["row 5", "row 0", "row 3", "row 5"]
    assert batch["v"].tolist() == [[5.0, 5.0], [0.0, 0.0], [3.0, 3.0], [5.0, 5.0]]
    assert batch["w"].shape == (4, 3)
    assert batch["r"][2] == [0, 1, 2]


def write(table: Any, path: Path) -> Path:
    if path.suffix == ".parquet":
        parquet.write_table(table, path, row_group_size=2)
    elif path.suffix == ".feather":
        feather.write_feather(table, path)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=max(2, len(table) // 5))
    return path


@pytest.mark.parametrize("suffix", [".parquet", ".feather", ".arrow"])
def test_one_file(tmp_path: Path, suffix: str) -> None:
    source = as_source(write(some_table(), tmp_path / f"a{suffix}"))
    assert len(source) == 6
    check_batch(source.fetch(IDS))


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_several_files_are_one_dataset(tmp_path: Path, suffix: str) -> None:
    paths = [write(some_table(4, first), tmp_path / f"{first}{suffix}") for first in (0, 4, 8)]
    by_list, by_pattern = as_source(paths), as_source(str(tmp_path / f"*{suffix}"))
    assert len(by_list) == len(by_pattern) == 12
    check_batch(by_list.fetch(IDS))
    check_batch(by_pattern.fetch(IDS))


def test_the_stream_format_of_arrow(tmp_path: Path) -> None:
    table = some_table()
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=4)
    check_batch(as_source(tmp_path / "a.arrow").fetch(IDS))


def test_an_arrow_file_is_mapped_not_loaded(tmp_path: Path) -> None:
    size = 4_000_000
    path = write(pa.table({"x": np.zeros(size)}), tmp_path / "big.arrow")
    before = pa.total_allocated_bytes()
    source = as_source(path)
    assert source.fetch(np.array([size - 1]))["x"].tolist() == [0.0]
    assert pa.total_allocated_bytes() - before < size


def test_csv(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y,name\n1,0.5,ann\n2,1.5,bob\n")
    (tmp_path / "b.csv").write_text("x,y,name\n3,2,cid\n")
    batch = as_source(str(tmp_path / "*.csv")).fetch(np.array([2, 0]))
    assert (batch["x"].tolist(), batch["y"].tolist(), batch["name"]) == ([3, 1], [2.0, 0.5], ["cid", "ann"])


def test_csv_without_names_loses_no_row(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("39, State-gov, 77516\n50, Private, 83311\n")
    source = as_source(tmp_path / "a.csv")
    assert len(source) == 2
    assert source.fetch(np.array([0]))["f2"].tolist() == [77516]


def test_collate_gets_rows(tmp_path: Path) -> None:
    rows = as_source(write(some_table(), tmp_path / "a.parquet"), collate=list).fetch(np.array([2, 1]))
    assert [(row["s"], int(row["i"]), row["r"]) for row in rows] == [("row 2", 2, [0, 1]), ("row 1", 1, [0])]


def error_of(dataset: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        as_source(dataset)
    return caught.value


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"x,y\n1,2\n3,\n", r"A value is missing in column 'y' of .*a\.csv, row 2"),
        ("a.csv", b"x,y\n1,2\n3,4\n5,oops\n6,7\n", r"a\.csv: column 'y' holds numbers, but row 3 has 'oops'"),
        ("a.csv", b"x,y\n1,2\n3\n", r"a\.csv cannot be read"),
        ("a.csv", b"", "there is no row in"),
        ("a.csv", b"x,y\n", "there is no row in"),
        ("a.csv", b"x,x\n1,2\n", r"Two columns of .*a\.csv are called 'x'"),
        ("a.csv", b"\xff\xfe\x00,\n1,2\n", r"a\.csv cannot be read"),
        ("a.parquet", b"PAR1 is not enough", r"a\.parquet cannot be read"),
        ("a.parquet", b"", r"a\.parquet cannot be read"),
        ("a.arrow", b"ARROW1\0\0garbage", r"a\.arrow cannot be read"),
        ("a.feather", b"", r"a\.feather cannot be read"),
        ("a.xlsx", b"PK", r"a\.xlsx is of a kind that cannot be read"),
    ],
)
def test_what_is_said_about_a_file_that_cannot_be_used(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    assert re.search(message, error_of(tmp_path / name).message)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    path = write(some_table(1000), tmp_path / "a.parquet")
    path.write_bytes(path.read_bytes()[:-100])
    assert f"{path} cannot be read" in error_of(path).message


def test_missing_files_are_named_with_where_they_were_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    error = error_of("data/train.parquet")
    assert error.message == "There is no file data/train.parquet"
    assert error.why == f"looked in {tmp_path}/data on {socket.gethostname()}"
    assert error_of(["*.csv"]).message == "No file matches *.csv"
    assert "is a folder" in error_of(tmp_path).message


def test_files_with_different_columns_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    (tmp_path / "b.csv").write_text("x,z\n1,2\n")
    assert "only one of them has 'y', 'z'" in error_of(str(tmp_path / "*.csv")).message


def test_without_pyarrow_the_command_to_install_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(some_table(), tmp_path / "a.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert error_of(path).hint == "run `pip install 'shoal[features]'`"


datasets = pytest.importorskip("datasets")


@pytest.fixture
def rows() -> Any:
    return datasets.Dataset.from_dict(
        {"x": [[float(n), 0.0] for n in range(8)], "y": list(range(8)), "s": [f"s{n}" for n in range(8)]}
    )


def test_hugging_face_columns(rows: Any) -> None:
    for dataset in (rows, rows.select(range(8)), datasets.concatenate_datasets([rows, rows])):
        batch = as_source(dataset).fetch(IDS)
        assert (batch["x"].dtype, batch["x"].shape) == (torch.float32, (4, 2))
        assert batch["y"].tolist() == [5, 0, 3, 5]
        assert batch["s"] == ["s5", "s0", "s3", "s5"]
    assert as_source(rows.filter(lambda row: row["y"] > 3)).fetch(np.array([0]))["y"].tolist() == [4]


def test_hugging_face_formats_and_collate(rows: Any) -> None:
    assert as_source(rows.with_format("torch")).fetch(IDS)["y"].tolist() == [5, 0, 3, 5]
    assert as_source(rows, collate=len).fetch(IDS) == 4
    augmented = rows.with_transform(lambda batch: {"y": [float(torch.rand(())) for _ in batch["y"]]})
    assert as_source(augmented).draws
    assert not as_source(rows).draws


def test_hugging_face_array_features_go_through_the_library() -> None:
    features = datasets.Features({"m": datasets.Array2D((2, 2), "float32")})
    dataset = datasets.Dataset.from_dict({"m": [np.full((2, 2), n) for n in range(4)]}, features=features)
    assert as_source(dataset).fetch(np.array([3]))["m"].tolist() == [[[3.0, 3.0], [3.0, 3.0]]]


def test_hugging_face_streams_and_splits(rows: Any) -> None:
    assert isinstance(as_source(rows.to_iterable_dataset()), StreamSource)
    assert "'train', 'test'" in error_of(datasets.DatasetDict({"train": rows, "test": rows})).message
    assert error_of(rows.select([])).message == "The dataset is empty."


def test_a_missing_value_is_named_by_its_sample() -> None:
    dataset = datasets.Dataset.from_dict({"y": [1, 2, None, 4]})
    with pytest.raises(UserError, match="A value is missing in column 'y' of sample 2"):
        as_source(dataset).fetch(np.array([3, 2]))
