"""`shoal up --cluster`, `join`, `nodes`, `leave` and `down`, as the command line calls them."""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.cluster import head, links, member, ray_node
from shoal.cluster.ask_ray import ask_ray
from shoal.cluster.asking import ask
from shoal.cluster.codes import parse_code
from shoal.cluster.files import forget, locked, write_private
from shoal.cluster.listing import Node, current_nodes, plain, table
from shoal.cluster.naming import check_name, host_name, join_labels, parse_host, parse_port
from shoal.cluster.ports import DEFAULT_PORT, NUM_PORTS, Ports
from shoal.cluster.reach import resolve
from shoal.cluster.versions import require_ray
from shoal.engine.clusters import HEAD, MEMBER, Cluster, cluster_folder, is_running, read_cluster
from shoal.spec.errors import ShoalError, UserError
from shoal.verb_parser import Parser

_LOCK = "lock"


def _parser(verb: str, about: str, usage: str) -> Parser:
    parser = Parser(verb, about, usage)
    parser.add_argument("--json", action="store_true", help="as JSON")
    return parser


def up(argv: Sequence[str]) -> int:
    """`shoal up --cluster`: make this machine the first of a cluster, or invite more to it."""
    parser = _parser("up", "Make this machine the first of a cluster.", "--cluster [--invite] [OPTIONS]")
    parser.add_argument("--cluster", action="store_true", help="a cluster of machines, with Ray underneath")
    parser.add_argument("--invite", action="store_true", help="only make a new code for others to join with")
    parser.add_argument("--address", metavar="IP", help="where the others find this machine")
    parser.add_argument(
        "--port", metavar="N", help=f"first of the {NUM_PORTS} ports in use (default: {DEFAULT_PORT})"
    )
    parser.add_argument("--no-tls", action="store_true", help="let Ray talk in the clear, in a network you trust")
    _add_naming(parser)
    options = parser.parse_args(argv)
    if not options.cluster:
        raise UserError("`shoal up` needs to know what.", hint="`shoal up --cluster` begins a cluster of machines")
    require_ray()
    wanted = head.Wanted(
        name=check_name(options.name),
        labels=join_labels(options.label),
        address=options.address,
        port=None if options.port is None else parse_port(options.port),
        has_tls=not options.no_tls,
    )
    folder = cluster_folder()
    with locked(folder, _LOCK, waits=False):
        before = read_cluster(folder)
        if before is not None and before.role == MEMBER:
            raise UserError(f"This machine is in the cluster of {before.head}.", hint="`shoal leave` first")
        if before is not None and is_running(before):
            return _still_up(before, options.invite, options.json)
        if options.invite:
            raise UserError("No cluster is up on this machine.", hint="`shoal up --cluster` begins one")
        return _start_head(folder, wanted, before, options.json)


def _start_head(folder: str, wanted: head.Wanted, before: Cluster | None, as_json: bool) -> int:
    began = time.monotonic()
    cluster = head.start(head.plan(folder, wanted, before), before, _say)
    code = head.open_door(cluster)
    seconds = time.monotonic() - began
    text = [f"the cluster is up: {cluster.name} at {cluster.node_address}, in {seconds:.1f} s", ""]
    text += _invitation_text(head.join_command(cluster, code))
    if before is not None:
        text += [f"machines that were in it come back with `shoal join {cluster.node_address}`, without a code"]
    text += ["`shoal nodes` shows who is there; `shoal down` ends it"]
    facts = {"status": "started", "seconds": round(seconds, 3), "code": str(code)}
    _print({**facts, "join": head.join_command(cluster, code), **_facts(cluster)}, as_json, "\n".join(text))
    return 0


def _still_up(cluster: Cluster, is_inviting: bool, as_json: bool) -> int:
    if not is_inviting:
        text = f"the cluster is up already, at {cluster.node_address}; `shoal up --cluster --invite` lets more in"
        _print({"status": "up", **_facts(cluster)}, as_json, text)
        return 0
    code = head.open_door(cluster)
    command = head.join_command(cluster, code)
    facts = {"status": "invited", "code": str(code), "join": command, **_facts(cluster)}
    _print(facts, as_json, "\n".join(_invitation_text(command)).rstrip())
    return 0


def _invitation_text(command: str) -> list[str]:
    return [f"on each of the other machines, within {head.OPEN_MINUTES:.0f} minutes:", "", f"  {command}", ""]


def join(argv: Sequence[str]) -> int:
    """`shoal join`: add this machine to a cluster."""
    parser = _parser("join", "Add this machine to a cluster.", "HOST[:PORT] --code CODE [OPTIONS]")
    parser.add_argument("host", metavar="HOST[:PORT]")
    parser.add_argument("--code", metavar="CODE", help="as `shoal up --cluster` printed it; to come back, none")
    _add_naming(parser)
    options = parser.parse_args(argv)
    require_ray()
    host, port = parse_host(options.host)
    name, labels = check_name(options.name) or host_name(), join_labels(options.label)
    code = None if options.code is None else parse_code(options.code)
    folder = cluster_folder()
    with locked(folder, _LOCK, waits=False):
        before = read_cluster(folder)
        address = resolve(host)
        if before is not None and (before.head != address or before.role == HEAD or _is_in(before)):
            return _in_already(before, address, options.json)
        began = time.monotonic()
        if code is None:
            if before is None:
                raise UserError("A code is needed to join.", hint=f"`shoal join {options.host} --code CODE`")
            member.come_back(before, _say)
            joined = member.Joined(cluster=before, warnings=())
        else:
            joined = member.come_in(folder, address, port, code, name=name, labels=labels, say=_say)
        return _start_member(joined, began, options.json)


def _start_member(joined: member.Joined, began: float, as_json: bool) -> int:
    for warning in joined.warnings:
        _say(f"warning: {warning}")
    _say(f"starting Ray on {joined.cluster.node_address}")
    try:
        cluster = ray_node.start(joined.cluster, _say)
    except ShoalError as error:
        again = f"`shoal join {joined.cluster.head}` tries again, without a code"
        raise ShoalError(error.message, why=error.why, hint=f"{error.hint}; {again}") from None
    seconds = time.monotonic() - began
    text = f"{cluster.name} ({cluster.node_address}) is in the cluster of {cluster.head}, after {seconds:.1f} s"
    facts = {"status": "joined", "seconds": round(seconds, 3), "warnings": list(joined.warnings), **_facts(cluster)}
    _print(facts, as_json, text)
    return 0


def _is_in(before: Cluster) -> bool:
    """Whether Ray runs here and its head knows of it: a head that was started anew does not."""
    if not is_running(before):
        return False
    known = current_nodes(ask_ray(before, "nodes"))
    return any(node.address == before.node_address and node.is_alive for node in known)


def _in_already(before: Cluster, address: str, as_json: bool) -> int:
    if before.role == HEAD:
        raise UserError("This machine is the first of a cluster of its own.", hint="`shoal down` ends that cluster")
    if before.head != address:
        raise UserError(f"This machine is in the cluster of {before.head}.", hint="`shoal leave` first")
    text = f"this machine is in the cluster of {before.head} already; `shoal nodes` shows who else is"
    _print({"status": "joined already", **_facts(before)}, as_json, text)
    return 0


def nodes(argv: Sequence[str]) -> int:
    """`shoal nodes`: show the machines of the cluster."""
    parser = _parser("nodes", "Show the machines of the cluster.", "[--measure] [--json]")
    parser.add_argument(
        "--measure", action="store_true", help="measure how fast they reach each other; some seconds for each two"
    )
    options = parser.parse_args(argv)
    cluster = _the_cluster()
    found = current_nodes(ask_ray(cluster, "nodes"))
    known = _measure(cluster, found) if options.measure else links.read_links(cluster.folder)
    text = table(found).rstrip()
    if options.measure and known is not None:
        text += "\n\n" + links.table(known[0]) + links.tell_slowest(known[0])
    elif known is not None and known[0]:
        text += "\n" + links.tell_last(*known, time.time())
    facts = {"nodes": [plain(node) for node in found], "links": None if known is None else links.plain(*known)}
    _print({**facts, **_facts(cluster)}, options.json, text)
    return 0


def _measure(cluster: Cluster, found: Sequence[Node]) -> tuple[list[links.Link], float]:
    """Measure all links, and keep what was found for those who plan with it."""
    alive = [node for node in found if node.is_alive]
    names = [node.name for node in alive]
    nodes = [
        {
            "id": node.id,
            "name": node.name if names.count(node.name) == 1 else f"{node.name} ({node.address})",
            "address": node.address,
        }
        for node in alive
    ]
    measured = [links.Link(**each) for each in ask("links", None, nodes)], time.time()
    write_private(cluster.folder, links.LINKS, links.encode(*measured))
    return measured


def leave(argv: Sequence[str]) -> int:
    """`shoal leave`: take this machine out of the cluster."""
    options = _parse_ending("leave", "Take this machine out of the cluster.", argv)
    cluster = _the_cluster()
    with locked(cluster.folder, _LOCK, waits=False):
        if cluster.role == HEAD:
            raise UserError("This machine is the first of the cluster.", hint="`shoal down` ends the whole cluster")
        if not options.force:
            _check_idle([node for node in _known_nodes(cluster) if node.address == cluster.node_address], "leave")
        num_processes = ray_node.stop(cluster, _say)
        forget(cluster)
    text = f"this machine has left the cluster of {cluster.head}; {num_processes} processes ended"
    _print({"status": "left", "num_processes": num_processes, **_facts(cluster)}, options.json, text)
    return 0


def down(argv: Sequence[str]) -> int:
    """`shoal down`: end the cluster."""
    options = _parse_ending("down", "End the cluster.", argv)
    cluster = _the_cluster()
    with locked(cluster.folder, _LOCK, waits=False):
        if cluster.role == MEMBER:
            raise UserError(
                f"The cluster was begun on {cluster.head}.",
                why="only the first machine can end it",
                hint="`shoal leave` takes this machine out",
            )
        if not options.force:
            _check_idle(_known_nodes(cluster), "down")
        untold = head.end(cluster, _say)
    others = f"; run `shoal leave` on {', '.join(untold)}, which could not be told" if untold else ""
    _print({"status": "down", "untold": untold, **_facts(cluster)}, options.json, f"the cluster is down{others}")
    return 0


def _parse_ending(verb: str, about: str, argv: Sequence[str]) -> argparse.Namespace:
    parser = _parser(verb, about, "[--force] [--json]")
    parser.add_argument("--force", action="store_true", help="even if something is running")
    return parser.parse_args(argv)


def _known_nodes(cluster: Cluster) -> list[Node]:
    """The machines, or none where nobody can say."""
    if not is_running(cluster):
        return []
    try:
        return current_nodes(ask_ray(cluster, "nodes"))
    except ShoalError as error:
        _say(f"{error.message} {error.why}")
        return []


def _check_idle(nodes: Sequence[Node], verb: str) -> None:
    busy = [node for node in nodes if node.is_busy]
    if busy:
        told = ", ".join(f"{node.name} ({node.cores - node.free_cores:g} of {node.cores:g} cores)" for node in busy)
        raise UserError(
            "Something is running.",
            why=f"in use: {told}",
            hint=f"wait for it; or `shoal {verb} --force` ends it",
        )


def _the_cluster() -> Cluster:
    cluster = read_cluster(cluster_folder())
    if cluster is None:
        raise UserError(
            "This machine is in no cluster.",
            hint="`shoal up --cluster` begins one, `shoal join` adds a machine to it",
        )
    return cluster


def _add_naming(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", metavar="NAME", help="what to call this machine (default: its host name)")
    parser.add_argument("--label", metavar="K=V", action="append", default=[], help="a label; may be repeated")


def _facts(cluster: Cluster) -> dict[str, Any]:
    return {
        "name": cluster.name,
        "role": cluster.role,
        "address": cluster.address,
        "node_address": cluster.node_address,
        "ports": [cluster.port, Ports(cluster.port).workers[-1]],
        "has_tls": cluster.has_tls,
    }


def _print(facts: Mapping[str, Any], as_json: bool, text: str) -> None:
    sys.stdout.write((json.dumps(facts) if as_json else text) + "\n")


def _say(text: str) -> None:
    """Progress, which is no part of the answer."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
