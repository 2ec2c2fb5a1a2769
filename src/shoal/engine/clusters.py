"""The cluster of machines this one belongs to, as `shoal up --cluster` or `shoal join` wrote it down."""

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields

from shoal.engine.env import shoal_home
from shoal.spec.errors import UserError

HEAD, MEMBER = "head", "member"
_STATE = "cluster.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """This machine's place in a cluster of machines, which Ray holds together.

    `address` is where Ray's head listens, `node_address` where the others find this machine, `port` the first of the
    ports that are used. `folder` holds the secrets, `temp_dir` what Ray writes. All of Ray's processes here are in
    the process session `session`, which means something only until the next boot: `boot` tells.
    """

    name: str
    role: str
    address: str
    node_address: str
    port: int
    has_tls: bool
    folder: str
    temp_dir: str
    labels: str = ""
    session: int = 0
    boot: str = ""

    @property
    def head(self) -> str:
        """The address of the first machine, without a port."""
        return self.address.rpartition(":")[0]

    @property
    def env(self) -> dict[str, str]:
        """What Ray has to find in its environment before it is imported, here.

        The files are those of this machine: a worker on another one gets its own from Ray there, and none of these.
        """
        env = {
            "RAY_ADDRESS": self.address,
            "RAY_AUTH_MODE": "token",
            # A token in a variable would win over the one in a file.
            "RAY_AUTH_TOKEN": "",
            "RAY_AUTH_TOKEN_PATH": self.path("token"),
            "RAY_USE_TLS": "1" if self.has_tls else "0",
        }
        if self.has_tls:
            env |= {
                "RAY_TLS_CA_CERT": self.path("ca.pem"),
                "RAY_TLS_SERVER_CERT": self.path("node.pem"),
                "RAY_TLS_SERVER_KEY": self.path("node.key"),
            }
        return env

    def path(self, name: str) -> str:
        return os.path.join(self.folder, name)


def find_cluster() -> Cluster | None:
    """The cluster this machine belongs to, or None. Raises UserError where it belongs to one that is not up here."""
    cluster = read_cluster(cluster_folder())
    if cluster is None or is_running(cluster):
        return cluster
    again = "shoal up --cluster" if cluster.role == HEAD else f"shoal join {cluster.head}"
    ended = "shoal down" if cluster.role == HEAD else "shoal leave"
    raise UserError(
        f"This machine belongs to the cluster of {cluster.head}, but Ray does not run here.",
        why="it was killed, or the machine has been started anew since",
        hint=f"`{again}` starts it again; `{ended}` forgets the cluster",
    )


def cluster_folder() -> str:
    return os.path.join(shoal_home(), "cluster")


def read_cluster(folder: str) -> Cluster | None:
    """What is written down in a folder; None where nothing is."""
    path = os.path.join(folder, _STATE)
    try:
        with open(path, encoding="utf-8") as file:
            facts = json.load(file)
        return Cluster(**{**facts, "folder": folder})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"{path} cannot be read.", why=str(error), hint=f"if it is damaged, remove {folder} and join again"
        ) from None


def state_of(cluster: Cluster) -> tuple[str, str]:
    """What to write down: the name of the file and what is in it."""
    facts = {field.name: getattr(cluster, field.name) for field in fields(cluster) if field.name != "folder"}
    return _STATE, json.dumps(facts, indent=1) + "\n"


@dataclass(frozen=True, slots=True)
class Process:
    """A process of this machine; `title` is its command, or what it calls itself."""

    pid: int
    parent: int
    session: int
    title: str


def is_running(cluster: Cluster) -> bool:
    """Whether Ray runs here for this cluster, with all that a machine of its role needs."""
    needed = ("/raylet ", "/gcs_server ") if cluster.role == HEAD else ("/raylet ",)
    titles = [process.title for process in processes_of(cluster)]
    return all(any(program in title for title in titles) for program in needed)


def processes_of(cluster: Cluster) -> list[Process]:
    """Ray's processes on this machine that belong to this cluster, and what they have started.

    Ray's own are known by their session, and by a title that begins with `ray::`, or our folders in their command or
    environment: the number of a session that has ended may be that of somebody else's. Some write their title over
    their environment.
    """
    if not cluster.session or cluster.boot != boot_id():
        return []
    session = [process for process in _processes() if process.session == cluster.session]
    known = {each.pid for each in session if each.title.startswith("ray::") or _is_marked(each, cluster)}
    while children := {each.pid for each in session if each.parent in known} - known:
        known |= children
    return [process for process in session if process.pid in known]


def _is_marked(process: Process, cluster: Cluster) -> bool:
    if cluster.temp_dir in process.title:
        return True
    with contextlib.suppress(OSError), open(f"/proc/{process.pid}/environ", "rb") as file:
        return os.fsencode(cluster.path("token")) in file.read()
    return False


def boot_id() -> str:
    """What tells this boot of the machine from all others."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()
    return ""


def _processes() -> Iterator[Process]:
    """Every process that is not a zombie."""
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError):
            with open(f"/proc/{name}/stat", "rb") as file:
                # The name before the last parenthesis may contain anything.
                state, parent, _, session, *_ = file.read().rpartition(b")")[2].split()
            with open(f"/proc/{name}/cmdline", "rb") as file:
                title = file.read().replace(b"\0", b" ").decode(errors="replace")
            if state not in (b"Z", b"X"):
                yield Process(int(name), int(parent), int(session), title)
