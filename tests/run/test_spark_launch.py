"""From a DataFrame to trained weights in one program: the executors of its session write rows and run workers."""

import json
import re
import sys

import pytest
from launching import Box, box, small_cluster

from shoal.testing import rigs

__all__ = ["box"]

pytestmark = [pytest.mark.timeout(1200), rigs.needs("pyspark", "java")]

PROGRAM = """
    import json
    import sys

    from pyspark.sql import SparkSession

    import shoal
    from shoal.data import frames


    def train(dataset, epochs):
        import psutil
        import torch

        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.05)

        def loss(model, batch):
            inputs = torch.stack([batch["x"], batch["y"]], 1).float()
            return (model(inputs).squeeze(1) - batch["label"].float()).square().mean()

        with shoal.Trainer(model, loss, optimizer, dataset, batch_size=32, exact=True) as trainer:
            trainer.fit(epochs=epochs)
            above = psutil.Process().parents()
            return {
                "weights": {name: value.tolist() for name, value in model.state_dict().items()},
                "metrics": trainer.evaluate(dataset),
                "digest": trainer.digest(),
                "world": [trainer.rank, trainer.world_size],
                "executor": [p.pid for p in above if "CoarseGrainedExecutorBackend" in " ".join(p.cmdline())],
            }


    builder = SparkSession.builder.master("local-cluster[2,1,1024]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.ui.showConsoleProgress", "false").config("spark.driver.host", "127.0.0.1")
    spark = builder.config("spark.sql.warehouse.dir", "tables").getOrCreate()
    rows = spark.range(0, 512, 1, 4).selectExpr(
        "cast(id % 16 as float) / 8 as x",
        "cast(id % 7 as float) / 4 as y",
        "cast(id % 16 + id % 7 as float) / 8 as label",
    )
    shards = frames.from_spark(rows, dir="rows", dtype="float32")
    found = shoal.launch(train, 2, (shards,), {"epochs": 3}, engine="spark", threads_per_worker=1, is_quiet=True)
    again = rows.count()
    here = shoal.launch(train, 1, (shards, 3), threads_per_worker=1, is_quiet=True)
    try:
        shoal.launch(lambda: 1 / 0, 2, engine="spark", is_quiet=True)
        failed = ""
    except shoal.WorkerError as error:
        failed = str(error)
    print("told", json.dumps({"spark": found, "here": here, "again": again, "failed": failed}))
    spark.stop()
"""


@pytest.mark.slow
def test_a_function_trains_where_the_executors_are_and_weights_come_back(box: Box) -> None:
    box.write("train.py", PROGRAM)
    small_cluster(box)
    box.env |= {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_DIRS": str(box.folder / "scratch")}
    done = box.execute(sys.executable, "train.py", timeout=1000)
    assert done.returncode == 0, done.stderr
    text = re.search(r"told (.*)", done.stdout)
    assert text, done.stdout
    told = json.loads(text[1])
    workers, (alone,) = told["spark"], told["here"]
    assert [worker["world"] for worker in workers] == [[0, 2], [1, 2]]
    executors = [worker["executor"] for worker in workers]
    assert all(len(pids) == 1 for pids in executors), "workers are not under executors"
    assert executors[0] != executors[1]
    for worker in workers:
        assert worker["weights"] == alone["weights"]
        assert worker["digest"] == alone["digest"]
        assert worker["metrics"] == pytest.approx(alone["metrics"], abs=1e-6)
    assert alone["executor"] == []
    assert told["again"] == 512, "the session goes on"
    assert "ZeroDivisionError" in told["failed"]
