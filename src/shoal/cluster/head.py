"""The first machine of a cluster: makes it, invites others, ends it."""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass

from shoal.cluster import ray_node
from shoal.cluster.ask_ray import ask_ray
from shoal.cluster.certificates import as_der, make_authority, make_request, sign_request
from shoal.cluster.codes import Code
from shoal.cluster.files import forget, read_private, write_private
from shoal.cluster.invitations import OPEN_SECONDS, invite
from shoal.cluster.naming import host_name
from shoal.cluster.ports import DEFAULT_PORT, Ports
from shoal.cluster.ray_node import Say
from shoal.cluster.reach import check_free, choose_address
from shoal.engine.clusters import HEAD, Cluster, is_running
from shoal.spec.errors import ShoalError, UserError

_DOOR_PID = "door.pid"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """How the first machine is to be set up; None is what it was before, or what is usual."""

    name: str | None = None
    labels: str = ""
    address: str | None = None
    port: int | None = None
    has_tls: bool = True


def plan(folder: str, wanted: Wanted, before: Cluster | None) -> Cluster:
    """The cluster to start. After a crash of the machine it is the same as before, so that others can come back."""
    address = choose_address(wanted.address or (before.node_address if before and _is_here(before) else None))
    port = wanted.port or (before.port if before else DEFAULT_PORT)
    return Cluster(
        name=wanted.name or (before.name if before else host_name()),
        role=HEAD,
        address=f"{address}:{Ports(port).gcs}",
        node_address=address,
        port=port,
        has_tls=wanted.has_tls and (before.has_tls if before else True),
        folder=folder,
        temp_dir=ray_node.temp_dir_for(folder),
        labels=wanted.labels or (before.labels if before else ""),
    )


def _is_here(before: Cluster) -> bool:
    try:
        return choose_address(before.node_address) == before.node_address
    except UserError:
        return False


def start(cluster: Cluster, before: Cluster | None, say: Say) -> Cluster:
    """Make the secrets that are missing, and start Ray's head."""
    ray_node.check_shared_memory()
    if before is not None:
        close_door(before)
        ray_node.stop(before, say)
    check_free(Ports(cluster.port).fixed_on_head, "end that process, or give a `--port` whose next 200 are free")
    make_secrets(cluster, is_new=before is None or before.node_address != cluster.node_address)
    say(f"starting Ray on {cluster.node_address}, ports {cluster.port} to {Ports(cluster.port).workers[-1]}")
    return ray_node.start(cluster, say)


def make_secrets(cluster: Cluster, *, is_new: bool) -> None:
    """Token, authority and the head's certificate. What is there is kept; `is_new`: but for the certificate."""
    folder = cluster.folder
    if not os.path.exists(cluster.path("token")):
        write_private(folder, "token", secrets.token_hex(32))
    if not os.path.exists(cluster.path("ca.key")):
        ca, ca_key = make_authority()
        write_private(folder, "ca.pem", ca)
        write_private(folder, "ca.key", ca_key)
        is_new = True
    if is_new or not os.path.exists(cluster.path("node.key")):
        key, request = make_request(cluster.name)
        ca, ca_key = read_private(folder, "ca.pem"), read_private(folder, "ca.key")
        write_private(folder, "node.pem", sign_request(request, cluster.node_address, ca, ca_key))
        write_private(folder, "node.key", key)


def open_door(cluster: Cluster) -> Code:
    """Make a code, and see that somebody answers those who bring it."""
    code = invite(cluster.folder, as_der(read_private(cluster.folder, "node.pem")))
    if _door_pid(cluster) is None:
        _start_door(cluster)
    return code


def _start_door(cluster: Cluster) -> None:
    door = Ports(cluster.port).door
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((cluster.node_address, door))
            listener.listen(16)
        except OSError:
            check_free({door: "shoal's door"}, "end that process, then `shoal up --cluster --invite`")
            raise
        with open(cluster.path("door.log"), "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "shoal.cluster.door", cluster.folder, str(listener.fileno())],
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )
    write_private(cluster.folder, _DOOR_PID, str(process.pid))


def _door_pid(cluster: Cluster) -> int | None:
    """The process at the door, if it is still that."""
    with contextlib.suppress(OSError, ValueError):
        with open(cluster.path(_DOOR_PID), encoding="ascii") as file:
            pid = int(file.read())
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().split(b"\0")
        if b"shoal.cluster.door" in words and os.fsencode(cluster.folder) in words:
            return pid
    return None


def close_door(cluster: Cluster) -> None:
    pid = _door_pid(cluster)
    if pid is not None:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def join_command(cluster: Cluster, code: Code) -> str:
    """What to type on the other machines."""
    port = "" if cluster.port == DEFAULT_PORT else f":{cluster.port}"
    return f"shoal join {cluster.node_address}{port} --code {code}"


def end(cluster: Cluster, say: Say) -> list[str]:
    """End the cluster, here and on the other machines; returns the names of those that could not be told."""
    close_door(cluster)
    untold = []
    if is_running(cluster):
        say("ending Ray on all machines")
        try:
            untold = [str(node["name"]) for node in ask_ray(cluster, "end_others")]
        except ShoalError as error:
            say(f"the other machines could not be told: {error.why}")
    ray_node.stop(cluster, say)
    forget(cluster)
    return untold


OPEN_MINUTES = OPEN_SECONDS / 60
