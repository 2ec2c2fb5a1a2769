"""A Slurm of our own: its daemons in a folder, on ports of their own, gone with the block. Needs root.

On this machine alone, or with a node on each host of `rigs.hosts`.
"""

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shoal.testing import rigs

NEEDS = ("root", "slurmctld", "munged")

ALL_END_TOGETHER = ("--pid", "--fork", "--kill-child", "--mount-proc")
"""What a node has started ends with it: daemons of steps would stay and wait for one that is gone."""

CONFIG = """\
ClusterName=test
SlurmctldHost={nodes[0]}({addresses[0]})
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=2
"""


class Slurm:
    """A cluster that is up. `run` runs a command with it, as on its first node."""

    def __init__(self, folder: Path, hosts: rigs.Hosts | None) -> None:
        self._folder, self._hosts = folder, hosts
        self.nodes = [f"shoal{number}" for number in range(hosts.count if hosts else 1)]
        self._addresses = [hosts.address(number) for number in range(hosts.count)] if hosts else ["127.0.0.1"]
        self._processes: list[subprocess.Popen[bytes]] = []

    def command(self, number: int, command: Sequence[str], flags: Sequence[str] = ()) -> list[str]:
        """A command as on a node: with its name, its network, and the names of the others."""
        names = f"hostname {self.nodes[number]}; mount --bind {self._folder}/hosts /etc/hosts"
        there = ["unshare", "--uts", "--mount", *flags, "sh", "-c", f'{names}; exec "$@"', "sh", *command]
        return self._hosts.command(number, there) if self._hosts else there

    def run(self, command: Sequence[str], env: dict[str, str], **options: Any) -> subprocess.CompletedProcess[str]:
        env = {**env, "SLURM_CONF": f"{self._folder}/slurm.conf"}
        return subprocess.run(
            self.command(0, command), env=env, capture_output=True, text=True, timeout=100, check=False, **options
        )

    def start(self) -> None:
        for name in ("state", "munge"):
            (self._folder / name).mkdir(mode=0o700)
        key = self._folder / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        lines = [f"{address} {name}" for address, name in zip(self._addresses, self.nodes, strict=True)]
        (self._folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        self._write_config()
        files = [f"--{what}-file={self._folder}/munge/{what}" for what in ("key", "pid", "log", "seed")]
        self._start(["munged", "--foreground", "--force", f"--socket={self._folder}/munge.socket", *files])
        _wait_for(lambda: (self._folder / "munge.socket").exists())
        config = ["-D", "-f", f"{self._folder}/slurm.conf"]
        self._start(self.command(0, ["slurmctld", "-c", *config]))
        for number, name in enumerate(self.nodes):
            self._start(self.command(number, ["slurmd", "-N", name, *config], ALL_END_TOGETHER))
        _wait_for(self._is_up)

    def _write_config(self) -> None:
        ports = [_free_port(), _free_port()]
        lines = [CONFIG.format(folder=self._folder, nodes=self.nodes, addresses=self._addresses, ports=ports)]
        for name, address in zip(self.nodes, self._addresses, strict=True):
            lines.append(f"NodeName={name} NodeAddr={address} CPUs=4 State=UNKNOWN\n")
        lines.append(f"PartitionName=all Nodes={','.join(self.nodes)} Default=YES State=UP\n")
        (self._folder / "slurm.conf").write_text("".join(lines))

    def _start(self, command: Sequence[str]) -> None:
        with (self._folder / "daemons.log").open("ab") as log:
            self._processes.append(subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL))

    def _is_up(self) -> bool:
        assert all(process.poll() is None for process in self._processes), self.log()
        told = self.run(["sinfo", "--noheader", "--Node", "--format=%N %t"], dict(os.environ)).stdout
        return told.split("\n")[:-1] == [f"{name} idle" for name in self.nodes]

    def log(self) -> str:
        return "".join(path.read_text(errors="replace") for path in sorted(self._folder.glob("*.log")))

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait(20)


@contextlib.contextmanager
def slurm(folder: Path, hosts: rigs.Hosts | None = None) -> Iterator[Slurm]:
    cluster = Slurm(folder, hosts)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


def _wait_for(condition: Any, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
