"""`shoal nodes`: the machines of a cluster, one a line."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shoal.observe.clean import clean, columns

_TITLES = ("NODE", "ADDRESS", "STATUS", "CORES", "GPUS", "MEMORY", "LABELS")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine of a cluster. What is free is what nothing has asked Ray for; a machine that is gone has nothing."""

    id: str
    name: str
    host: str
    address: str
    is_head: bool
    is_alive: bool
    cores: float
    gpus: float
    memory_bytes: int
    free_cores: float
    free_gpus: float
    free_memory_bytes: int
    labels: Mapping[str, str]

    @property
    def is_busy(self) -> bool:
        return self.is_alive and (self.free_cores < self.cores or self.free_gpus < self.gpus)


def current_nodes(found: Sequence[Mapping[str, Any]]) -> list[Node]:
    """The machines that are there and those that are missed: the first one first, then by name.

    One that left is not missed, and of one that came back only the newest life counts.
    """
    newest: dict[str, Mapping[str, Any]] = {}
    for each in sorted(found, key=lambda each: (each["is_alive"], each["started"])):
        newest[each["address"]] = each
    kept = [each for each in newest.values() if each["is_alive"] or not each["has_left"]]
    nodes = [Node(**{name: each[name] for name in Node.__dataclass_fields__}) for each in kept]
    return sorted(nodes, key=lambda node: (not node.is_head, node.name, node.address))


def table(nodes: Sequence[Node]) -> str:
    """Machines as aligned text."""
    rows = [_TITLES, *(_cells(node) for node in nodes)]
    used = [index for index in range(len(_TITLES)) if any(row[index] for row in rows[1:])]
    widths = {index: max(columns(row[index]) for row in rows) for index in used}
    lines = ["  ".join(row[index] + " " * (widths[index] - columns(row[index])) for index in used) for row in rows]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _cells(node: Node) -> tuple[str, ...]:
    name = clean(node.name) + (" (head)" if node.is_head else "")
    labels = clean(",".join(f"{key}={value}" for key, value in sorted(node.labels.items())))
    if not node.is_alive:
        return name, node.address, "gone", "", "", "", labels
    return (
        name,
        node.address,
        "busy" if node.is_busy else "free",
        f"{node.free_cores:g} of {node.cores:g} free",
        f"{node.free_gpus:g} of {node.gpus:g} free" if node.gpus else "",
        f"{node.memory_bytes / 2**30:.1f} GiB",
        labels,
    )


def plain(node: Node) -> dict[str, Any]:
    """A machine as `--json` shows it."""
    return {**asdict(node), "labels": dict(node.labels), "is_busy": node.is_busy}
