"""From a Spark DataFrame to the first step of training on 2 workers: shards, or Parquet files under TorchDistributor.

10 million rows of 8 floats and a label, computed in 8 partitions by a session that is there already. The clock runs
from the DataFrame until the slower worker has finished its first optimizer step, over 2 x 512 shuffled rows. Workers
of shoal are in tasks of the session (`engine="spark"`), and once more beside the driver; those of TorchDistributor
are beside the driver (`local_mode=True`), which is less to do. It writes Parquet as Spark does by default; its
workers read with pyarrow and gather batches by a DataLoader whose sampler gives whole batches.
`own files`: each worker reads
and shuffles half of the files, the least a worker can do. `all rows`: each worker reads all of them and a
DistributedSampler shuffles across files, as shoal does.
"""

import importlib.util
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import check, ratio, say, summarize

WORKERS, PARTITIONS, FEATURES, BATCH = 2, 8, 8, 512
GOAL = "≥ 2"
SHOAL, SHOAL_HERE = "shoal, in tasks of Spark", "shoal, beside the driver"
OWN, ALL = "TorchDistributor, own files", "TorchDistributor, all rows"
WORKER = str(Path(__file__).with_name("spark_data_worker.py"))

Way = Callable[[Any, str], tuple[float, float]]
"""Takes a DataFrame and an empty folder; returns when all was written, and when the slower worker had its step."""
Pairs = dict[str, list[tuple[float, float]]]


def main(rounds: int, is_quick: bool = False) -> dict[str, Any]:
    if not is_possible():
        raise SystemExit("spark_data needs pyspark and Java: `pip install 'shoal[spark]'`")
    measured = measure_all(rounds, is_quick)
    totals = totals_of(measured)
    return {
        "rows": rows_of(measured),
        "checks": checks_of(measured),
        "notes": [
            "median of the rounds (quartiles). From there: starting 2 workers, importing torch, opening the data,",
            "gathering the first batch, and the step. All contenders start their workers anew.",
        ],
        "samples_seconds": totals,
        "samples_seconds_writing": {name: [write for write, _ in pairs] for name, pairs in measured.items()},
    }


def is_possible() -> bool:
    return importlib.util.find_spec("pyspark") is not None and shutil.which("java") is not None


def measure_all(rounds: int, is_quick: bool) -> Pairs:
    """Seconds of writing, and from there to the first step, by way."""
    ways: dict[str, Way] = {
        SHOAL: partial(by_shoal, "spark"),
        SHOAL_HERE: partial(by_shoal, "local"),
        OWN: partial(by_distributor, "own"),
        ALL: partial(by_distributor, "all"),
    }
    if is_quick:
        ways = {name: ways[name] for name in (SHOAL, OWN)}
    measured: Pairs = {name: [] for name in ways}
    with spark_session() as spark:
        rows = make_rows(spark, 20_000 if is_quick else 10_000_000)
        if not is_quick:
            for way in ways.values():  # Spark has compiled its code, and files of packages are in memory
                measure(way, rows)
        for number in range(rounds):
            for name, way in ways.items():
                say(f"Spark: round {number + 1} of {rounds}: {name}")
                measured[name].append(measure(way, rows))
    return measured


def totals_of(measured: Pairs) -> dict[str, list[float]]:
    return {name: [write + start for write, start in pairs] for name, pairs in measured.items()}


def rows_of(measured: Pairs) -> list[dict[str, Any]]:
    totals = totals_of(measured)
    return [
        {
            "way": name,
            "first step s": summarize(totals[name]),
            "writing s": summarize([write for write, _ in pairs]),
            "from there s": summarize([start for _, start in pairs]),
            f"/ {SHOAL}": ratio(totals[name], totals[SHOAL]) if name != SHOAL else "–",
        }
        for name, pairs in measured.items()
    ]


def checks_of(measured: Pairs) -> list[dict[str, Any]]:
    totals = totals_of(measured)
    peers = [name for name in measured if name in (OWN, ALL)]
    return [check(f"{name} / {SHOAL}", ratio(totals[name], totals[SHOAL]), GOAL) for name in peers]


@contextmanager
def spark_session() -> Iterator[Any]:
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # as shoal sets it: the host's own name may lead nowhere
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(f"local[{WORKERS}]").config("spark.driver.memory", "3g")
    builder = builder.config("spark.driver.host", "127.0.0.1").config("spark.ui.enabled", "false")
    spark = builder.config("spark.ui.showConsoleProgress", "false").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    try:
        yield spark
    finally:
        spark.stop()


def make_rows(spark: Any, num_rows: int) -> Any:
    from pyspark.sql import functions

    features = [functions.rand(seed).cast("float").alias(f"x{seed}") for seed in range(FEATURES)]
    label = (functions.col("id") % 2).cast("int").alias("label")
    return spark.range(0, num_rows, 1, PARTITIONS).select(*features, label)


def measure(way: Way, rows: Any) -> tuple[float, float]:
    """Seconds of writing, and from there to the first step."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.time()
        written, stepped = way(rows, folder)
        return written - began, stepped - written


def by_shoal(engine: str, rows: Any, folder: str) -> tuple[float, float]:
    import shoal
    from shoal.data import frames

    shards = frames.from_spark(rows, dir=os.path.join(folder, "rows"))
    written = time.time()
    run_dir = os.path.join(folder, "run")
    return written, max(shoal.launch(train, WORKERS, (shards,), run_dir=run_dir, is_quiet=True, engine=engine))


def train(shards: Any) -> float:
    """When this worker had finished its first step."""
    import torch

    import shoal

    def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        inputs = torch.stack([batch[f"x{number}"] for number in range(FEATURES)], 1)
        return (model(inputs).squeeze(1) - batch["label"]).square().mean()

    model = torch.nn.Linear(FEATURES, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with shoal.Trainer(model, loss, optimizer, shards, batch_size=WORKERS * BATCH) as trainer:
        for batch in trainer:
            trainer.step(batch)
            return time.time()
    raise AssertionError("there was no batch")


def by_distributor(kind: str, rows: Any, folder: str) -> tuple[float, float]:
    from pyspark.ml.torch.distributor import TorchDistributor

    files, stamps = os.path.join(folder, "rows"), os.path.join(folder, "stamps")
    os.mkdir(stamps)
    rows.write.parquet(files)
    written = time.time()
    with redirect_stdout(sys.stderr):
        distributor = TorchDistributor(num_processes=WORKERS, local_mode=True, use_gpu=False)
        distributor.run(WORKER, kind, files, stamps)
    found = [float(path.read_text()) for path in Path(stamps).iterdir()]
    if len(found) != WORKERS:
        raise RuntimeError(f"{len(found)} of {WORKERS} workers took a step")
    return written, max(found)
