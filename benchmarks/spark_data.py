"""From a Spark DataFrame to the first training batch on 2 workers: shards, and Parquet files under TorchDistributor.

10 million rows of 8 floats and a label, computed in 8 partitions by a session that is there already. The clock runs
from the DataFrame until the slower worker holds its first batch of 512 shuffled rows. The peer writes Parquet as
Spark does by default; its workers read with pyarrow and gather batches by a DataLoader whose sampler gives whole
batches. `own files`: each worker reads and shuffles half of the files, the least a worker can do. `all rows`: each
worker reads all of them and a DistributedSampler shuffles across files, as shoal does.
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
SHOAL, OWN, ALL = "shoal", "TorchDistributor, own files", "TorchDistributor, all rows"
WORKER = str(Path(__file__).with_name("spark_data_worker.py"))

Way = Callable[[Any, str], tuple[float, float]]
"""Takes a DataFrame and an empty folder; returns when all was written, and when the slower worker had its batch."""


def main(rounds: int, is_quick: bool = False) -> dict[str, Any]:
    if not importlib.util.find_spec("pyspark") or not shutil.which("java"):
        raise SystemExit("spark_data needs pyspark and Java: `pip install 'shoal[spark]'`")
    ways: dict[str, Way] = {SHOAL: by_shoal, OWN: partial(by_distributor, "own"), ALL: partial(by_distributor, "all")}
    if is_quick:
        del ways[ALL]
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    with spark_session() as spark:
        rows = make_rows(spark, 20_000 if is_quick else 10_000_000)
        if not is_quick:
            for way in ways.values():  # Spark has compiled its code, and files of packages are in memory
                measure(way, rows)
        for number in range(rounds):
            for name, way in ways.items():
                say(f"round {number + 1} of {rounds}: {name}")
                measured[name].append(measure(way, rows))
    totals = {name: [write + start for write, start in pairs] for name, pairs in measured.items()}
    return {
        "rows": [
            {
                "way": name,
                "first batch s": summarize(totals[name]),
                "writing s": summarize([write for write, _ in pairs]),
                "from there s": summarize([start for _, start in pairs]),
                "/ shoal": ratio(totals[name], totals[SHOAL]) if name != SHOAL else "–",
            }
            for name, pairs in measured.items()
        ],
        "checks": [
            check(f"{name} / shoal", ratio(totals[name], totals[SHOAL]), GOAL) for name in ways if name != SHOAL
        ],
        "notes": [
            "median of the rounds (quartiles). From there: starting 2 workers, importing torch, opening the data and",
            "gathering the first batch. All contenders start their workers anew.",
        ],
        "samples_seconds": totals,
        "samples_seconds_writing": {name: [write for write, _ in pairs] for name, pairs in measured.items()},
    }


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
    """Seconds of writing, and from there to the first batch."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.time()
        written, batched = way(rows, folder)
        return written - began, batched - written


def by_shoal(rows: Any, folder: str) -> tuple[float, float]:
    import shoal
    from shoal.data import frames

    shards = frames.from_spark(rows, dir=os.path.join(folder, "rows"))
    written = time.time()
    run_dir = os.path.join(folder, "run")
    return written, max(shoal.launch(train, WORKERS, (shards,), run_dir=run_dir, is_quiet=True))


def train(shards: Any) -> float:
    """When this worker held its first batch; it is used for a step, too."""
    import torch

    import shoal

    def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        inputs = torch.stack([batch[f"x{number}"] for number in range(FEATURES)], 1)
        return (model(inputs).squeeze(1) - batch["label"]).square().mean()

    model = torch.nn.Linear(FEATURES, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with shoal.Trainer(model, loss, optimizer, shards, batch_size=WORKERS * BATCH) as trainer:
        for batch in trainer:
            when = time.time()
            trainer.step(batch)
            return when
    raise AssertionError("there was no batch")


def by_distributor(kind: str, rows: Any, folder: str) -> tuple[float, float]:
    from pyspark.ml.torch.distributor import TorchDistributor

    files, stamps = os.path.join(folder, "rows"), os.path.join(folder, "stamps")
    os.mkdir(stamps)
    rows.write.parquet(files)
    written = time.time()
    with redirect_stdout(sys.stderr):
        TorchDistributor(num_processes=WORKERS, local_mode=True, use_gpu=False).run(WORKER, kind, files, stamps)
    found = [float(path.read_text()) for path in Path(stamps).iterdir()]
    if len(found) != WORKERS:
        raise RuntimeError(f"{len(found)} of {WORKERS} workers had a batch")
    return written, max(found)
