"""A real Ray cluster on one machine: nodes as processes, which can be killed, or come and go by themselves."""

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from shoal.engine.env import inherited_env
from shoal.engine.machine import route_to

START_SECONDS = 120.0
MOST_STARTS = 3
# What the configuration of an autoscaler has to have, for machines that are somewhere else.
_COMMANDS = (
    *("cluster_synced_files", "initialization_commands", "setup_commands", "head_setup_commands"),
    *("worker_setup_commands", "head_start_ray_commands", "worker_start_ray_commands"),
)


_WITH_ADDRESSES = {"type": "external", "module": "shoal.testing.rigs.ray_nodes.WithAddresses"}


class RayCluster:
    """Made by `ray_cluster`. `address` is that of its head; `env` is what whoever talks to it needs.

    `dashboard` is the URL of its dashboard, where it has one.
    """

    def __init__(self, folder: Path, *, is_open: bool = False, has_dashboard: bool = False) -> None:
        self.address = ""
        self.dashboard = f"http://127.0.0.1:{_free_port()}" if has_dashboard else ""
        self.nodes: list[subprocess.Popen[bytes]] = []
        self.growth: dict[str, Any] = {}
        self.growth_path = folder / "growing.json"
        self._num_starts = 0
        self._folder = folder
        self._more = ["--node-ip-address", "127.0.0.1"] if is_open else []
        if is_open:
            self.env = {"RAY_AUTH_MODE": "disabled"}
            return
        token = folder / "token"
        token.touch(0o600)
        token.write_text(secrets.token_hex(32))
        self.env = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "", "RAY_AUTH_TOKEN_PATH": str(token)}

    def add(self, num_cpus: int, *more: str) -> subprocess.Popen[bytes]:
        """One more node; the first is the head. Returns when Ray says that it has started.

        Several that start at once would overload a small machine, and Ray gives up: it is asked again, twice.
        """
        for number in range(MOST_STARTS):
            node, log = self._start(num_cpus, *more)
            try:
                _await_start(node, log)
                break
            except RuntimeError:
                self.nodes.remove(node)
                if node.poll() is None:
                    self.kill(node)
                if number == MOST_STARTS - 1:
                    raise
        self.address = self.address or (self._folder / "ray_current_cluster").read_text().strip()
        return node

    def _start(self, num_cpus: int, *more: str) -> tuple[subprocess.Popen[bytes], Path]:
        self._num_starts += 1
        # Where several clusters are on one machine, the usual port of agents is taken, and they take no submissions.
        where = ["--address", self.address, "--dashboard-agent-listen-port", "0"]
        if not self.nodes:
            shown = ["--include-dashboard=false"]
            if self.dashboard:
                shown = ["--include-dashboard=true", "--dashboard-port", self.dashboard.rpartition(":")[2]]
            where = ["--head", "--port", "0", *shown, "--temp-dir", str(self._folder), *where[2:]]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", *where]
        log = self._folder / f"start{self._num_starts}.log"
        with log.open("wb") as out:
            node = subprocess.Popen(
                [*command, *self._more, "--num-cpus", str(num_cpus), *more],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                env={**inherited_env(), **self.env},
            )
        self.nodes.append(node)
        return node, log

    def grow_to(self, most_nodes: int) -> None:
        """How many nodes the autoscaler of a `growing_cluster` may add; it looks again and again."""
        node = {**self.growth["available_node_types"]["node"], "max_workers": most_nodes}
        types = {**self.growth["available_node_types"], "node": node}
        written = self.growth_path.with_suffix(".new")
        written.write_text(json.dumps({**self.growth, "max_workers": most_nodes, "available_node_types": types}))
        written.replace(self.growth_path)

    def node_of(self, pid: int) -> subprocess.Popen[bytes]:
        """The node on which a process is."""
        above = {process.pid for process in psutil.Process(pid).parents()}
        return next(node for node in self.nodes if node.pid in above)

    def kill(self, node: subprocess.Popen[bytes]) -> None:
        """As if its plug were pulled: all of Ray there dies at once, and what it started."""
        for process in [psutil.Process(node.pid), *psutil.Process(node.pid).children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                process.kill()
        node.wait(30)

    def close(self) -> None:
        for node in reversed(self.nodes):
            if node.poll() is None:
                self.kill(node)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def _await_start(node: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while "Ray runtime started" not in (text := log.read_text(errors="replace")):
        if node.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"Ray did not start: {text[-2000:]}")
        time.sleep(0.1)


@contextmanager
def ray_cluster(*num_cpus: int, is_open: bool = False, has_dashboard: bool = False) -> Iterator[RayCluster]:
    """Nodes with so many CPUs each, and a token that nobody else has; nothing of it stays. Needs Ray and psutil.

    `is_open`: without a token, and reached from this machine alone. For a process that has imported Ray already: it
    looks at the environment only then.
    """
    # Ray's sockets have long names in this folder, and the system allows them about a hundred letters.
    place = "/tmp" if os.path.isdir("/tmp") else None
    with tempfile.TemporaryDirectory(prefix="ray", dir=place, ignore_cleanup_errors=True) as name:
        cluster = RayCluster(Path(name), is_open=is_open, has_dashboard=has_dashboard)
        try:
            for count in num_cpus:
                cluster.add(count)
            yield cluster
        finally:
            cluster.close()


@contextmanager
def growing_cluster(
    head_cpus: int, num_cpus: int, *, most_nodes: int, has_addresses: bool = False
) -> Iterator[RayCluster]:
    """A cluster that Ray's autoscaler makes larger and smaller: a head, and up to `most_nodes` with `num_cpus` each.

    Its nodes are processes of this machine, as Ray's own tests have them. One that was idle for 6 s is taken away.
    `grow_to` changes how many there may be. Their group is called `node`; `has_addresses`: each has an address of its
    own, as machines have, from 127.0.0.2 on.
    """
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as name:
        cluster, port = RayCluster(Path(name)), _free_port()
        # An address of those kept for documentation: Ray, too, calls itself what it would have on the way there.
        head = f"{route_to('192.0.2.254')}:{port}"
        plain = {"node_config": {}, "min_workers": 0}
        cluster.growth = {
            "cluster_name": "growing",
            "provider": {
                **(_WITH_ADDRESSES if has_addresses else {"type": "fake_multinode"}),
                "gcs_address": head,
                "launch_multiple": True,
                # Nobody has to log in there to start Ray.
                "disable_node_updaters": True,
                "disable_launch_config_check": True,
            },
            "available_node_types": {
                "ray.head.default": {**plain, "resources": {"CPU": head_cpus}, "max_workers": 0},
                "node": {**plain, "resources": {"CPU": num_cpus}},
            },
            "head_node_type": "ray.head.default",
            "idle_timeout_minutes": 0.1,
            "upscaling_speed": 10.0,
            **{name: {} for name in ("auth", "docker", "file_mounts")},
            **{name: [] for name in _COMMANDS},
        }
        cluster.grow_to(most_nodes)
        cluster.env |= {"AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1"}
        try:
            cluster.add(head_cpus, "--port", str(port), "--autoscaling-config", str(cluster.growth_path))
            yield cluster
        finally:
            cluster.close()
