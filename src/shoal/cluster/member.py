"""A machine that joins a cluster and leaves it."""

from dataclasses import dataclass

from shoal.cluster import ray_node
from shoal.cluster.certificates import SLACK, make_request
from shoal.cluster.codes import Code
from shoal.cluster.files import write_cluster, write_private
from shoal.cluster.guest import Visit, hello, probe, try_others
from shoal.cluster.ports import Ports
from shoal.cluster.ray_node import Say
from shoal.cluster.reach import check_free, connect
from shoal.cluster.versions import check_versions, versions_here
from shoal.engine.clusters import MEMBER, Cluster
from shoal.spec.errors import UserError

LARGE_CLOCK_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A machine that has been let in, with what its user should know."""

    cluster: Cluster
    warnings: tuple[str, ...]


def come_in(folder: str, address: str, port: int, code: Code, *, name: str, labels: str, say: Say) -> Joined:
    """Visit the first machine, see that all fits, and be let in. Ray is not started yet.

    The code is used last, when nothing stands in the way any more.
    """
    ray_node.check_shared_memory()
    say(f"asking {address} at port {port}")
    with Visit(address, port, code) as visit:
        head, clock_ahead_seconds = hello(visit)
        check_versions(versions_here(), head["versions"], f"{head['name']} ({address})")
        warnings = clock_warning(clock_ahead_seconds)
        ports = Ports(int(head["port"]))
        check_free(ports.fixed, "end that process; or begin anew with another `--port` of `shoal up --cluster`")
        say("trying the ports between the machines, both ways")
        if blocked := probe(visit, ports):
            warnings.append(f"training between machines uses ports that the system picks, and is blocked: {blocked}")
        warnings += try_others(head["others"], ports)
        cluster = Cluster(
            name=name,
            role=MEMBER,
            address=str(head["address"]),
            node_address=visit.here,
            port=ports.first,
            has_tls=bool(head["has_tls"]),
            folder=folder,
            temp_dir=ray_node.temp_dir_for(folder),
            labels=labels,
        )
        _receive_secrets(visit, cluster)
    return Joined(cluster=cluster, warnings=tuple(warnings))


def _receive_secrets(visit: Visit, cluster: Cluster) -> None:
    key, request = make_request(cluster.name)
    given = visit.ask("admit", request=request.decode())
    for name, content in (
        ("token", given["token"]),
        ("ca.pem", given["ca"]),
        ("node.pem", given["certificate"]),
        ("node.key", key),
    ):
        write_private(cluster.folder, name, content)
    write_cluster(cluster)


def clock_warning(ahead_seconds: float) -> list[str]:
    """What to say about clocks that differ; raises UserError where certificates would not hold."""
    apart = abs(ahead_seconds)
    told = f"this machine's clock is {apart:.1f} s {'behind' if ahead_seconds > 0 else 'ahead of'} that of the first"
    if apart > SLACK.total_seconds() / 2:
        raise UserError(
            f"The clocks are too far apart: {told}.",
            why="certificates are good for a time, and each machine goes by its own clock",
            hint="set the clock: `timedatectl set-ntp true`",
        )
    return [f"{told}; times in logs will not fit together"] if apart > LARGE_CLOCK_SECONDS else []


def come_back(before: Cluster, say: Say) -> None:
    """See that a machine that was let in before can start Ray again, without a code."""
    ray_node.check_shared_memory()
    ray_node.stop(before, say)
    ports = Ports(before.port)
    check_free(ports.fixed, "end that process")
    host, _, port = before.address.rpartition(":")
    connect(host, int(port), 8.0, f"`shoal up --cluster` on {host} starts the cluster again").close()
