"""Verbs of jobs in the queue: `queue`, `cancel`, `hold`, `release`, `requeue`, `resize`."""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shoal.spec.errors import UserError
from shoal.verb_parser import Parser, add_address, parse_count
from shoal.verbs.printing import many, put, size, table, width

MAX_ROWS = 200
_JOB = re.compile(r"(job-)?\d{1,15}(-\d{1,15})?", re.ASCII)


def queue(argv: Sequence[str]) -> int:
    """`shoal queue`: jobs that run and wait, why they wait and for how long."""
    parser = Parser("queue", "Show jobs that run and wait: why, where in line, and how long.", "[JOB] [OPTIONS]")
    parser.add_argument("job", metavar="JOB", nargs="?", help="all that is known of this one")
    parser.add_argument("-a", "--all", action="store_true", help="also those that are over, the newest first")
    parser.add_argument("--mine", action="store_true", help="only yours")
    parser.add_argument("--owner", metavar="NAME", help="only those of this person")
    parser.add_argument("--state", metavar="STATE", help="waiting, held, running, finished, failed, ...")
    parser.add_argument("--search", metavar="TEXT", help="only those with this in their number, name or owner")
    parser.add_argument("--limit", metavar="N", help=f"at most so many (default: {MAX_ROWS}; as JSON all)")
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(argv)
    from shoal.service.client import LOOK_PATIENCE_SECONDS, Client

    with Client(patience_seconds=LOOK_PATIENCE_SECONDS) as client:
        if options.job is not None:
            told = client.job(options.job)
            put(told, options.json, tell_job(told))
            return 0
        limit = parse_count(options.limit, "--limit") if options.limit else 100_000 if options.json else MAX_ROWS
        query = {"owner": client.me()["name"] if options.mine else options.owner, "state": options.state}
        query |= {"search": options.search, "all": "1" if options.all else None, "limit": limit}
        told = client.queue(**{name: value for name, value in query.items() if value is not None})
    put(told, options.json, tell_queue(told, width(), is_filtered=len(argv) > 0))
    return 0


_TITLES = ("JOB", "NAME", "OWNER", "STATE", "WORKERS", "CLASS", "PRIO", "TIME", "EXPECTED")


def tell_queue(told: Mapping[str, Any], most: int, *, is_filtered: bool = False) -> str:
    """The queue as people read it: a line for each job, and below those that wait a line that says why. Pure."""
    rows = told["jobs"]
    if not rows:
        empty = "no such job" if is_filtered else "the queue is empty; `shoal submit SCRIPT` puts a job into it"
        return "\n".join([empty, *_problems(told)])
    text = table(_TITLES, [_cells(row) for row in rows], most, "JOB PRIO TIME").splitlines()
    lines = [text[0]]
    for line, row in zip(text[1:], rows, strict=True):
        lines.append(line)
        reason = row["why"] or (row["message"] if row["state"] == "failed" else "")
        if reason:
            lines.append(_indent(reason, most))
    if told["total"] > len(rows):
        lines.append(f"... and {told['total'] - len(rows)} more; `--limit N` shows more, `--search TEXT` fewer")
    return "\n".join([*lines, *_problems(told)])


def _problems(told: Mapping[str, Any]) -> list[str]:
    return [f"problem: {name}: {text}" for name, text in told.get("problems", {}).items() if text]


def _indent(text: str, most: int) -> str:
    from textwrap import fill

    from shoal.observe.clean import one_line

    return fill(
        one_line(text), most, initial_indent="     ", subsequent_indent="     ", max_lines=3, placeholder=" …"
    )


def _cells(row: Mapping[str, Any]) -> tuple[object, ...]:
    from shoal.observe.status import duration

    state = f"waiting #{row['position']}" if row["state"] == "waiting" and row["position"] else row["state"]
    seconds = row["waited_seconds"] if row["state"] in ("waiting", "held") else row["run_seconds"]
    return (
        row["job"],
        row["name"] if row["index"] is None else f"{row['name']}[{row['index']}]",
        row["owner"],
        state,
        _workers(row),
        row["class"],
        row["priority"] or "",
        duration(seconds),
        _expected(row),
    )


def _expected(row: Mapping[str, Any]) -> str:
    """When it starts, or how much of it is left."""
    from shoal.observe.status import duration

    if row["eta_seconds"] is not None:
        return f"in {duration(row['eta_seconds'])}"
    return f"{duration(row['left_seconds'])} left" if row["nodes"] and row["left_seconds"] is not None else ""


def _workers(row: Mapping[str, Any]) -> str:
    bounds = f"{row['min_workers']}:{row['max_workers']}" if row["is_elastic"] else str(row["max_workers"])
    return f"{row['workers']} of {bounds}" if row["nodes"] else bounds


def tell_job(told: Mapping[str, Any]) -> str:
    """One job, a fact a line. Pure but for the time zone."""
    from shoal.observe.clean import one_line
    from shoal.observe.status import duration

    needs = [f"{told['cores']:g} core" + "s" * (told["cores"] != 1)]
    needs += [size(told["memory_bytes"])] if told["memory_bytes"] else []
    needs += [f"{told['gpus']:g} GPUs"] if told["gpus"] else []
    needs += [f"{size(told['disk_bytes'])} of disk"] if told["disk_bytes"] else []
    limit = told["time_limit_seconds"]
    facts = {
        "job": f"{told['job']}  {told['name']}" + ("" if told["index"] is None else f"[{told['index']}]"),
        "state": told["state"] + (f", number {told['position']} in line" if told["position"] else ""),
        "why": told["why"],
        "starts": "" if told["eta_seconds"] is None else f"in about {duration(told['eta_seconds'])}",
        "left" if told["nodes"] else "takes": _left(told),
        "stopping": f"and starting again takes it {duration(told['pause_seconds'])}"
        if told.get("pause_seconds")
        else "",
        "ended": told["message"] or told["cause"],
        "decided": f"{_date(told['changed'])}  {told['change']}" if told["change"] else "",
        "exit code": "" if told["exit_code"] is None else told["exit_code"],
        "owner": told["owner"] + (f" ({told['account']})" if told["account"] != told["owner"] else ""),
        "class": f"{told['class']}, priority {told['priority']}, partition {told['partition']}",
        "workers": f"{_workers(told)}, each with {', '.join(needs)}",
        "data": ", ".join(told.get("data", ())),
        "nodes": ", ".join(f"{name} ({count})" for name, count in told["nodes"].items()),
        "after": ", ".join(map(str, told["after"])),
        "submitted": _date(told["submitted"]),
        "started": _date(told["started"]),
        "over": _date(told["ended"]),
        "ran": duration(told["run_seconds"]) + (f" of {duration(limit)}" if limit else ""),
        "attempts": told["attempts"] or "",
        "stopped": _stops(told),
        "step": "" if told["step"] is None else told["step"],
        "command": " ".join(told["args"]),
        "folder": told["dir"],
        "run": f"{told['run']}  (`shoal logs {told['run']}`)" if told["attempts"] else "",
    }
    lines = [f"{name:9}  {one_line(value)}" for name, value in facts.items() if value != ""]
    return "\n".join([*lines, *_speed(told)])


def _left(told: Mapping[str, Any]) -> str:
    """How long it is expected to run still, how sure that is, and by what."""
    from shoal.observe.status import duration

    if told["left_seconds"] is None:
        return ""
    return f"about {duration(told['left_seconds'])} ± {told['left_spread']:.0%}, by {told['left_told_by']}"


def _speed(told: Mapping[str, Any]) -> Iterator[str]:
    """What was expected of each size before it had it, and what it was."""
    from shoal.observe.finding import ms

    for made in told["predictions"]:
        size = f"{made['workers']} worker{'s' * (made['workers'] != 1)}"
        where = f" on {made['nodes']} nodes" if made["nodes"] > 1 else ""
        measured = ms(made["measured_seconds"])
        expected = f"was expected to take {ms(made['expected_seconds'])} ± {made['spread']:.0%}, and took {measured}"
        # Of a job that is the first of its kind nothing is expected.
        yield f"speed      {size}{where}: a step {expected if made['spread'] < 1 else f'took {measured}'}"


def _stops(told: Mapping[str, Any]) -> str:
    """How often it was stopped for others, how often it may be, and what that cost."""
    if not told["is_preemptible"]:
        return "never for others"
    most = told["max_preemptions"]
    if not told["num_preempted"] and most is None:
        return ""
    of = f" time{'s' * (told['num_preempted'] != 1)}" if most is None else f" of {most} times"
    cost = "" if told["stop_seconds"] is None else f"; the last one cost {told['stop_seconds']:.1f} s"
    return f"{told['num_preempted']}{of} for others{cost}"


def _date(seconds: float | None) -> str:
    return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def is_job(text: str) -> bool:
    """Whether this is how a job of a service is named: 17, job-17, 17-26."""
    return _JOB.fullmatch(text) is not None


def cancel(argv: Sequence[str]) -> int:
    """`shoal cancel`: end jobs of the service, or a run that was submitted to a cluster."""
    usage = "JOB [JOB ...] [--json]\n       shoal cancel RUN [--address HOST:PORT] [--json]"
    about = "End jobs (17, or 17-26 for ten of them), or by its name a run that was submitted to a cluster."
    parser = Parser("cancel", about, usage)
    parser.add_argument("jobs", metavar="JOB", nargs="+")
    add_address(parser)
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(argv)
    if options.address is None and all(map(is_job, options.jobs)):
        return _change("cancel", options.jobs, as_json=options.json)
    if len(options.jobs) > 1:
        name = next(text for text in options.jobs if options.address is not None or not is_job(text))
        raise UserError(f"{name!r} is not the number of a job.", hint="name one run, or jobs by their numbers")
    from shoal.cluster import submitted
    from shoal.engine.clusters import cluster_folder, read_cluster
    from shoal.engine.env import has_ray_address
    from shoal.service.places import find_login

    is_alone = options.address is None and read_cluster(cluster_folder()) is None and not has_ray_address()
    if is_alone and find_login() is not None:
        raise UserError(f"{options.jobs[0][:60]!r} is not the number of a job.", hint="`shoal queue` shows them")
    return submitted.cancel(options.jobs[0], options.address, as_json=options.json)


_ABOUT = {
    "hold": "Keep jobs that wait from starting, until they are released.",
    "release": "Let jobs start that were held.",
    "requeue": "Put jobs back into the queue: they go on where they saved last, those that are over too.",
}


def hold(argv: Sequence[str]) -> int:
    return _change_named("hold", argv)


def release(argv: Sequence[str]) -> int:
    return _change_named("release", argv)


def requeue(argv: Sequence[str]) -> int:
    return _change_named("requeue", argv)


def _change_named(verb: str, argv: Sequence[str]) -> int:
    parser = Parser(verb, _ABOUT[verb], "JOB [JOB ...] [--json]")
    parser.add_argument("jobs", metavar="JOB", nargs="+", help="17, or 17-26 for ten of them")
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(argv)
    return _change(verb, options.jobs, as_json=options.json)


def resize(argv: Sequence[str]) -> int:
    """`shoal resize`: other workers for a job of the service, or for a run that somebody started."""
    parser = Parser(
        "resize",
        "Change the number of workers of a run, or of a job in the queue: while it runs, if it is elastic.",
        "RUN|JOB -n N|MIN:MAX [--json]",
    )
    parser.add_argument("run", metavar="RUN|JOB")
    parser.add_argument(
        "-n", "--num-workers", metavar="N", required=True, help="how many from now on; a job has bounds"
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(argv)
    if is_job(options.run) and _has_service():
        return _change("resize", [options.run], as_json=options.json, workers=options.num_workers)
    from shoal.verbs import asking

    return asking.resize(list(argv))


def _has_service() -> bool:
    from shoal.service.places import find_login

    return find_login() is not None


_DONE = {
    "cancel": "cancelled",
    "hold": "held",
    "release": "released",
    "requeue": "back in the queue",
    "resize": "resized",
}


def _change(verb: str, jobs: Sequence[str], *, as_json: bool, **more: Any) -> int:
    from shoal.service.client import Client
    from shoal.service.job import parse_numbers

    numbers = parse_numbers(list(jobs))
    with Client() as client:
        told = client.change(verb, numbers, **more)
    put(told, as_json, tell_change(verb, told["jobs"]))
    return 0


def tell_change(verb: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """What became of jobs that were changed: a line each, for many of them one for each outcome. Pure."""

    def outcome(row: Mapping[str, Any]) -> str:
        if row["state"] == row["before"] and row["state"] in ("finished", "failed", "cancelled"):
            return f"was {row['state']} already"
        is_stopping = row["state"] in ("stopping", "running", "starting") and verb in ("cancel", "requeue")
        return "is being stopped" if is_stopping else f"{_DONE[verb]} (it was {row['before']})"

    if len(rows) <= 10:
        return "\n".join(f"job {row['job']}: {outcome(row)}" for row in rows)
    counts: dict[str, int] = {}
    for row in rows:
        counts[outcome(row)] = counts.get(outcome(row), 0) + 1
    return "\n".join(f"{many(count, 'job')}: {what}" for what, count in counts.items())
