"""Workers on chosen nodes of a real Ray cluster: who is where, and who goes on when a node dies or is given up."""

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import Box, box

from shoal.engine.requests import ask
from shoal.testing.rigs.rays import RayCluster, ray_cluster

pytest.importorskip("ray", reason="Ray is not installed: pip install 'shoal[ray]'")

pytestmark = pytest.mark.timeout(240)
__all__ = ["box"]

JOBS = str(Path(__file__).with_name("elastic_jobs.py"))
# Nodes of one machine are told apart by addresses of its own.
ANNA, BERT = ("--node-name", "anna"), ("--node-name", "bert", "--node-ip-address", "127.0.0.2")


class Run:
    """An elastic run on chosen nodes; its steps are slow until there is a hurry."""

    def __init__(self, box: Box, cluster: RayCluster, workers: str, nodes: str, *more: str) -> None:
        self.cluster, self.folder, self._hurry = cluster, box.folder / "run", box.folder / "hurry"
        pace = ("--env", "ELASTIC_PAUSE=0.3", "--env", f"ELASTIC_HURRY={self._hurry}")
        options = ("--address", cluster.address, "-o", f"engine.nodes={nodes}", *more, *pace)
        where = ("--log-dir", str(self.folder), "--threads", "1")
        self.launcher = box.start(
            "run", "-n", workers, *options, *where, JOBS, "long", env={**box.env, **cluster.env}
        )

    def events(self, kind: str) -> list[dict[str, Any]]:
        journal = self.folder / "journal.jsonl"
        lines = journal.read_text().splitlines(keepends=True) if journal.exists() else []
        return [event for line in lines if line.endswith("\n") and (event := json.loads(line))["kind"] == kind]

    def places(self) -> dict[int, int]:
        """How many members of the newest World are on which node, by the number of the node."""
        pids = {
            f"{event['rank']}.{event['data'].get('incarnation', 0)}": event["data"]["pid"]
            for event in self.events("worker_started")
        }
        worlds = self.events("world")
        nodes = [self.cluster.node_of(pids[member]) for member in worlds[-1]["data"]["members"]] if worlds else []
        return dict(Counter(self.cluster.nodes.index(node) for node in nodes))

    def wait_for(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 150
        while not condition():
            assert self.launcher.poll() is None, self.launcher.communicate()
            assert time.monotonic() < deadline, "it did not happen"
            time.sleep(0.05)

    def end(self) -> tuple[list[dict[str, Any]], str]:
        """What it came to, and what was told of it."""
        self._hurry.touch()
        shown, told = self.launcher.communicate(timeout=150)
        assert self.launcher.returncode == 0, told
        return [json.loads(line.split("ended ", 1)[1]) for line in shown.splitlines() if "ended {" in line], told


@pytest.fixture(scope="module")
def clean() -> dict[str, Any]:
    """What the job comes to in one process that nobody disturbs."""
    run = subprocess.run([sys.executable, JOBS, "long"], capture_output=True, text=True, timeout=100, check=True)
    return dict(json.loads(run.stdout.split("ended ", 1)[1].splitlines()[0]))


@pytest.fixture
def nodes() -> Iterator[RayCluster]:
    with ray_cluster() as cluster:
        cluster.add(2, *ANNA)
        cluster.add(2, *BERT)
        yield cluster


def test_a_node_dies_and_the_survivors_go_on(box: Box, nodes: RayCluster, clean: dict[str, Any]) -> None:
    run = Run(box, nodes, "1:2", "anna=1,bert=1")
    run.wait_for(lambda: run.events("checkpoint_saved"))
    assert run.places() == {0: 1, 1: 1}
    nodes.kill(nodes.nodes[1])
    run.wait_for(lambda: len(run.events("world")[-1]["data"]["members"]) == 1)
    endings, told = run.end()
    assert "lost 127.0.0.2" in told
    assert endings == [clean]


@pytest.mark.slow
def test_a_run_is_where_it_is_told_to_be(box: Box, nodes: RayCluster, clean: dict[str, Any]) -> None:
    """It grows and shrinks on the nodes that are named, whichever ranks are there, and never uses room elsewhere."""
    run = Run(box, nodes, "1:3", "anna=1", "-o", "engine.start=1")
    run.wait_for(lambda: run.events("checkpoint_saved"))
    assert run.places() == {0: 1}
    ask(str(run.folder), {"verb": "resize", "num_workers": 3, "nodes": {"anna": 1, "bert": 2}})
    run.wait_for(lambda: run.places() == {0: 1, 1: 2})
    # Rank 0, which began, is the one that goes.
    ask(str(run.folder), {"verb": "resize", "num_workers": 2, "nodes": {"127.0.0.2": 2}})
    run.wait_for(lambda: run.places() == {1: 2})
    ask(str(run.folder), {"verb": "resize", "num_workers": 3, "nodes": {"anna": 1, "bert": 2}})
    run.wait_for(lambda: run.places() == {0: 1, 1: 2})
    endings, _ = run.end()
    assert endings[-1] == clean
