"""An object store on this machine: OpenStack Swift behind its S3 interface, with one disk and no copies.

What it does is what a cluster of it does: requests are signed, a PUT appears whole or not at all and is on disk
(fsync) before it is answered, objects in parts are put together in the end. Why it is this one is in
docs/decisions/0018-files-by-url.md.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from shoal.testing.rigs.leftovers import rig_folder
from shoal.testing.rigs.machine import RigMissing, call, require

_START_SECONDS = 100.0
_BACKENDS = ("account", "container", "object")
_KEY, _SECRET = "test:tester", "testing"

_COMMON = """
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
user = {user}
swift_dir = {folder}
devices = {folder}/disks
recon_cache_path = {folder}
mount_check = false
workers = 0
"""

_BACKEND = """
[pipeline:main]
pipeline = {kind}-server
[app:{kind}-server]
use = egg:swift#{kind}
"""

# Without a memcached, which it is told to look for where none is, it remembers nothing between requests.
_PROXY = """
[pipeline:main]
pipeline = catch_errors gatekeeper proxy-logging cache listing_formats bulk s3api tempauth copy slo proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
[filter:catch_errors]
use = egg:swift#catch_errors
[filter:gatekeeper]
use = egg:swift#gatekeeper
[filter:proxy-logging]
use = egg:swift#proxy_logging
[filter:cache]
use = egg:swift#memcache
memcache_servers = 127.0.0.1:9
[filter:listing_formats]
use = egg:swift#listing_formats
[filter:bulk]
use = egg:swift#bulk
[filter:s3api]
use = egg:swift#s3api
location = us-east-1
min_segment_size = 1
[filter:tempauth]
use = egg:swift#tempauth
user_test_tester = testing .admin
[filter:copy]
use = egg:swift#copy
[filter:slo]
use = egg:swift#slo
"""

_CLUSTER = """
[swift-hash]
swift_hash_path_suffix = shoal
[storage-policy:0]
name = only
default = yes
"""


# What nine calls of swift-ring-builder do, of which each takes a second.
_RINGS = """
import sys
from swift.common.ring import RingBuilder
for item in sys.argv[1:]:
    path, _, port = item.rpartition(":")
    builder = RingBuilder(1, 1, 0)
    builder.add_dev(dict(id=0, region=1, zone=1, weight=1, ip="127.0.0.1", port=int(port), device="d1", meta="",
                         replication_ip="127.0.0.1", replication_port=int(port)))
    builder.rebalance()
    builder.get_ring().save(path)
"""


class ObjectStore:
    """A store that can be killed and started again; what it acknowledged is still there then."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ports = dict(zip(("proxy", *_BACKENDS), _free_ports(1 + len(_BACKENDS)), strict=True))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._log = folder / "requests.log"
        _configure(folder, self._ports)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._ports['proxy']}"

    @property
    def environment(self) -> Mapping[str, str]:
        """What a client needs to know, as the usual variables. No configuration file of the user's is looked at."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": _KEY,
            "AWS_SECRET_ACCESS_KEY": _SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }

    def start(self) -> None:
        """Start it, or start it again on the same ports; returns once it answers."""
        with open(self._log, "ab") as log:
            self._processes = [self._spawn(kind, log) for kind in (*_BACKENDS, "proxy")]
        deadline = time.monotonic() + _START_SECONDS
        while not all(_answers(port) for port in self._ports.values()):
            ended = [process for process in self._processes if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                self.kill()
                raise RigMissing("rigs.object_store does not start.", why=self.said()[-600:])
            time.sleep(0.05)

    def _spawn(self, kind: str, log: IO[bytes]) -> "subprocess.Popen[bytes]":
        # It dies with the process that made it, however that ends.
        command = [
            "setpriv",
            "--pdeathsig",
            "KILL",
            f"swift-{kind}-server",
            f"{self.folder}/{kind}-server.conf",
            "-v",
        ]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)

    def kill(self) -> None:
        """`kill -9` of all its processes, in whatever they are doing."""
        for process in self._processes:
            process.send_signal(signal.SIGKILL)
        for process in self._processes:
            process.wait(10)
        self._processes = []

    def said(self) -> str:
        """The log of all its processes so far; each request is a line."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    """An object store with an S3 interface on loopback, removed with the block. Needs seconds and 160 MB."""
    require("rigs.object_store", "swift-proxy-server", "setpriv")
    with rig_folder() as folder:
        store = ObjectStore(folder)
        try:
            store.start()
            yield store
        finally:
            store.kill()


def _configure(folder: Path, ports: Mapping[str, int]) -> None:
    (folder / "disks" / "d1").mkdir(parents=True)
    (folder / "swift.conf").write_text(_CLUSTER)
    user = call("id", "-un").strip()
    for kind, port in ports.items():
        rest = _PROXY if kind == "proxy" else _BACKEND.format(kind=kind)
        text = _COMMON.format(port=port, user=user, folder=folder) + rest
        (folder / f"{kind}-server.conf").write_text(text)
    rings = [f"{folder}/{kind}.ring.gz:{ports[kind]}" for kind in _BACKENDS]
    call(_interpreter(), "-c", _RINGS, *rings, rig="rigs.object_store")


def _interpreter() -> str:
    """The Python that Swift was installed for, which may not be ours."""
    with open(str(shutil.which("swift-proxy-server"))) as script:
        return script.readline().removeprefix("#!").strip()


def _free_ports(count: int) -> list[int]:
    """Swift has to be told its ports, so they are free only as good as certainly."""
    opened = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in opened]
    for server in opened:
        server.close()
    return ports


def _answers(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/healthcheck", timeout=5).close()
    except urllib.error.HTTPError as error:
        error.close()
    except OSError:
        return False
    return True
