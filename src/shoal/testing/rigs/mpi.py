"""The commands that start ranks of OpenMPI: on this machine, or one after the other on hosts of `rigs.hosts`.

with rigs.hosts(2) as hosts, ...:
    subprocess.run([*mpirun_on_hosts(4, hosts, folder), "shoal", "worker", "train.py"], timeout=60)
"""

from pathlib import Path

from shoal.testing.rigs import leftovers
from shoal.testing.rigs.hosts import Hosts

_AGENT = """\
#!/bin/sh
case "$1" in
{hosts}
esac
shift
exec nsenter --net=$network unshare --uts sh -c "hostname $name; $*"
"""


def mpirun(num_ranks: int) -> list[str]:
    """Start so many ranks here, more than there are cores if need be, each free to use all of them."""
    return ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(num_ranks)]


def mpirun_on_hosts(num_ranks: int, hosts: Hosts, folder: Path) -> list[str]:
    """Start ranks on the hosts in turn. In place of ssh, a program in `folder` enters their networks.

    Hosts have names of their own here: OpenMPI takes ranks on hosts of one name for neighbours, who share memory.
    """
    agent = folder / "enter-host"
    cases = [
        f"  {hosts.address(host)}) network={leftovers.NAMESPACES / name}; name=host{host} ;;"
        for host, name in enumerate(hosts.names)
    ]
    agent.write_text(_AGENT.format(hosts="\n".join(cases)))
    agent.chmod(0o755)
    places = ",".join(f"{hosts.address(host)}:{num_ranks}" for host in range(hosts.count))
    options = {"plm_rsh_agent": str(agent), "btl": "tcp,self"}
    options |= {"btl_tcp_if_include": hosts.interface, "oob_tcp_if_include": hosts.interface}
    flags = [word for name, value in options.items() for word in ("--mca", name, value)]
    start = [*mpirun(num_ranks), "--host", places, "--map-by", "node", *flags]
    return hosts.command(0, ["unshare", "--uts", "sh", "-c", 'hostname host0; exec "$@"', "sh", *start])
