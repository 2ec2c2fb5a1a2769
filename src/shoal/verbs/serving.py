"""`shoal up` and `shoal down`: the service of this machine, or a cluster of several."""

import os
from collections.abc import Sequence
from typing import Any

from shoal.spec.errors import ShoalError, UserError
from shoal.verb_parser import Parser
from shoal.verbs.printing import many, put, say

_HOST = "127.0.0.1"


def up(argv: Sequence[str]) -> int:
    """`shoal up`: start the service here; with `--cluster`, begin a cluster of machines."""
    if "--cluster" in argv:
        from shoal.cluster import verbs

        return verbs.up(argv)
    parser = Parser(
        "up",
        "Start the service on this machine: a queue of jobs, shared by the people who use it. It goes on when you "
        "log out, and takes up its jobs again after a crash.",
        "[--host IP] [--port N] [--json]\n       shoal up --cluster [--invite] [OPTIONS]",
    )
    parser.add_argument("--host", metavar="IP", default=_HOST, help="where to listen (default: this machine only)")
    parser.add_argument("--port", metavar="N", default="0", help="(default: 4647, or a free one)")
    parser.add_argument(
        "--cluster", action="store_true", help="join machines with Ray instead: `shoal up --cluster --help`"
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(argv)
    from shoal.cluster.files import locked, make_folder
    from shoal.engine.env import shoal_home
    from shoal.service import places, starting
    from shoal.service.client import Client

    host, port = _check_host(options.host), _check_port(options.port)
    home, folder = shoal_home(), places.service_folder()
    make_folder(folder)
    with locked(folder, "starting", waits=True):
        before = places.read_up(folder)
        is_there = places.is_up(before)
        found = before if is_there and before else starting.start(os.path.abspath(home), host, port, say)
    with Client() as client:
        counts = client.queue(limit=1)["counts"]
    num_jobs = sum(counts.values())
    status = "up" if is_there else "started again" if before else "started"
    told = f"the service is up already, at {found.address}" if is_there else f"the service is up, at {found.address}"
    lines = [told + (f"; {many(num_jobs, 'job')} in the queue" if num_jobs else "")]
    if is_there and not _listens(found.address, host, port, is_default=options.host == _HOST):
        lines += ["where it listens stays as it was: for another address `shoal down`, and then this again"]
    lines += [""]
    lines += [
        "  shoal submit -n 2 train.py   put a job into the queue",
        "  shoal queue                  what became of it",
    ]
    lines += ["  shoal people add NAME        let somebody else in", "  shoal down                   end the service"]
    facts: dict[str, Any] = {"status": status, "address": found.address, "pid": found.pid, "num_jobs": num_jobs}
    put({**facts, "folder": folder}, options.json, "\n".join(lines))
    return 0


def _listens(address: str, host: str, port: int, *, is_default: bool) -> bool:
    """Whether a service at this address is where it was asked for. Pure."""
    name, _, number = address.partition("://")[2].rpartition(":")
    is_anywhere = host in ("0.0.0.0", "::") and address.startswith("https:")
    return port in (0, int(number)) and (is_default or is_anywhere or name.strip("[]") == host)


def _check_host(host: str) -> str:
    import ipaddress

    try:
        return str(ipaddress.ip_address("127.0.0.1" if host == "localhost" else host))
    except ValueError:
        raise UserError(
            f"--host {host[:60]!r} is not an address of this machine.",
            hint="give its IP address, or 0.0.0.0 for all it has; then everything is encrypted",
        ) from None


def _check_port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 5 and int(text) < 65536):
        raise UserError(f"--port {text[:40]!r} is not a port.", hint="give it a number up to 65535")
    return int(text)


def down(argv: Sequence[str]) -> int:
    """`shoal down`: end the service; where none is up, or with `--cluster`, the cluster."""
    parser = Parser(
        "down",
        "End the service of this machine; jobs that run go on, and those that wait are kept. Where no service is up, "
        "or with --cluster, end the cluster that was begun here.",
        "[--cluster [--force]] [--json]",
    )
    parser.add_argument("--cluster", action="store_true", help="end the cluster")
    parser.add_argument("--force", action="store_true", help="end the cluster even if something runs on it")
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(argv)
    from shoal.engine.clusters import cluster_folder, read_cluster
    from shoal.service import places

    folder = places.service_folder()
    found = places.read_up(folder)
    has_cluster = read_cluster(cluster_folder()) is not None
    if options.cluster or (found is None and has_cluster):
        from shoal.cluster import verbs

        return verbs.down([flag for flag in argv if flag != "--cluster"])
    if found is None:
        raise UserError("No service is up on this machine.", hint="`shoal up` starts one")
    from shoal.service import starting

    counts = _counts() if places.is_up(found) else {}
    starting.stop(folder, found, say)
    running = sum(counts.get(state, 0) for state in ("starting", "running", "stopping"))
    waiting = counts.get("waiting", 0)
    text = "the service is down"
    if running or waiting:
        text += f"; {many(running, 'job')} still running, {waiting} waiting for the next `shoal up`"
    if has_cluster:
        text += "\nthe cluster is still up; `shoal down --cluster` ends it"
    put({"status": "down", "num_running": running, "num_waiting": waiting}, options.json, text)
    return 0


def _counts() -> dict[str, int]:
    from shoal.service.client import Client

    try:
        with Client(patience_seconds=2.0) as client:
            return dict(client.queue(limit=1)["counts"])
    except ShoalError:
        return {}
