"""Real Dask DataFrames become shards, computed in threads and by the processes of a cluster."""

from pathlib import Path
from typing import Any

import frames_training
import numpy as np
import pytest
from frames_training import NUM_ROWS

from shoal.data import frames
from shoal.data.sources import as_source
from shoal.spec.errors import UserError

dataframe = pytest.importorskip("dask.dataframe")
pandas = pytest.importorskip("pandas")


def frame_of(**columns: Any) -> Any:
    return dataframe.from_pandas(pandas.DataFrame(columns), npartitions=3, sort=False)


@pytest.fixture
def rows() -> Any:
    return frame_of(**{name: column.numpy() for name, column in frames_training.arrays().items()})


def test_training_is_the_same_as_on_files_and_tensors(rows: Any, tmp_path: Path) -> None:
    shards = frames.from_dask(rows, dir=tmp_path / "rows")
    assert [shard.num_rows for shard in shards.shards] == [NUM_ROWS // 3] * 3
    frames_training.check_sameness(shards, tmp_path)


def test_columns_and_types(tmp_path: Path) -> None:
    frame = frame_of(
        n=[0.5, float("nan"), 2.0],
        s=["a", None, "c"],
        c=pandas.Categorical(["u", "v", "u"]),
        t=pandas.to_datetime(["2024-01-01", "2024-01-02", "2024-01-03"]),
        k=pandas.array([1, 2, 3], dtype="Int32"),
    )
    batch = as_source(frames.from_dask(frame, columns=["k", "n", "s", "c", "t"], dir=tmp_path)).fetch(
        np.array([2, 1])
    )
    assert batch["k"].tolist() == [3, 2]
    assert batch["n"][0] == 2.0
    assert batch["n"].isnan().tolist() == [False, True], "not a number is a number here, and not missing"
    assert (batch["s"], batch["c"]) == (["c", None], ["u", "v"])
    assert [each.day for each in batch["t"]] == [3, 2]


def test_the_same_frame_is_written_once(rows: Any, tmp_path: Path) -> None:
    shards = frames.from_dask(rows, dir=tmp_path)
    assert frames.from_dask(rows, dir=tmp_path) == shards
    assert frames.from_dask(rows, dir=tmp_path, is_fresh=True).shards != shards.shards
    assert frames.from_dask(rows[rows.id < 7], dir=tmp_path).num_rows == 7


def refused(frame: Any, **how: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        frames.from_dask(frame, **how)
    assert caught.value.why
    assert caught.value.hint
    return caught.value


def test_what_is_said_about_frames_that_cannot_be_used(rows: Any, tmp_path: Path) -> None:
    assert "is empty" in refused(rows[rows.id < 0], dir=tmp_path).message
    assert refused(rows, columns=["z"], dir=tmp_path).message == "There is no column 'z'."
    assert "is not a DataFrame of Dask" in refused(rows.x).message
    holes = frame_of(k=pandas.array([1, None, 3], dtype="Int32"))
    assert "A value is missing in column 'k'" in refused(holes, dir=tmp_path).message
    spans = frame_of(p=pandas.to_timedelta([1, 2, 3], unit="s"))
    assert "Column 'p' is of type duration" in refused(spans, dir=tmp_path).message
    (tmp_path / "file").touch()
    assert "cannot write to" in refused(rows, dir=tmp_path / "file").message
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def fail(part: Any) -> Any:
    raise ValueError("it does not compute")


def test_a_failure_of_the_users_own_is_told(rows: Any, tmp_path: Path) -> None:
    error = refused(rows.map_partitions(fail, meta=rows._meta), dir=tmp_path)
    assert error.message == "Dask could not write the rows."
    assert "it does not compute" in error.why


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_processes_of_a_cluster_write(rows: Any, tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed")
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None, "scheduler_port": 0}
    with (
        distributed.LocalCluster(**options, local_directory=str(tmp_path / "dask")) as cluster,
        distributed.Client(cluster),
    ):
        shards = frames.from_dask(rows, dir=tmp_path / "rows")
    frames_training.check_sameness(shards, tmp_path)
