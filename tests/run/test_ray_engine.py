"""`shoal run --engine ray` on a real cluster: the same results, causes and endings as on one machine."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import Box, box

from shoal.testing.rigs.rays import RayCluster, growing_cluster, ray_cluster

pytest.importorskip("ray", reason="Ray is not installed: pip install 'shoal[ray]'")

pytestmark = pytest.mark.timeout(240)
__all__ = ["box"]

JOBS = str(Path(__file__).with_name("elastic_jobs.py"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster(3) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def clean() -> dict[str, Any]:
    """What a job comes to in one process that nobody disturbs."""
    run = subprocess.run([sys.executable, JOBS, "long"], capture_output=True, text=True, timeout=100, check=True)
    return endings_in(run.stdout)[0]


def endings_in(text: str) -> list[dict[str, Any]]:
    return [json.loads(found) for found in re.findall(r"^(?:\[[\d,-]*\] )?ended (.*)$", text, re.MULTILINE)]


def events_in(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "journal.jsonl").read_text().splitlines() if (folder / "journal.jsonl").exists() else []
    return [event for line in lines if (event := json.loads(line))["kind"] == kind]


def wait_for(folder: Path, kind: str, count: int, launcher: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 200
    while len(events_in(folder, kind)) < count:
        assert launcher.poll() is None, launcher.communicate()
        assert time.monotonic() < deadline, f"{kind} did not come {count} times"
        time.sleep(0.05)


def on(box: Box, cluster: RayCluster) -> tuple[str, ...]:
    """An address says which engine it is."""
    box.env |= cluster.env
    return "--address", cluster.address


@pytest.mark.slow
def test_a_training_comes_to_the_same(box: Box, cluster: RayCluster, clean: dict[str, Any]) -> None:
    done = box.run("run", "-n", "3", *on(box, cluster), JOBS, "long")
    assert done.returncode == 0, done.stderr
    assert endings_in(done.stdout) == [clean]


def test_a_script_that_fails_is_told_as_anywhere(box: Box, cluster: RayCluster) -> None:
    box.write(
        "fail.py",
        "import os\nif os.environ['RANK'] == '1':\n    raise KeyError('lost it')\nimport time\ntime.sleep(60)",
    )
    done = box.run("run", "-n", "2", *on(box, cluster), "fail.py")
    assert done.returncode == 1
    assert "error: KeyError: 'lost it'\n   at: rank 1, fail.py:3" in done.stderr


def test_ctrl_c_ends_everything_on_the_cluster(box: Box, cluster: RayCluster) -> None:
    box.write("sleep.py", "import os, time\nopen(f\"up{os.environ['RANK']}\", 'w').close()\ntime.sleep(300)")
    launcher = box.start("run", "-n", "2", *on(box, cluster), "sleep.py")
    deadline = time.monotonic() + 60
    while not (box.folder / "up1").exists() or not (box.folder / "up0").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    launcher.send_signal(signal.SIGINT)
    told = launcher.communicate(timeout=60)[1]
    assert launcher.returncode == 130
    assert "stopped by Ctrl-C" in told
    done = box.run("run", "-n", "3", *on(box, cluster), "--quiet", "-m", "this")
    assert done.returncode == 0, "places on the cluster were not given back"


def test_a_function_is_called_on_the_cluster(box: Box, cluster: RayCluster) -> None:
    box.write(
        "call.py",
        f"""
        import os
        import shoal
        print(shoal.launch(lambda x: (x, os.environ["RANK"]), 2, [7], engine="ray", address="{cluster.address}"))
        """,
    )
    done = box.execute(sys.executable, "call.py", env={**box.env, **cluster.env})
    assert "[(7, '0'), (7, '1')]" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("-n", "64"), "has room for 3 workers, and 64 are needed"),
        (("-n", "1", "-o", "engine.cpus=50"), "each needs 50 CPU"),
        (("-n", "1", "-o", "engine.labels=zone=nowhere"), "on a machine with zone=nowhere"),
        (("-n", "2", "-o", "engine.placement=strict-spread"), "has room for 1 workers, and 2 are needed"),
        (("-n", "1", "-o", "engine.placement=heap"), "engine.placement is 'heap'"),
        (("-n", "1", "-o", "engine.cpus=many"), "engine.cpus is 'many'"),
    ],
)
@pytest.mark.slow
def test_what_the_cluster_does_not_have_is_told(box: Box, cluster: RayCluster, args: Any, words: str) -> None:
    box.write("nothing.py", "")
    done = box.run("run", *args, *on(box, cluster), "nothing.py")
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_too_many_workers_for_the_cluster(box: Box, cluster: RayCluster) -> None:
    test_what_the_cluster_does_not_have_is_told(
        box, cluster, ("-n", "64"), "has room for 3 workers, and 64 are needed"
    )


def test_no_cluster_at_the_address(box: Box) -> None:
    box.write("nothing.py", "")
    done = box.run("run", "--engine", "ray", "--address", "127.0.0.1:1", "nothing.py")
    assert done.returncode == 2
    assert "There is no Ray cluster at 127.0.0.1:1 for us." in done.stderr
    assert "Traceback" not in done.stderr


def test_ray_is_not_installed(box: Box) -> None:
    box.write("nothing.py", "")
    box.write("without/ray/__init__.py", "raise ImportError")
    done = box.run("run", "--engine", "ray", "nothing.py", env={**box.env, "PYTHONPATH": str(box.folder / "without")})
    assert done.returncode == 2
    assert "pip install 'shoal[ray]'" in done.stderr


@pytest.mark.slow
def test_a_node_dies_and_another_takes_its_place(box: Box, clean: dict[str, Any]) -> None:
    with ray_cluster(0, 1, 1, 1) as cluster:
        folder = box.folder / "run"
        pace = ("--env", "ELASTIC_PAUSE=0.1", "--env", "ELASTIC_WANTED=2")
        launcher = box.start("run", "-n", "1:2", *on(box, cluster), *pace, "--log-dir", str(folder), JOBS, "long")
        wait_for(folder, "world", 1, launcher)
        first = {event["rank"]: event["data"]["pid"] for event in events_in(folder, "worker_started")}
        time.sleep(2.0)  # who is lost before the first step has no state, and all begin anew
        kept, lost = cluster.node_of(first[0]), cluster.node_of(first[1])
        cluster.kill(lost)
        wait_for(folder, "worker_joined", 1, launcher)
        again = events_in(folder, "worker_started")[-1]
        assert again["rank"] == 1
        assert cluster.node_of(again["data"]["pid"]) not in (lost, kept)
        shown, told = launcher.communicate(timeout=120)
    assert launcher.returncode == 0, told
    assert endings_in(shown)[-1] == clean


@pytest.mark.slow
def test_every_worker_finds_its_own_gpu_at_its_local_rank(box: Box) -> None:
    """Ray counts what it is told to count; no GPU is needed to see what it gives to whom."""
    box.write("gpu.py", "import os\nprint(os.environ['LOCAL_RANK'], os.environ['CUDA_VISIBLE_DEVICES'])")
    with ray_cluster() as cluster:
        cluster.add(2, "--num-gpus", "2")
        done = box.run("run", "-n", "2", *on(box, cluster), "-o", "engine.gpus=1", "gpu.py")
    assert done.returncode == 0, done.stderr
    seen = dict(re.findall(r"(\d) (\d,\d)$", done.stdout, re.MULTILINE))
    assert sorted(seen) == ["0", "1"], done.stdout
    assert len({devices.split(",")[int(rank)] for rank, devices in seen.items()}) == 2


@pytest.mark.slow
def test_workers_lie_where_labels_resources_and_placement_say(box: Box) -> None:
    box.write("where.py", "import os, time\nprint('pid', os.getpid())\ntime.sleep(3)")
    with ray_cluster(0) as cluster:
        plain = cluster.add(2)
        attic = cluster.add(2, "--labels", "room=attic")
        disk = cluster.add(2, "--resources", '{"disk": 2}')
        here = on(box, cluster)

        def nodes_of(name: str, *args: str) -> list["subprocess.Popen[bytes]"]:
            """The nodes on which two workers are, by rank."""
            folder = box.folder / name
            launcher = box.start("run", "-n", "2", *here, *args, "--log-dir", str(folder), "where.py")
            wait_for(folder, "worker_started", 2, launcher)
            pids = {event["rank"]: event["data"]["pid"] for event in events_in(folder, "worker_started")}
            found = [cluster.node_of(pids[rank]) for rank in range(2)]
            told = launcher.communicate(timeout=100)[1]
            assert launcher.returncode == 0, told
            return found

        assert nodes_of("labels", "-o", "engine.labels=room=attic") == [attic, attic]
        assert nodes_of("resources", "-o", "engine.resources=disk=1") == [disk, disk]
        first, second = nodes_of("pack")
        assert first is second
        first, second = nodes_of("spread", "-o", "engine.placement=strict-spread")
        assert first is not second
        assert {first, second} <= {plain, attic, disk}


def wait_for_port(port: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), 1.0).close()
        except OSError:
            assert time.monotonic() < deadline, "nobody listens there"
            time.sleep(0.1)


@pytest.mark.slow
def test_a_launcher_outside_the_cluster_is_its_client(box: Box, clean: dict[str, Any]) -> None:
    """Through Ray's server for clients, with its token; agents call back to the launcher."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with ray_cluster() as cluster:
        cluster.add(2, "--ray-client-server-port", str(port))
        wait_for_port(port)  # Ray starts that server after all others
        at = ("--address", f"ray://127.0.0.1:{port}")
        box.env |= cluster.env
        done = box.run("run", "-n", "1:2", *at, JOBS, "long", timeout=200)
        assert done.returncode == 0, done.stderr
        assert endings_in(done.stdout)[-1] == clean
        done = box.run("run", "-n", "9", *at, JOBS, "long")
        assert done.returncode == 2
        assert "has room for 2 workers, and 9 are needed" in done.stderr


# What a cluster that grows by itself has, and what it was asked for. A driver would count as use of its node.
LOOK = """
import json, sys
from shoal.engine.ray import import_ray
import_ray()
from ray._raylet import GcsClient
head = GcsClient(address=sys.argv[1])
alive = [node for node in head.get_all_node_info(timeout=30).values() if node.state == 0]
print(json.dumps([len(alive), json.loads(head.internal_kv_get(b"autoscaler_resource_request", None) or "[]")]))
"""


def look(box: Box, cluster: RayCluster) -> tuple[int, list[Any]]:
    done = box.execute(sys.executable, "-c", LOOK, cluster.address)
    assert done.returncode == 0, done.stderr
    num_nodes, asked = json.loads(done.stdout.splitlines()[-1])
    return num_nodes, asked


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_cluster_grows_for_a_run_and_is_asked_for_nothing_after_it(box: Box) -> None:
    box.write("where.py", "import os\nprint('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])")
    with growing_cluster(0, 2, most_nodes=1) as cluster:
        here = on(box, cluster)
        assert look(box, cluster) == (1, [])
        # Nobody has to say that it is worth waiting: Ray knows that there will be more machines.
        done = box.run("run", "-n", "2", *here, "where.py", timeout=400)
        assert done.returncode == 0, done.stderr
        assert "The cluster was asked to grow, and gets 5" in done.stderr
        assert "rank 0 of 2" in done.stdout
        assert "rank 1 of 2" in done.stdout
        assert look(box, cluster) == (2, [])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_elastic_run_begins_with_what_is_there_and_grows_with_the_cluster(box: Box) -> None:
    with growing_cluster(1, 1, most_nodes=0) as cluster:
        folder = box.folder / "run"
        # Its steps are slow until there are two.
        pace = ("--env", "ELASTIC_PAUSE=0.1", "--env", "ELASTIC_WANTED=2")
        options = (*on(box, cluster), "-o", "engine.wait=300", *pace, "--log-dir", str(folder))
        launcher = box.start("run", "-n", "1:2", *options, JOBS, "long")
        wait_for(folder, "world", 1, launcher)
        assert events_in(folder, "world")[0]["data"]["members"] == ["0.0"]
        assert look(box, cluster) == (1, [{"CPU": 1.0}, {"CPU": 1.0}])
        cluster.grow_to(1)
        wait_for(folder, "worker_joined", 1, launcher)
        shown, told = launcher.communicate(timeout=300)
        assert launcher.returncode == 0, told
        assert endings_in(shown)[-1]["step"] == 160
        assert look(box, cluster)[1] == [], "what was asked for was not withdrawn"
