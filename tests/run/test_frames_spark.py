"""Real Spark DataFrames become shards, and training on them is training on the same rows from anywhere else."""

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import frames_training
import numpy as np
import pytest
from frames_training import NUM_ROWS

import shoal
from shoal.data import frames
from shoal.data.sources import as_source
from shoal.spec.errors import UserError
from shoal.testing.rigs.machine import LACKS
from tests.webhdfs import webhdfs_server

pytest.importorskip("pyspark")
if not shutil.which("java"):
    pytest.skip("this machine lacks Java", allow_module_level=True)

pytestmark = [
    pytest.mark.timeout(600),  # Spark is slow on a busy machine, above all at first
    pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:pyspark"),
]
CONF = {
    "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.LocalFileSystem",  # not the one that Hive puts before it
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.memory": "1g",
    "spark.sql.shuffle.partitions": "4",
    "spark.log.level": "OFF",
}
MAX_BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"


def compile_media_types(folder: Path) -> str:
    """What Hadoop's client of WebHDFS lacks in Spark's jars (docs/files.md), in a folder; none without a compiler."""
    import pyspark

    jars = Path(pyspark.__file__).with_name("jars")
    if (javac := shutil.which("javac")) is None:
        return ""
    source = Path(__file__).with_name("MediaTypes.java")
    subprocess.run([javac, "-cp", f"{jars}/*", "-d", str(folder), str(source)], check=True, timeout=100)
    services = folder / "META-INF" / "services"
    services.mkdir(parents=True)
    (services / "org.apache.hadoop.shaded.javax.ws.rs.ext.RuntimeDelegate").write_text("MediaTypes\n")
    return str(folder)


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One session for all tests: starting one takes ten seconds."""
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    folder = tmp_path_factory.mktemp("spark")
    more = compile_media_types(tmp_path_factory.mktemp("java"))
    builder = SparkSession.builder.master("local[2]").config("spark.local.dir", str(folder))
    builder = builder.config("spark.sql.warehouse.dir", str(folder / "tables"))
    for name, value in {**CONF, "spark.driver.extraClassPath": more}.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    yield session
    gateway = session.sparkContext._gateway
    session.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(30)


@pytest.fixture
def rows(spark: Any) -> Any:
    return spark.range(0, NUM_ROWS, 1, 5).selectExpr(
        "id", "cast(id * 0.25 as double) as x", "cast(id % 7 as float) as y", "cast(id % 2 as int) as label"
    )


def batch_of(shards: frames.Shards, *ids: int) -> Any:
    return as_source(shards).fetch(np.array(ids))


def test_training_is_the_same_as_on_files_and_tensors(rows: Any, tmp_path: Path) -> None:
    shards = frames.from_spark(rows, dir=tmp_path / "rows")
    assert [shard.num_rows for shard in shards.shards] == [9, 10, 9, 10, 10]
    assert shards.schema == {"id": "int64", "x": "double", "y": "float", "label": "int32"}
    frames_training.check_sameness(shards, tmp_path)


def test_workers_of_a_run_are_given_shards(rows: Any, tmp_path: Path) -> None:
    shards = frames.from_spark(rows, dir=tmp_path / "rows")
    two = shoal.launch(frames_training.digest_of, 2, (shards,), run_dir=str(tmp_path / "run"), is_quiet=True)
    assert two == [frames_training.digest_of(frames_training.arrays())] * 2


def test_the_session_keeps_its_settings(spark: Any, rows: Any, tmp_path: Path) -> None:
    before = spark.conf.get(MAX_BYTES)
    frames.from_spark(rows, dir=tmp_path)
    assert spark.conf.get(MAX_BYTES, None) is None
    spark.conf.set(MAX_BYTES, "1m")
    frames.from_spark(rows, dir=tmp_path, is_fresh=True)
    assert spark.conf.get(MAX_BYTES) in ("1m", "1048576b")
    spark.conf.unset(MAX_BYTES)
    assert spark.conf.get(MAX_BYTES) == before


def test_columns_and_types(spark: Any, tmp_path: Path) -> None:
    from pyspark.ml.linalg import Vectors

    frame = spark.createDataFrame(
        [(Vectors.dense([1.0, 2.0]), [1, 2, 3], "a", True), (Vectors.sparse(2, [0], [3.0]), [4, 5, 6], None, False)],
        ["v", "l", "a text.", "b"],
    ).coalesce(1)
    shards = frames.from_spark(frame, columns=["a text.", "v", "l", "b"])
    batch = batch_of(shards, 1, 0)
    assert list(batch) == ["a text.", "v", "l", "b"]
    assert batch["v"].tolist() == [[3.0, 0.0], [1.0, 2.0]]
    assert batch["l"].tolist() == [[4, 5, 6], [1, 2, 3]]
    assert batch["a text."] == [None, "a"]
    assert batch["b"].tolist() == [False, True]
    shutil.rmtree(shards.folder)


def test_the_same_plan_is_written_once(spark: Any, rows: Any, tmp_path: Path) -> None:
    shards = frames.from_spark(rows, dir=tmp_path / "cache")
    assert frames.from_spark(rows, dir=tmp_path / "cache") == shards
    assert frames.from_spark(rows, dir=tmp_path / "cache", is_fresh=True).shards != shards.shards
    assert frames.from_spark(rows, columns=["x"], dir=tmp_path / "cache").folder != shards.folder
    assert frames.from_spark(rows.withColumnRenamed("x", "z"), dir=tmp_path / "cache").folder != shards.folder
    assert frames.from_spark(rows, dir=tmp_path / "cache", dtype="float32").folder != shards.folder


@pytest.mark.slow
def test_files_that_have_changed_are_written_anew(spark: Any, rows: Any, tmp_path: Path) -> None:
    files, cache = str(tmp_path / "files"), tmp_path / "cache"
    rows.write.parquet(files)
    first = frames.from_spark(spark.read.parquet(files), dir=cache)
    assert frames.from_spark(spark.read.parquet(files), dir=cache) == first
    rows.limit(7).write.mode("overwrite").parquet(files)
    assert frames.from_spark(spark.read.parquet(files), dir=cache).num_rows == 7


def test_rows_that_the_plan_does_not_tell_are_written_each_time(spark: Any, tmp_path: Path) -> None:
    frame = spark.sparkContext.parallelize([(1,), (2,)], 1).toDF("x long")
    first, second = (frames.from_spark(frame, dir=tmp_path) for _ in range(2))
    assert first.folder != second.folder


def refused(frame: Any, **how: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        frames.from_spark(frame, **how)
    assert caught.value.why
    assert caught.value.hint
    return caught.value


def test_what_is_said_about_frames_that_cannot_be_used(spark: Any, rows: Any, tmp_path: Path) -> None:
    assert "is empty" in refused(rows.where("id < 0"), dir=tmp_path).message
    assert refused(rows, columns=["x", "z"], dir=tmp_path).message == "There is no column 'z'."
    holes = rows.selectExpr("id", "nullif(x, 1.0) as x")
    assert refused(holes, dir=tmp_path).message == "A value is missing in column 'x', in row 5 of partition 0."
    prices = rows.selectExpr("cast(x as decimal(10, 2)) as price")
    error = refused(prices, dir=tmp_path)
    assert error.message == "Column 'price' is of type decimal(10,2), which cannot be trained on."
    assert "cast('double')" in error.hint
    assert "Column 'm' is of type map" in refused(rows.selectExpr("map('a', id) as m"), dir=tmp_path).message
    assert "Column 's' is of type struct" in refused(rows.selectExpr("struct(x, y) as s"), dir=tmp_path).message
    assert "is not a DataFrame of Spark" in refused([1, 2]).message
    (tmp_path / "file").touch()
    assert "cannot write to" in refused(rows, dir=tmp_path / "file").message
    broken = rows.selectExpr("assert_true(id < 20, 'too many') as a", "id").select("id", "a")
    assert refused(broken.selectExpr("coalesce(a, id) as id"), dir=tmp_path).message == (
        "Spark could not write the rows."
    )
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_frame_given_to_the_trainer_is_told_what_to_do(rows: Any) -> None:
    with pytest.raises(UserError, match="a DataFrame of pyspark") as caught:
        as_source(rows)
    assert "from_spark" in caught.value.hint


CLUSTER = """
    import sys
    from pathlib import Path
    from pyspark.sql import SparkSession
    from shoal.data import frames

    builder = SparkSession.builder.master("local-cluster[2,1,1024]")
    for name, value in {conf}.items():
        builder = builder.config(name, value)
    builder = builder.config("spark.task.maxFailures", "3").config("spark.local.dir", sys.argv[1])
    spark = builder.getOrCreate()
    marks = Path(sys.argv[1])

    def sometimes(batches):
        from pyspark import TaskContext
        number = TaskContext.get().partitionId()
        yield from batches
        if number % 2 and not (marks / str(number)).exists():
            (marks / str(number)).touch()
            raise RuntimeError("lost after all rows")

    rows = spark.range(0, {num_rows}, 1, 5).selectExpr(
        "id", "cast(id * 0.25 as double) as x", "cast(id % 7 as float) as y", "cast(id % 2 as int) as label"
    )
    shards = frames.from_spark(rows.mapInArrow(sometimes, rows.schema), dir=sys.argv[2])
    print("FOLDER", shards.folder, flush=True)
    spark.stop()
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_executors_of_a_cluster_whose_tasks_fail_write_every_row_once(tmp_path: Path) -> None:
    """The session is gone when the shards are read; tasks were lost after they had seen all rows."""
    script = tmp_path / "cluster.py"
    script.write_text(textwrap.dedent(CLUSTER).format(conf=CONF, num_rows=NUM_ROWS))
    (tmp_path / "marks").mkdir()
    command = [sys.executable, "-W", "ignore", str(script), str(tmp_path / "marks"), str(tmp_path / "rows")]
    env = {**os.environ, "PYSPARK_PYTHON": sys.executable}
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    folder = next(line.split()[1] for line in done.stdout.splitlines() if line.startswith("FOLDER"))
    shards = frames.open_shards(folder)
    assert len(list((tmp_path / "marks").glob("[0-9]"))) == 2
    assert len(list(Path(folder).iterdir())) == len(shards.shards) + 1
    frames_training.check_sameness(shards, tmp_path)


# Hadoop's file systems: the client in Spark's jars, asked by Spark itself.


@pytest.fixture(params=["webhdfs", "file"])
def hadoop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, str, set[str]]]:
    """A place in a file system of Hadoop's, the class that is to speak for it, and what a server was asked."""
    if request.param == "file":
        yield tmp_path.as_uri(), "org.apache.hadoop.fs.LocalFileSystem", set()
        return
    if not shutil.which("javac"):
        pytest.skip(f"{LACKS} javac")
    with webhdfs_server() as server:
        yield server.url, "org.apache.hadoop.hdfs.web.WebHdfsFileSystem", server.names.asked


def file_system(spark: Any, place: str) -> tuple[Any, Any]:
    """Hadoop's client for a place, and how to name a path to it."""
    hadoop = spark.sparkContext._jvm.org.apache.hadoop.fs
    path_of = lambda name: hadoop.Path(f"{place}/{name}")  # noqa: E731
    return path_of("").getFileSystem(spark.sparkContext._jsc.hadoopConfiguration()), path_of


@pytest.mark.slow
def test_spark_reads_and_writes_through_hadoop(spark: Any, rows: Any, hadoop: Any, tmp_path: Path) -> None:
    place, kind, asked = hadoop
    client, path_of = file_system(spark, place)
    assert client.getClass().getName() == kind
    rows.write.parquet(f"{place}/rows")
    rows.write.mode("overwrite").partitionBy("label").parquet(f"{place}/parts")
    rows.limit(3).write.mode("overwrite").partitionBy("label").parquet(f"{place}/parts")
    rows.coalesce(1).write.csv(f"{place}/text", header=True)
    written = sorted(status.getPath().getName() for status in client.listStatus(path_of("rows")))
    assert written[0] == "_SUCCESS"
    assert len(written) == 6, "a file for each partition, and nothing of what they were before they were done"
    assert client.exists(path_of("parts/label=1"))
    read = spark.read.parquet(f"{place}/rows")
    assert sorted(read.collect()) == rows.collect()
    assert sorted(row["id"] for row in spark.read.parquet(f"{place}/parts").collect()) == [0, 1, 2]
    text = spark.read.csv(f"{place}/text", "id long, x double, y float, label int", header=True)
    assert text.collect() == rows.collect()
    shards = frames.from_spark(read.orderBy("id").coalesce(1), dir=tmp_path / "shards")
    frames_training.check_sameness(shards, tmp_path)
    if asked:
        data = {"CREATE", "DATA CREATE", "OPEN", "DATA OPEN"}
        assert asked >= data | {"GETFILESTATUS", "LISTSTATUS", "MKDIRS", "RENAME", "DELETE"}


@pytest.mark.skipif(shutil.which("javac") is None, reason=f"{LACKS} javac")
def test_tables_that_spark_wrote_are_data_by_url(spark: Any, rows: Any, tmp_path: Path) -> None:
    """Spark's client writes them, and ours, of fsspec, reads them."""
    pytest.importorskip("fsspec")
    with webhdfs_server() as server:
        rows.coalesce(1).write.parquet(f"{server.url}/rows")
        assert spark.read.parquet(f"{server.url}/rows").collect() == rows.collect()
        ours, _ = frames_training.trained(f"{server.url}/rows/*.parquet", str(tmp_path / "run-0"))
    assert ours == frames_training.trained(frames_training.arrays(), str(tmp_path / "run-1"))[0]


def test_hadoop_is_answered_as_it_is_by_its_own_file_system(spark: Any, hadoop: Any) -> None:
    """The calls that committers make, with the answers that Hadoop promises for every file system."""
    from py4j.protocol import Py4JJavaError

    place, _, _ = hadoop
    client, path_of = file_system(spark, place)

    def write(name: str, text: bytes, *, may_replace: bool = False) -> None:
        stream = client.create(path_of(name), may_replace)
        stream.write(text)
        stream.close()

    def refused(act: Any, *arguments: Any) -> str:
        with pytest.raises(Py4JJavaError) as caught:
            act(*arguments)
        return str(caught.value.java_exception.getClass().getSimpleName())

    write("out/_temporary/0/a b%2F", b"one")
    assert client.mkdirs(path_of("out/_temporary/1"))
    assert client.mkdirs(path_of("out/_temporary/1"))
    assert client.getFileStatus(path_of("out/_temporary/0/a b%2F")).getLen() == 3
    assert refused(write, "out/_temporary/0/a b%2F", b"two") == "FileAlreadyExistsException"
    write("out/_temporary/0/a b%2F", b"three", may_replace=True)
    assert client.rename(path_of("out/_temporary/0/a b%2F"), path_of("out/a"))
    assert not client.exists(path_of("out/_temporary/0/a b%2F"))
    stream = client.open(path_of("out/a"))
    stream.seek(2)
    assert [stream.read() for _ in range(4)] == [*b"ree", -1]
    stream.close()
    assert refused(client.delete, path_of("out"), False) in ("PathIsNotEmptyDirectoryException", "IOException")
    assert refused(client.getFileStatus, path_of("none")) == "FileNotFoundException"
    assert refused(client.listStatus, path_of("none")) == "FileNotFoundException"
    assert refused(client.open, path_of("none")) == "FileNotFoundException"
    assert not client.delete(path_of("none"), True)
    assert client.delete(path_of("out/_temporary"), True)
    listed = client.listStatus(path_of("out"))
    assert [(each.getPath().getName(), each.getLen(), each.isFile()) for each in listed] == [("a", 5, True)]
    assert client.getContentSummary(path_of("out")).getFileCount() == 1
