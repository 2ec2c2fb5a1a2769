"""Runs on three hosts, each with a network of its own: a host dies, a cable breaks, and the run ends as if not."""

import contextlib
import ipaddress
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.testing import rigs
from shoal.testing.rigs import leftovers
from shoal.testing.rigs.machine import call

JOBS = str(Path(__file__).with_name("elastic_jobs.py"))
pytestmark = [rigs.needs("root", "ip", "tc", "nsenter", "network namespaces", "mpirun"), pytest.mark.timeout(180)]

# In place of ssh: enters the network of a host, unless that is down.
ENTER = """\
#!/bin/sh
case "$1" in
{cases}
esac
[ -e "{folder}/down$host" ] && exit 255
shift
exec nsenter --net=$network sh -c "$*"
"""


class Cluster:
    """Three hosts that mpirun reaches, and one run on them. The launcher is on host 0."""

    def __init__(self, hosts: rigs.Hosts, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder
        self.runs: list[subprocess.Popen[str]] = []
        self._enter = folder / "enter"
        cases = "\n".join(
            f"  {hosts.address(host)}) host={host}; network={leftovers.NAMESPACES / name} ;;"
            for host, name in enumerate(hosts.names)
        )
        self._enter.write_text(ENTER.format(cases=cases, folder=folder))
        self._enter.chmod(0o755)

    def start(self, num_workers: str, *args: str, **env: str) -> subprocess.Popen[str]:
        where = ",".join(f"{self.hosts.address(host)}:1" for host in range(3))
        mpirun = f"--mca plm_rsh_agent {self._enter} --mca oob_tcp_if_include {self.hosts.interface}"
        # Hosts of this rig share a machine, so that workers could share memory.
        options = ["-o", f"engine.mpirun={mpirun}", "-o", "engine.wait=60", "-o", "transport=tcp", "--threads", "1"]
        command = ["run", "-n", num_workers, "--engine", "mpi", "--hosts", where, "--name", "r", *options, *args]
        run = self.hosts.start(
            0,
            [sys.executable, "-m", "shoal", *command],
            env={**os.environ, "SHOAL_HOME": str(self.folder / "home"), **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.runs.append(run)
        return run

    def kill(self, host: int) -> None:
        """The host is gone, with all that ran there, and stays so until `boot`."""
        (self.folder / f"down{host}").touch()
        while pids := self.pids(host):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def boot(self, host: int) -> None:
        (self.folder / f"down{host}").unlink()

    def pids(self, host: int, word: str = "") -> list[int]:
        """Processes on this host that live, and have this in their command."""
        network = os.stat(leftovers.NAMESPACES / self.hosts.names[host]).st_ino
        found = []
        for name in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                command = Path("/proc", name, "cmdline").read_text()
                if command and os.stat(f"/proc/{name}/ns/net").st_ino == network and word in command:
                    found.append(int(name))
        return found

    def events(self, kind: str) -> list[dict[str, Any]]:
        journal = self.folder / "home" / "runs" / "r" / "journal.jsonl"
        lines = journal.read_text().splitlines() if journal.exists() else []
        with contextlib.suppress(ValueError):  # the last line may be half there
            return [event for event in map(json.loads, lines) if event["kind"] == kind]
        return []

    def sizes(self) -> list[int]:
        """How many were in each World so far."""
        return [len(event["data"]["members"]) for event in self.events("world")]

    def log(self, rank: int) -> str:
        return (self.folder / "home" / "runs" / "r" / "logs" / f"{rank}.log").read_text()

    def wait_for_steps(self, run: subprocess.Popen[str]) -> None:
        """All three are at work. Whoever is lost while they connect keeps the others for longer."""
        self.wait_for(lambda: self.events("checkpoint_saved"), run)
        assert self.sizes() == [3]

    def wait_for(self, condition: Callable[[], object], run: subprocess.Popen[str], seconds: float = 90.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert run.poll() is None, run.communicate()[0]
            assert time.monotonic() < deadline, "it did not happen"
            time.sleep(0.05)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with rigs.hosts(3) as hosts:
        cluster = Cluster(hosts, tmp_path)
        yield cluster
        for run in cluster.runs:
            run.kill()
            run.communicate()
        left = [pid for host in range(3) for pid in cluster.pids(host)]
        # mpirun's own daemon behind a firewall hears of the end when it tries again, after half a minute.
        deadline = time.monotonic() + 45
        while left and time.monotonic() < deadline:
            time.sleep(0.05)
            left = [pid for host in range(3) for pid in cluster.pids(host)]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert not left, "processes stayed behind"


@pytest.fixture(scope="module")
def clean() -> dict[str, Any]:
    """How the job ends in one process that nobody disturbs."""
    run = subprocess.run([sys.executable, JOBS, "long"], capture_output=True, text=True, timeout=100, check=True)
    return endings_in(run.stdout)[0]


def endings_in(text: str) -> list[dict[str, Any]]:
    return [json.loads(found) for found in re.findall(r"^ended (.*)$", text, re.MULTILINE)]


def check_ended_well(cluster: Cluster, run: subprocess.Popen[str], clean: dict[str, Any]) -> str:
    """It ended, and whoever saw the end saw the same as in peace; what the launcher said."""
    said = run.communicate(timeout=150)[0]
    assert run.returncode == 0, said
    endings = [ending for rank in range(3) for ending in endings_in(cluster.log(rank))]
    assert endings
    assert all(ending == clean for ending in endings), endings
    assert len(clean["times"]) == 1, "every sample was used equally often"
    return said


@pytest.mark.slow
def test_any_script_for_torchrun(cluster: Cluster) -> None:
    script = cluster.folder / "train.py"
    script.write_text("""
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(x)
facts = {name: os.environ[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")}
print("sum", x.item(), os.environ["SHOAL_ADDRESS"], *facts.values())
dist.destroy_process_group()
""")
    run = cluster.start("3", str(script))
    said = run.communicate(timeout=120)[0]
    assert run.returncode == 0, said
    for rank in range(3):
        assert f"sum 6.0 {cluster.hosts.address(rank)} 0 1 {rank} 3" in cluster.log(rank)


@pytest.mark.slow
@pytest.mark.parametrize("rate_mbit", [None, 50.0])
def test_a_trainer_comes_to_the_same_numbers(
    cluster: Cluster, clean: dict[str, Any], rate_mbit: float | None
) -> None:
    """However slow the network is."""
    for host in range(3):
        cluster.hosts.shape(host, rate_mbit=rate_mbit)
    run = cluster.start("3", JOBS, "long")
    check_ended_well(cluster, run, clean)


def test_a_host_dies_and_comes_back(cluster: Cluster, clean: dict[str, Any]) -> None:
    run = cluster.start("2:3", JOBS, "long", ELASTIC_WANTED="3")
    cluster.wait_for_steps(run)
    cluster.kill(2)
    cluster.wait_for(lambda: cluster.sizes() == [3, 2], run)
    cluster.boot(2)
    cluster.wait_for(lambda: cluster.sizes() == [3, 2, 3], run)
    said = check_ended_well(cluster, run, clean)
    assert f"lost {cluster.hosts.address(2)}" in said
    assert "rank 2 is back; 3 workers" in said
    assert [event["rank"] for event in cluster.events("worker_lost")] == [2]


@pytest.mark.slow
def test_a_worker_dies_and_its_host_does_not(cluster: Cluster, clean: dict[str, Any]) -> None:
    run = cluster.start("2:3", JOBS, "long", ELASTIC_WANTED="3")
    cluster.wait_for_steps(run)
    for pid in cluster.pids(1, "elastic_jobs"):
        os.kill(pid, signal.SIGKILL)
    cluster.wait_for(lambda: cluster.sizes() == [3, 2, 3], run)
    said = check_ended_well(cluster, run, clean)
    assert f"lost {cluster.hosts.address(1)}" not in said


@pytest.mark.slow
def test_a_broken_cable_is_mended(cluster: Cluster, clean: dict[str, Any]) -> None:
    """The host that is cut off ends its workers by itself, before others go on without them."""
    run = cluster.start("2:3", JOBS, "long", ELASTIC_WANTED="3", ELASTIC_PAUSE="0.2")
    cluster.wait_for_steps(run)
    (worker,) = cluster.pids(2, "elastic_jobs")
    cluster.hosts.partition(2)
    cluster.wait_for(lambda: cluster.sizes() == [3, 2], run)
    assert worker not in cluster.pids(2, "elastic_jobs")
    cluster.hosts.heal(2)
    cluster.wait_for(lambda: cluster.sizes() == [3, 2, 3], run)
    check_ended_well(cluster, run, clean)


@contextlib.contextmanager
def walled(hosts: rigs.Hosts, host: int, other: int) -> Iterator[None]:
    """A firewall on a host, which drops what another begins to say to it, without a word."""
    place = ["-n", hosts.names[host], "filter"], ["dev", hosts.interface, "ingress", "prio", "7"]
    source = int(ipaddress.ip_address(hosts.address(other)))
    # IPv4, TCP, from there, SYN and not ACK: dropped.
    program = (
        f"11,40 0 0 12,21 0 8 2048,48 0 0 23,21 0 6 6,32 0 0 26,21 0 4 {source},48 0 0 47,84 0 0 18,21 0 1 2,"
        "6 0 0 2,6 0 0 0"
    )
    call("tc", *place[0], "add", *place[1], "bpf", "direct-action", "bytecode", program)
    try:
        yield
    finally:
        call("tc", *place[0], "delete", *place[1])


@pytest.mark.slow
@pytest.mark.parametrize("size", ["3", "2:3"])
def test_a_firewall_between_workers_is_told_before_they_wait_for_each_other(cluster: Cluster, size: str) -> None:
    with walled(cluster.hosts, 2, 1):
        run = cluster.start(size, JOBS, "long")
        said = run.communicate(timeout=120)[0]
    assert run.returncode == 2
    there, here = cluster.hosts.address(1), cluster.hosts.address(2)
    assert "error: Workers could not reach each other." in said
    assert re.search(
        rf"why: from {there} to {here} port \d+: no answer within 4 s, as if a firewall dropped it$", said, re.M
    )


@pytest.mark.slow
def test_a_firewall_before_the_launcher_is_told_with_its_port(cluster: Cluster) -> None:
    """The run ends with it, since one of those that it needs will not come."""
    with walled(cluster.hosts, 0, 2):
        run = cluster.start("3", "-o", "engine.wait=7", JOBS, "long")
        said = run.communicate(timeout=60)[0]
    assert run.returncode == 2
    assert f"error: No agent came from {cluster.hosts.address(2)} within 7 s." in said
    assert re.search(rf"a firewall keeps it from {cluster.hosts.address(0)}, port \d+ \(the launcher\)", said)


@pytest.mark.slow
def test_a_firewall_before_the_launcher_does_not_keep_the_others_from_work(
    cluster: Cluster, clean: dict[str, Any]
) -> None:
    with walled(cluster.hosts, 0, 2):
        run = cluster.start("2:3", "-o", "engine.wait=7", JOBS, "long", ELASTIC_PAUSE="0.1")
        said = run.communicate(timeout=150)[0]
    assert run.returncode == 0, said
    assert f"No agent came from {cluster.hosts.address(2)} within 7 s." in said
    assert endings_in(cluster.log(0)) == [clean]


@pytest.mark.slow
def test_the_launcher_dies_and_nobody_is_left(cluster: Cluster) -> None:
    run = cluster.start("2:3", JOBS, "long", ELASTIC_PAUSE="0.5")
    cluster.wait_for_steps(run)
    run.kill()
    run.communicate(timeout=20)
    # That no process stays behind is looked at in the end of every test.
