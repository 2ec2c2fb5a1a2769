"""`shoal run --engine spark` on a standalone cluster of several hosts: master and workers on networks of their own.

The hosts are network namespaces of this machine; master, workers, executors and driver are Spark's own.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from launching import SHOAL, Box, box

from shoal.testing import rigs
from shoal.testing.rigs import leftovers

__all__ = ["box"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    rigs.needs("root", "ip", "tc", "nsenter", "network namespaces", "mounting", "pyspark", "java"),
]
JOBS = str(Path(__file__).with_name("elastic_jobs.py"))
SECONDS = 600.0
PORT = 7077
WAIT = "engine.spark.scheduler.maxRegisteredResourcesWaitingTime=4min"
"""Executors of a busy machine need longer than the ten seconds that they get."""
_AS_HOST = 'hostname "$1"; mount --bind "$2" /etc/hosts; shift 2; exec "$@"'


class Cluster:
    """A master on host 0, where the launcher is, too, and a worker with one core on each other host."""

    def __init__(self, hosts: rigs.Hosts, box: Box) -> None:
        self.hosts, self.box = hosts, box
        self.master = f"spark://{hosts.address(0)}:{PORT}"
        self._names = box.folder / "hosts"
        lines = [f"{hosts.address(number)} host{number}\n" for number in range(hosts.count)]
        self._names.write_text("127.0.0.1 localhost\n" + "".join(lines))
        self._log = box.folder / "spark.log"

    def start(self, host: int, command: Sequence[str], **options: Any) -> "subprocess.Popen[str]":
        """Start a command as on this host: with its network and its name."""
        as_host = ["unshare", "--uts", "--mount", "sh", "-c", _AS_HOST, "sh", f"host{host}", str(self._names)]
        address = self.hosts.address(host)
        env = {**self.box.env, "SPARK_LOCAL_IP": address, "PYSPARK_PYTHON": sys.executable}
        plain = {"cwd": self.box.folder, "stdin": subprocess.DEVNULL, "text": True, "env": env}
        return self.hosts.start(host, [*as_host, *command], **{**plain, **options})

    def boot(self) -> None:
        self._start_daemon(0, "master.Master", "--host", self.hosts.address(0), "--port", str(PORT))
        self._wait_until(lambda: "I have been elected leader" in self.said())
        for host in range(1, self.hosts.count):
            size = ("--cores", "1", "--memory", "1g", "--work-dir", str(self.box.folder / f"work{host}"))
            self._start_daemon(host, "worker.Worker", "--host", self.hosts.address(host), *size, self.master)
        workers = self.hosts.count - 1
        self._wait_until(lambda: self.said().count("Successfully registered with master") == workers)

    def _start_daemon(self, host: int, kind: str, *args: str) -> None:
        spark = str(Path(sys.executable).with_name("spark-class"))
        with self._log.open("ab") as log:
            command = [spark, f"org.apache.spark.deploy.{kind}", "--webui-port", "0", *args]
            self.start(host, command, stdout=log, stderr=log)

    def _wait_until(self, is_true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while not is_true():
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.1)

    def said(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def shoal_run(self, size: str, *args: str) -> "subprocess.Popen[str]":
        # Hosts of this rig share a machine, so that workers could share memory.
        options = ("-o", "transport=tcp", "--threads", "1", "--name", "r", "-o", WAIT)
        where = (
            "--engine",
            "spark",
            "--master",
            self.master,
            "-o",
            f"engine.spark.driver.host={self.hosts.address(0)}",
        )
        both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return self.start(0, [*SHOAL, "run", "-n", size, *where, *options, *args], **both)

    def kill(self, host: int) -> None:
        """The host is gone, with all that ran there."""
        network = os.stat(leftovers.NAMESPACES / self.hosts.names[host]).st_ino
        while pids := [pid for pid in self.box.pids() if _network_of(pid) == network]:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _network_of(pid: int) -> int:
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return 0


@pytest.fixture
def cluster(box: Box) -> Iterator[Cluster]:
    with rigs.hosts(3) as hosts:
        cluster = Cluster(hosts, box)
        cluster.boot()
        yield cluster
        for host in reversed(range(hosts.count)):
            cluster.kill(host)


def endings_in(text: str) -> list[dict[str, Any]]:
    return [json.loads(found) for found in re.findall(r"^(?:\[[\d,-]*\] )?ended (.*)$", text, re.MULTILINE)]


def clean(box: Box) -> dict[str, Any]:
    """How the job ends in one process that nobody disturbs."""
    done = box.execute(sys.executable, JOBS, "long", timeout=SECONDS)
    (ending,) = endings_in(done.stdout)
    return ending


def test_workers_on_executors_of_several_hosts(cluster: Cluster) -> None:
    source = """
        import os, socket, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        x = torch.tensor([float(dist.get_rank() + 1)])
        dist.all_reduce(x)
        names = ("SHOAL_ADDRESS", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "GLOO_SOCKET_IFNAME")
        print("sum", x.item(), socket.gethostname(), *[os.environ[name] for name in names])
        dist.destroy_process_group()
    """
    cluster.box.write("sum.py", source)
    run = cluster.shoal_run("2", "sum.py")
    said = run.communicate(timeout=SECONDS)[0]
    assert run.returncode == 0, said
    # Before it torch may say that it knows no name for an address.
    places = {cluster.box.log(rank).splitlines()[-1] for rank in range(2)}
    assert places == {f"sum 3.0 host{host} {cluster.hosts.address(host)} 1 2 eth0" for host in (1, 2)}


def test_a_trainer_comes_to_the_same_and_goes_on_without_a_host(cluster: Cluster) -> None:
    box = cluster.box
    expected = clean(box)
    (box.home / "runs").rename(box.folder / "alone")
    run = cluster.shoal_run("1:2", "--env", "ELASTIC_PAUSE=0.2", "--env", "ELASTIC_WANTED=2", JOBS, "long")
    try:
        deadline = time.monotonic() + SECONDS
        while sizes(box)[-1:] != [2] or not of_kind(box, "checkpoint_saved"):
            assert run.poll() is None, run.communicate()[0]
            assert time.monotonic() < deadline, "it did not begin"
            time.sleep(0.1)
        cluster.kill(2)
        said = run.communicate(timeout=SECONDS)[0]
    finally:
        run.kill()
        run.communicate()
    assert run.returncode == 0, said
    assert sizes(box)[-2:] == [2, 1]
    assert "lost host2" in said
    endings = [ending for rank in range(2) for ending in endings_in(box.log(rank))]
    assert endings == [expected]


def of_kind(box: Box, kind: str) -> list[dict[str, Any]]:
    """The events of the run so far."""
    path = box.home / "runs" / "r" / "journal.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    with contextlib.suppress(ValueError):  # the last line may be half there
        return [event for event in map(json.loads, lines) if event["kind"] == kind]
    return []


def sizes(box: Box) -> list[int]:
    """How many were in each World so far."""
    return [len(event["data"]["members"]) for event in of_kind(box, "world")]
