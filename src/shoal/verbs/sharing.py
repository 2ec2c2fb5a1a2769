"""Verbs of what is shared: `nodes`, `drain`, `share`, and `audit`, which says who did what."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.spec.errors import UserError
from shoal.verb_parser import Parser, parse_count
from shoal.verbs.printing import put, size, table, width


def nodes(argv: Sequence[str]) -> int:
    """`shoal nodes`: the machines of the service; where there is none, those of the cluster."""
    parser = Parser(
        "nodes",
        "Show the machines, and what is free on them: those of the service, or of the cluster where none is up.",
        "[--json]\n       shoal nodes --cluster [--measure] [--json]",
    )
    parser.add_argument("--cluster", action="store_true", help="ask the Ray cluster, not the service")
    parser.add_argument("--measure", action="store_true", help="measure how fast its machines reach each other")
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(argv)
    from shoal.service.places import find_login

    if options.cluster or options.measure or find_login() is None:
        from shoal.cluster import verbs
        from shoal.engine.clusters import cluster_folder, read_cluster

        if read_cluster(cluster_folder()) is None and not options.cluster and not options.measure:
            hint = "`shoal up` starts a service, `shoal up --cluster` begins a cluster"
            raise UserError("No service is up on this machine, and it is in no cluster.", hint=hint)
        return verbs.nodes([flag for flag in argv if flag != "--cluster"])
    from shoal.service.client import LOOK_PATIENCE_SECONDS, Client

    with Client(patience_seconds=LOOK_PATIENCE_SECONDS) as client:
        told = client.nodes()
    put(told, options.json, tell_nodes(told["nodes"], width()))
    return 0


def tell_nodes(rows: Sequence[Mapping[str, Any]], most: int) -> str:
    """Machines as aligned text. Pure."""
    if not rows:
        return "no nodes: they have not been looked at yet"
    cells = [
        (
            row["node"],
            _state(row),
            row["partition"],
            row["kind"],
            _free(row["free_cores"], row["cores"]),
            f"{size(max(row['free_memory_bytes'], 0))} of {size(row['memory_bytes'])}",
            _free(row["free_gpus"], row["gpus"]) if row["gpus"] else "",
            " ".join(str(held["job"]) for held in row["jobs"]),
        )
        for row in rows
    ]
    titles = ("NODE", "STATE", "PARTITION", "KIND", "FREE CORES", "FREE MEMORY", "FREE GPUS", "JOBS")
    lines = [table(titles, cells, most)]
    lines += [f"{row['node']} is drained: {row['why_draining']}" for row in rows if row["why_draining"]]
    return "\n".join(lines)


def _state(row: Mapping[str, Any]) -> str:
    if not row["is_alive"]:
        return "gone"
    return "draining" if row["is_draining"] else "busy" if row["jobs"] else "free"


def _free(free: float, total: float) -> str:
    return f"{free:g} of {total:g}"


def drain(argv: Sequence[str]) -> int:
    """`shoal drain`: start nothing new on a node, or use it again."""
    parser = Parser(
        "drain", "Start nothing new on a node; what runs there goes on.", "NODE [--why TEXT | --undo] [--json]"
    )
    parser.add_argument("node", metavar="NODE")
    parser.add_argument("--why", metavar="TEXT", default="", help="for those who wonder")
    parser.add_argument("--undo", action="store_true", help="use it again")
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(argv)
    from shoal.service.client import Client

    with Client() as client:
        told = client.drain(options.node, options.why, is_draining=not options.undo)
    text = "is used again" if options.undo else "gets no new jobs; what runs there goes on"
    put(told, options.json, f"{options.node} {text}")
    return 0


def share(argv: Sequence[str]) -> int:
    """`shoal share`: who used how much."""
    parser = Parser("share", "Show who used how much, lately and in all, and what their share is.", "[--json]")
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(argv)
    from shoal.service.client import LOOK_PATIENCE_SECONDS, Client

    with Client(patience_seconds=LOOK_PATIENCE_SECONDS) as client:
        told = client.share()
    put(told, options.json, tell_shares(told, width()))
    return 0


def tell_shares(told: Mapping[str, Any], most: int) -> str:
    """Usage as aligned text. Pure."""
    rows = told["shares"]
    if not rows:
        return "nobody has used anything yet"
    cells = [
        (
            row["person"],
            row["account"] if row["account"] != row["person"] else "",
            f"{row['weight']:g}",
            row["num_workers"],
            f"{row['lately'] / 3600:.2f}",
            f"{row['part']:.0%}",
            f"{row['worker_seconds'] / 3600:.2f}",
        )
        for row in rows
    ]
    titles = ("PERSON", "ACCOUNT", "WEIGHT", "WORKERS", "LATELY", "PART", "TOTAL")
    half_life = told["half_life_seconds"] / 86400
    note = f"in hours of one worker; lately: what counts half after {half_life:g} days"
    return table(titles, cells, most, "WEIGHT WORKERS LATELY PART TOTAL") + "\n" + note


def audit(argv: Sequence[str]) -> int:
    """`shoal audit`: who did what; `verify` checks that no line was changed, and that none is missing."""
    parser = Parser(
        "audit", "Show who did what, or check that nobody changed that.", "[verify [--expect DIGEST]] [OPTIONS]"
    )
    parser.add_argument("what", metavar="verify", nargs="?", help="check the whole log")
    parser.add_argument("--expect", metavar="DIGEST", default="", help="one that was noted before; it must be there")
    parser.add_argument("--limit", metavar="N", default="50", help="how many of the newest lines (default: 50)")
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(argv)
    if options.what not in (None, "verify"):
        raise UserError(f"There is no `shoal audit {options.what}`.", hint="did you mean `shoal audit verify`?")
    if options.expect and options.what is None:
        raise UserError("--expect is for `shoal audit verify`.")
    from shoal.service.client import Client

    limit = parse_count(options.limit, "--limit")
    with Client(timeout_seconds=300.0) as client:
        told = client.audit(verify=1, expect=options.expect)
        if options.what is None:
            after = max(0, told["num_entries"] - limit)
            told = client.audit(after=after, limit=limit)
            put(told, options.json, tell_audit(told["entries"], width()))
            return 0
    put(told, options.json, tell_verdict(told))
    return 0 if told["is_sound"] else 1


def tell_audit(rows: Sequence[Mapping[str, Any]], most: int) -> str:
    """Lines of the log as aligned text. Pure but for the time zone."""
    cells = [
        (
            row["number"],
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["wall"])),
            row["who"],
            row["action"],
            row["subject"],
            row["details"] if row["details"] != "{}" else "",
        )
        for row in rows
    ]
    return (
        table(("LINE", "WHEN", "WHO", "DID", "TO", "DETAILS"), cells, most, "LINE")
        if cells
        else "nothing was done yet"
    )


def tell_verdict(told: Mapping[str, Any]) -> str:
    """What a check of the log found. Pure."""
    if told["first_bad"]:
        return f"NOT SOUND: line {told['first_bad']} does not fit those before it; something was changed there"
    if not told["has_expected"]:
        return f"NOT SOUND: {told['num_entries']} lines fit each other, but the digest you noted is not among theirs"
    return f"sound: {told['num_entries']} lines, none changed\nnote this for next time: --expect {told['digest']}"
