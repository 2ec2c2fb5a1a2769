"""Clusters as people write them: `16x4:t4`, several joined by `+`, or a file (TOML, JSON, openb's CSV)."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

from shoal.place.cluster import Node
from shoal.place.traces.openb import read_nodes
from shoal.spec.errors import UserError

FORM = re.compile(r"(\d{1,12})x(\d{1,12})(?::([\w.-]+))?", re.ASCII)
MOST = {"count": 100_000, "gpus": 1024, "cores": 1e6, "memory_gib": 1e9}
CORES_PER_GPU = 8.0
GIB = 2**30


def read_cluster(text: str) -> tuple[Node, ...]:
    """Nodes of a cluster: `COUNTxGPUS[:KIND]`, such as `16x4:t4+2x8:a100`, or the path of a file.

    The file has `nodes`, a list of tables with `count`, `gpus`, `cores`, `memory_gib`, `kind`, `partition`, `name`;
    or it is a node list of openb.
    """
    if Path(text).suffix == ".csv":
        return _checked(list(read_nodes(Path(text))), text)
    if Path(text).suffix in (".toml", ".json"):
        return _read_file(Path(text))
    nodes: list[Node] = []
    for part in text.split("+"):
        found = FORM.fullmatch(part.strip())
        if found is None:
            raise UserError(f"{part!r} is no cluster.", hint="write COUNTxGPUS:KIND, such as 16x4:t4, or name a file")
        count, gpus, kind = int(found[1]), int(found[2]), found[3] or ("gpu" if int(found[2]) else "cpu")
        nodes += _alike(len(nodes), {"count": count, "gpus": gpus, "kind": kind}, text)
    return _checked(nodes, text)


def _read_file(path: Path) -> tuple[Node, ...]:
    try:
        raw = path.read_text()
        facts = tomllib.loads(raw) if path.suffix == ".toml" else json.loads(raw)
    except OSError as error:
        raise UserError(f"{path} cannot be read.", why=error.strerror or str(error)) from None
    except ValueError as error:
        raise UserError(f"{path} cannot be understood.", why=str(error)) from None
    listed = facts.get("nodes") if isinstance(facts, dict) else None
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        raise UserError(f"{path} has no list of nodes.", hint="write [[nodes]] with count, gpus and kind")
    nodes: list[Node] = []
    for each in listed:
        nodes += _alike(len(nodes), each, str(path))
    return _checked(nodes, str(path))


def _alike(first: int, facts: dict[str, Any], where: str) -> list[Node]:
    unknown = set(facts) - {"count", "gpus", "cores", "memory_gib", "kind", "partition", "name"}
    if unknown:
        raise UserError(f"{where}: a node has no {', '.join(sorted(unknown))}.", hint="docs/scheduling.md lists them")
    numbers = {"count": 1, "gpus": 0, "cores": 0, "memory_gib": 0} | facts
    for name, most in MOST.items():
        value, is_counted = numbers[name], name in ("count", "gpus")
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= most
        if not is_number or (is_counted and value != int(value)):
            what = "a whole number" if is_counted else "a number"
            raise UserError(f"{where}: {name} is {value!r}.", hint=f"give it {what} from 0 to {most:,.0f}")
    gpus = int(numbers["gpus"])
    name = str(facts.get("name", ""))
    return [
        Node(
            name=name if name and numbers["count"] == 1 else f"{name or 'node'}-{first + number:04}",
            kind=str(facts.get("kind", "gpu" if gpus else "cpu")),
            cores=float(numbers["cores"] or max(gpus, 1) * CORES_PER_GPU),
            memory_bytes=int((numbers["memory_gib"] or 1024) * GIB),
            gpus=gpus,
            disk_bytes=1 << 50,
            partition=str(facts.get("partition", "default")),
        )
        for number in range(int(numbers["count"]))
    ]


def _checked(nodes: list[Node], where: str) -> tuple[Node, ...]:
    if not nodes:
        raise UserError(f"The cluster {where} has no nodes.", hint="give it some, such as 16x4:t4")
    if len({node.name for node in nodes}) < len(nodes):
        raise UserError(f"{where}: two nodes have one name.", hint="give every node a name of its own")
    return tuple(nodes)
