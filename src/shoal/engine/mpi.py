"""Agents that mpirun starts: workers on the hosts that a user names, or on those of a Slurm allocation."""

import os
import shlex
import shutil
import socket
import sys
from collections.abc import Sequence

from shoal.engine.env import inherited_env
from shoal.engine.grounds import amount
from shoal.engine.hosts import COME_SECONDS, HUNG_SECONDS, Host, HostsGround, allocated_hosts, parse_hosts
from shoal.engine.machine import available_cores, route_to
from shoal.spec.errors import UserError

HERE = ("localhost", "127.0.0.1")


def find_hosts(hosts: str | None) -> list[Host]:
    """Those that are named, else those of the Slurm allocation that this process is in; none where it is in none."""
    return parse_hosts(hosts) if hosts is not None else allocated_hosts(inherited_env())


def make_ground(hosts: str | None, options: dict[str, str]) -> HostsGround:
    """Machines reached by mpirun. Without hosts, and outside of Slurm, it is this one, with a slot a core."""
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        raise UserError(
            "mpirun was not found.",
            why="`--engine mpi` starts workers with it",
            hint="install OpenMPI, on Debian and Ubuntu with `apt install openmpi-bin`",
        )
    named = find_hosts(hosts) or [Host(name="localhost", num_slots=available_cores())]
    # A name of this machine's own may lead to an address that only this machine has.
    own = socket.gethostname()
    remote = [host.name for host in named if host.name not in (*HERE, own, own.partition(".")[0])]
    more = _split(options.get("engine.mpirun", ""))
    # Between us and ourselves there is no firewall, and a machine that is only slow is waited for.
    wait_seconds = amount(options.get("engine.wait", str(COME_SECONDS if remote else HUNG_SECONDS)), "engine.wait")
    return HostsGround(
        named,
        route_to(remote[0]) if remote else "127.0.0.1",
        lambda host, python: command_of(mpirun, more, host, python),
        wait_seconds,
    )


def _split(words: str) -> list[str]:
    try:
        return shlex.split(words)
    except ValueError as error:
        raise UserError(f"engine.mpirun is {words!r}.", why=str(error), hint="close the quotation") from error


def command_of(mpirun: str, more: Sequence[str], host: str, python: Sequence[str]) -> list[str]:
    """One mpirun for each host: where a host is lost, mpirun ends all that it has started."""
    as_root = ["--allow-run-as-root"] if os.getuid() == 0 else []
    # An agent starts processes that use all cores. What it is bound to, they would be bound to.
    free = ["--bind-to", "none", "--oversubscribe"]
    return [mpirun, *as_root, *free, *more, "--host", f"{host}:1", "-n", "1", sys.executable, *python]
