"""Three hosts on one machine, each with a place of its own in a cluster that `shoal up --cluster` and `join` make."""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from shoal.engine.clusters import processes_of, read_cluster
from shoal.testing import rigs
from shoal.testing.rigs.machine import LACKS

NEEDS_HOSTS = [
    rigs.needs("root", "ip", "tc", "nsenter", "network namespaces"),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason=f"{LACKS} ray"),
    pytest.mark.timeout(600),
]
VERB = "import sys; from shoal.cli import main; sys.exit(main(sys.argv[1:]))"


class Machines:
    """Three hosts, each with a SHOAL_HOME of its own. They share the list of processes, which Ray reads, too."""

    def __init__(self, hosts: rigs.Hosts, folder: str) -> None:
        self.hosts = hosts
        self._homes = [os.path.join(folder, f"host{host}") for host in range(hosts.count)]

    def env(self, host: int) -> dict[str, str]:
        return {**os.environ, "SHOAL_HOME": self._homes[host]}

    def folder(self, host: int) -> str:
        return os.path.join(self._homes[host], "cluster")

    def python(self, host: int, code: str, *args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, *args]
        return self.hosts.run(
            host, command, env=self.env(host), capture_output=True, text=True, timeout=300, check=False
        )

    def shoal(self, host: int, verb: str, *args: str) -> dict:
        done = self.python(host, VERB, verb, *args, "--json")
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        return json.loads(done.stdout)

    def refused(self, host: int, verb: str, *args: str) -> str:
        done = self.python(host, VERB, verb, *args)
        assert done.returncode != 0, done.stdout
        assert done.stderr.rpartition("error: ")[1], done.stderr
        assert "Traceback" not in done.stderr
        return done.stderr

    def join_all(self, code: str, hosts: tuple[int, ...]) -> None:
        """At once, as people would not; it saves time."""
        address = self.hosts.address(0)
        command = [sys.executable, "-c", VERB, "join", address, "--code", code]
        started = [
            self.hosts.start(
                host,
                [*command, "--name", f"host{host}", "--label", f"number={host}", "--json"],
                env=self.env(host),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for host in hosts
        ]
        for process in started:
            output, errors = process.communicate(timeout=300)
            assert process.returncode == 0, errors
            assert json.loads(output)["status"] == "joined"

    def up(self, *args: str) -> str:
        return str(self.shoal(0, "up", "--cluster", "--name", "first", *args)["code"])

    def names(self, *, is_alive: bool = True) -> list[str]:
        return [node["name"] for node in self.shoal(0, "nodes")["nodes"] if node["is_alive"] == is_alive]

    def pids(self, host: int) -> list[int]:
        cluster = read_cluster(self.folder(host))
        return [] if cluster is None else [process.pid for process in processes_of(cluster)]

    def kill(self, host: int) -> None:
        """What a power cut does to processes."""
        for pid in self.pids(host):
            with contextlib.suppress(OSError):
                os.kill(pid, 9)

    def close(self) -> None:
        for host in reversed(range(self.hosts.count)):
            if read_cluster(self.folder(host)) is not None:
                self.python(host, VERB, "down" if host == 0 else "leave", "--force")
        mine = [name.encode() for name in self._homes]
        assert [title for title in all_titles() if any(name in title for name in mine)] == []


def all_titles() -> list[bytes]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
            found.append(file.read())
    return found


def wait_until(condition, seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.5)


@pytest.fixture
def machines(tmp_path) -> Iterator[Machines]:
    with rigs.hosts(3) as hosts:
        made = Machines(hosts, str(tmp_path))
        yield made
        made.close()
