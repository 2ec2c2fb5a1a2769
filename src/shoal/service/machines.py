"""The machines there are: this one, or all of the cluster of which this one is the first."""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from shoal.engine.clusters import HEAD, Cluster, cluster_folder, is_running, read_cluster
from shoal.place.cluster import Node
from shoal.service.growing import Bundle
from shoal.spec.errors import ShoalError

if TYPE_CHECKING:
    from shoal.cluster.listing import Node as Machine

HERE_SECONDS = 30.0
RAY_SECONDS = 20.0
DOUBT_SECONDS = 45.0
"""Ray takes some 15 s to be sure that a machine is gone, and is asked every 20 s."""
GROWTH_SECONDS = 5.0
"""How often Ray is asked while machines are to come."""


class Machines:
    """Asks again now and then. Ray is asked in a thread: its answer takes a second or two, and may never come.

    `addresses` are those of the machines of a cluster, by name. Of one that others began, `groups` counts those that
    an autoscaler made, by group. `present` is what each of them has, and the first one; nothing until that is known.
    """

    def __init__(self, here: Callable[[], Node]) -> None:
        self._here = here
        self._address = ""
        self._bundles: list[dict[str, float]] | None = None
        self._told: list[dict[str, float]] | None = None
        self._doubts: dict[str, float] = {}
        self.groups: Mapping[str, int] = {}
        self.present: Sequence[Bundle] = ()
        self._nodes: tuple[Node, ...] = ()
        self._looked_at = -1e9
        self._asking: threading.Thread | None = None
        self.links: Mapping[tuple[str, str], float] = {}
        self.addresses: Mapping[str, str] = {}
        self.engine = "local"
        self.problem = ""

    def now(self, address: str = "") -> tuple[Node, ...]:
        """The machines as they were when last looked at; the first look takes as long as it takes.

        With an address they are those of the Ray cluster there, else of the one that was begun here, if one was.
        """
        is_busy = self._asking is not None and self._asking.is_alive()
        due = GROWTH_SECONDS if self._bundles else RAY_SECONDS if self.engine == "ray" else HERE_SECONDS
        if address != self._address or self._bundles != self._told:
            due = 0.0
        if not is_busy and time.monotonic() >= self._looked_at + due:
            self._looked_at, self._address = time.monotonic(), address
            if address:
                self.engine = "ray"
                self._asking = threading.Thread(target=self._ask_other, args=(address,), daemon=True)
                self._asking.start()
                return self._usable()
            cluster = read_cluster(cluster_folder())
            if cluster is None or cluster.role != HEAD or not is_running(cluster):
                self._nodes, self.engine, self.links, self.problem = (self._here(),), "local", {}, ""
                self.addresses = {}
            else:
                self.engine = "ray"  # also while nothing is known of its machines yet
                self._asking = threading.Thread(target=self._ask, args=(cluster,), daemon=True)
                self._asking.start()
        return self._usable()

    def _usable(self) -> tuple[Node, ...]:
        """The machines, those in doubt as if they were drained."""
        self._doubts = {name: until for name, until in self._doubts.items() if time.monotonic() < until}
        if not self._doubts:
            return self._nodes
        return tuple(replace(node, is_draining=node.name in self._doubts) for node in self._nodes)

    def doubt(self, machine: str) -> None:
        """A job says that this one is lost: nothing starts there until Ray has had the time to say so, too."""
        for name, address in self.addresses.items():
            if machine == address or machine.endswith(f"({address})"):
                self._doubts[name] = time.monotonic() + DOUBT_SECONDS
        self._looked_at = -1e9

    def hope_for(self, bundles: list[dict[str, float]]) -> None:
        """What the cluster is to be asked for from now on: again with every look, for others overwrite it."""
        self._bundles = bundles

    def close(self) -> None:
        """Ask for nothing any more."""
        if self._told:
            from shoal.cluster.ask_ray import ask_other

            with contextlib.suppress(ShoalError):
                ask_other(self._address, [])

    def _ask(self, cluster: Cluster) -> None:
        from shoal.cluster.ask_ray import ask_ray
        from shoal.cluster.links import read_links
        from shoal.cluster.listing import current_nodes

        try:
            found = current_nodes(ask_ray(cluster, "nodes"))
            known = read_links(cluster.folder)
        except ShoalError as error:
            # What was known stays: a head that is slow to answer is not a cluster without nodes.
            self.problem = f"{error.message} {error.why}"
            return
        self._take(found)
        self.links = {(link.first, link.second): link.rate for link in known[0]} if known else {}

    def _ask_other(self, address: str) -> None:
        from shoal.cluster.ask_ray import ask_other
        from shoal.cluster.listing import current_nodes

        bundles = self._bundles
        try:
            answer = ask_other(address, bundles if bundles or bundles != self._told else None)
        except ShoalError as error:
            self.problem = f"{error.message} {error.why}"
            return
        self._told = bundles
        alive = [each for each in answer if each["is_alive"]]
        self.groups = Counter(each["group"] for each in alive if each["group"])
        self.present = [
            {"CPU": each["cores"], "GPU": each["gpus"]} for each in alive if each["group"] or each["is_head"]
        ]
        self._take(current_nodes(answer))
        self.links = {}

    def _take(self, found: "Sequence[Machine]") -> None:
        named = name_each([node for node in found if node.is_alive])
        self.addresses = {name: node.address for name, node in named.items()}
        self._nodes = tuple(
            Node(
                name=name,
                kind=node.labels.get("kind", "gpu" if node.gpus else "cpu"),
                cores=node.cores,
                memory_bytes=node.memory_bytes,
                gpus=int(node.gpus),
            )
            for name, node in named.items()
        )
        self.problem = ""


def name_each(found: "Sequence[Machine]") -> "dict[str, Machine]":
    """Machines by name; those that are called alike by name and address. Pure."""
    count = Counter(node.name for node in found)
    return {node.name if count[node.name] == 1 else f"{node.name}-{node.address}": node for node in found}
