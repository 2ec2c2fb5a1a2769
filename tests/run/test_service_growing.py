"""The service on a Ray cluster that its autoscaler makes larger: what it asks for, and for how long."""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from launching import Box, box

from shoal.testing import rigs
from shoal.testing.rigs.rays import RayCluster, growing_cluster

pytestmark = [rigs.needs("ray"), pytest.mark.slow, pytest.mark.timeout(900)]
__all__ = ["box"]

SETTINGS = """
ray = "{address}"

[grows.node]
cores = 2
most = 2
"""
# What the cluster was asked for. A driver would count as use of its node.
LOOK = """
import json, sys
from shoal.engine.ray import import_ray
import_ray()
from ray._raylet import GcsClient
print((GcsClient(address=sys.argv[1]).internal_kv_get(b"autoscaler_resource_request", None) or b"[]").decode())
"""


def asked(box: Box, cluster: RayCluster) -> list[dict[str, float]]:
    done = box.execute(sys.executable, "-c", LOOK, cluster.address)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def queue(box: Box, *args: str) -> dict[str, Any]:
    done = box.run("queue", *args, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def submit(box: Box, *args: str) -> str:
    done = box.run("submit", *args, "--json", "wait.py")
    assert done.returncode == 0, done.stderr
    return str(json.loads(done.stdout)["jobs"][0])


def wait_until(condition: Callable[[], bool], seconds: float = 240.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.5)


def test_the_queue_has_the_cluster_grow_and_asks_for_nothing_when_that_is_done(box: Box) -> None:
    box.write("wait.py", "import os, time\nwhile not os.path.exists(os.environ['GO']):\n    time.sleep(0.1)\n")
    go = box.folder / "go"
    with growing_cluster(1, 2, most_nodes=0, has_addresses=True) as cluster:
        box.env |= cluster.env
        box.home.mkdir(exist_ok=True)
        settings = SETTINGS.format(address=cluster.address)
        (box.home / "service.toml").write_text(settings)
        assert box.run("up", "--port", "0", "--json").returncode == 0
        try:
            wait_until(lambda: len(json.loads(box.run("nodes", "--json").stdout)["nodes"]) == 1)
            # Of two workers with two cores each none fits on what is there; nor do three on all that may come.
            refused = box.run("submit", "-n", "3", "--cores", "2", "wait.py")
            assert refused.returncode == 2
            assert "has room for 2 of that size" in refused.stderr
            first = submit(box, "-n", "2", "--cores", "2", "--env", f"GO={go}")
            wait_until(
                lambda: "asked the cluster for 2 more nodes of 'node' (2 cores)" in queue(box, first)["why"], 30
            )
            wait_until(lambda: asked(box, cluster) == [{"CPU": 1.0}, {"CPU": 2.0}, {"CPU": 2.0}], 30)
            (box.home / "service.toml").write_text(settings.partition("[grows")[0])
            wait_until(lambda: asked(box, cluster) == [], 30)
            (box.home / "service.toml").write_text(settings)
            wait_until(lambda: len(asked(box, cluster)) == 3, 30)
            box.run("cancel", first)
            wait_until(lambda: asked(box, cluster) == [], 30)
            second = submit(box, "-n", "2", "--cores", "2", "--env", f"GO={go}")
            cluster.grow_to(2)
            wait_until(lambda: queue(box, second)["state"] == "running")
            assert len(queue(box, second)["nodes"]) == 2
            wait_until(lambda: asked(box, cluster) == [], 60)
            # Those who are told to go while machines are asked for take that back.
            third = submit(box, "-n", "1", "--cores", "2", "--env", f"GO={go}")
            go.touch()
            wait_until(lambda: {queue(box, each)["state"] for each in (second, third)} == {"finished"})
        finally:
            box.run("down")
        assert asked(box, cluster) == []
