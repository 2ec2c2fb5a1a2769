"""One script, whoever starts its workers: the same losses to 1e-6, and in exact mode the same bits."""

import json
import re
import subprocess
import sys
from typing import Any

import pytest
from launching import Box, box, small_cluster

from shoal.testing import rigs

__all__ = ["box"]

pytestmark = pytest.mark.timeout(1200)
SECONDS = 600.0
SPARK_MASTER = "local-cluster[2,1,1024]"
WAYS = {
    "here": ("-n", "2"),
    "mpi": ("--engine", "mpi", "--hosts", "localhost:2"),
    "ray": ("-n", "2", "--engine", "ray", "--address", "local"),
    "spark": ("-n", "2", "--engine", "spark", "--master", SPARK_MASTER),
}

TRAIN = """
    import json
    import torch
    import torch.nn.functional as F
    import shoal

    torch.manual_seed(0)
    images = torch.randn(256, 1, 8, 8)
    labels = images.mean((1, 2)).argmax(1)

    def train(exact):
        torch.manual_seed(1)
        model = torch.nn.Sequential(
            torch.nn.Conv2d(1, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Dropout(0.1),
            torch.nn.Flatten(), torch.nn.Linear(8 * 36, 8),
        )
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

        def loss(model, batch):
            return F.cross_entropy(model(batch[0]), batch[1])

        with shoal.Trainer(model, loss, optimizer, (images, labels), batch_size=32, exact=exact) as trainer:
            losses = [float(trainer.step(batch)) for _ in range(2) for batch in trainer]
            return losses, trainer.digest(), trainer.rank, trainer.world_size

    losses, _, rank, size = train(False)
    exact, digest, *_ = train(True)
    if rank == 0:
        print("told", json.dumps({"size": size, "losses": losses, "exact": exact, "digest": digest}))
"""


def told(done: "subprocess.CompletedProcess[str]") -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    found = re.search(r"told (\{.*\})", done.stdout)
    assert found, done.stdout
    return dict(json.loads(found[1]))


def check_same(box: Box, *ways: str) -> None:
    box.write("train.py", TRAIN)
    if "spark" in ways:
        small_cluster(box)
    # The cores of a node are shared out among its workers, and how many threads add up is part of the numbers.
    alone = told(box.execute(sys.executable, "train.py", env={**box.env, "OMP_NUM_THREADS": "1"}))
    assert (alone["size"], len(alone["losses"])) == (1, 16)
    assert alone["losses"][-1] < 0.9 * alone["losses"][0]
    for way in ways:
        args = ("run", *WAYS[way], "--threads", "1", "--name", way, "train.py")
        found = told(box.run(*args, timeout=SECONDS))
        assert found["size"] == 2, way
        assert found["losses"] == pytest.approx(alone["losses"], abs=1e-6), way
        assert found["exact"] == alone["exact"], way
        assert found["digest"] == alone["digest"], way


@rigs.needs("mpirun")
def test_two_engines_come_to_the_same(box: Box) -> None:
    check_same(box, "here", "mpi")


@pytest.mark.slow
@rigs.needs("mpirun", "ray", "pyspark", "java")
def test_all_engines_come_to_the_same(box: Box) -> None:
    check_same(box, *WAYS)
