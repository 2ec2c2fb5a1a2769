"""`shoal submit`, `cancel`, `ps --cluster`, `logs --cluster`: runs that go on when whoever started them is gone."""

import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, TextIO

from shoal.cluster.asking import ask, say
from shoal.cluster.shipping import BY, COMMAND, RUN, VERSION, Submission
from shoal.observe.clean import clean, columns, fit
from shoal.observe.status import duration, number

STATUS = {
    "PENDING": "pending",
    "RUNNING": "running",
    "SUCCEEDED": "finished",
    "FAILED": "failed",
    "STOPPED": "stopped",
}
STOPPED_CODE = 143
_TITLES = ("RUN", "STATUS", "WORKERS", "TIME", "STEP", "LOSS", "BY", "COMMAND")


def submit(submission: Submission, address: str | None, *, as_json: bool, follow: bool) -> int:
    """Hand a run to a cluster, and say how to get at it; with `follow`, show what it prints until it ends."""
    say(f"asking {address or 'the cluster of this machine'}")
    answer = ask("submit", address, {**asdict(submission), "run_args": list(submission.run_args)})
    name, at = answer["run"], f" --address {address}" if address is not None else ""
    commands = {
        "logs": f"shoal logs {name} --cluster --follow{at}",
        "ps": f"shoal ps --cluster{at}",
        "cancel": f"shoal cancel {name}{at}",
    }
    if as_json and not follow:
        sys.stdout.write(json.dumps({**answer, "commands": commands}) + "\n")
        return 0
    if not as_json:
        told = [f"submitted {name}: it goes on without this terminal", ""]
        about = {"logs": "what it prints", "ps": "how far it is", "cancel": "end it"}
        width = max(map(len, commands.values()))
        told += [f"  {commands[verb]:{width}}   {about[verb]}" for verb in commands]
        told += [f"\nrun folder, on the head: {answer['folder']}"] if answer["folder"] else []
        (sys.stderr if follow else sys.stdout).write("\n".join(told) + "\n\n" * follow + "\n" * (not follow))
    return show(name, address, as_json=as_json, until_end=True) if follow else 0


def show(text: str, address: str | None, *, as_json: bool = False, until_end: bool = False) -> int:
    """Print what a submitted run has printed, and with `until_end` what it prints; returns how it ended, then.

    Ctrl-C ends the showing, and nothing else.
    """
    out = sys.stderr if as_json else sys.stdout
    try:
        job = ask("follow" if until_end else "logs", address, text, out=out)
    except KeyboardInterrupt:
        say(f"\n{text} goes on; `shoal cancel {text}` ends it")
        raise
    if as_json:
        sys.stdout.write(json.dumps(plain_job(job)) + "\n")
    if not until_end:
        return 0
    status = STATUS.get(job["status"], job["status"])
    say(f"{job['notes'][RUN]}: {status}{_why(job)}")
    return exit_code_of(job)


def exit_code_of(job: Mapping[str, Any]) -> int:
    """What a command that waited for a submitted run exits with: the run's own code. Pure."""
    if job["status"] == "SUCCEEDED":
        return 0
    if job["status"] == "STOPPED":
        return STOPPED_CODE
    return int(job["exit_code"] or 1)


def _why(job: Mapping[str, Any]) -> str:
    """What Ray says of a job that failed before it printed anything itself."""
    if job["status"] != "FAILED" or job["exit_code"] is not None:
        return ""
    lines = [line.strip() for line in job["message"].splitlines() if line.strip()]
    return f": {clean(lines[-1])[:400]}" if lines else ""


def cancel(text: str, address: str | None, *, as_json: bool) -> int:
    """End a submitted run, as Ctrl-C would."""
    job = ask("cancel", address, text)
    name, status = job["notes"][RUN], STATUS.get(job["status"], job["status"])
    facts = {**plain_job(job), "was_running": job["was_running"]}
    then = "it has ended" if job["was_running"] else "it had ended before"
    _print(facts, as_json, f"{name}: {status}; {then}")
    return 0


def print_submitted(address: str | None, stream: TextIO, *, as_json: bool, width: int) -> int:
    """What `shoal ps --cluster` does."""
    jobs = ask("list", address, None)
    if as_json:
        stream.write(json.dumps([plain_job(job) for job in jobs]) + "\n")
    elif jobs:
        stream.write(table(jobs, time.time(), width))
    else:
        stream.write("nothing was submitted to this cluster; `shoal submit -n 2 SCRIPT` does\n")
    return 0


def plain_job(job: Mapping[str, Any]) -> dict[str, Any]:
    """A submitted run as `--json` shows it."""
    notes, row = job["notes"], job.get("row") or {}
    return {
        "run": notes[RUN],
        "status": STATUS.get(job["status"], job["status"]),
        "exit_code": job["exit_code"],
        "message": job["message"],
        "started": job["started"],
        "ended": job["ended"],
        "command": notes.get(COMMAND, ""),
        "by": notes.get(BY, ""),
        "version": notes.get(VERSION, ""),
        **{name: row.get(name) for name in ("num_workers", "min_workers", "max_workers", "step", "loss", "path")},
    }


def table(jobs: Sequence[Mapping[str, Any]], now: float, width: int) -> str:
    """Submitted runs as aligned text; the command takes what is left."""
    rows = [_TITLES, *(_cells(plain_job(job), now) for job in jobs)]
    used = [index for index in range(len(_TITLES)) if any(row[index] for row in rows[1:])]
    widths = {index: max(columns(row[index]) for row in rows) for index in used}
    lines = ["  ".join(row[index] + " " * (widths[index] - columns(row[index])) for index in used) for row in rows]
    return "\n".join(fit(line.rstrip(), width) for line in lines) + "\n"


def _cells(job: Mapping[str, Any], now: float) -> tuple[str, ...]:
    code = f" ({job['exit_code']})" if job["exit_code"] else ""
    is_elastic = job["min_workers"] is not None
    workers = "" if job["num_workers"] is None else str(job["num_workers"])
    return (
        clean(job["run"]),
        clean(job["status"]) + code,
        workers + (f" of {job['min_workers']}:{job['max_workers']}" if is_elastic else ""),
        "" if job["started"] is None else duration(max(0.0, (job["ended"] or now) - job["started"])),
        "" if job["step"] is None else str(job["step"]),
        number(job["loss"]) if isinstance(job["loss"], int | float) else str(job["loss"] or ""),
        clean(job["by"]),
        clean(job["command"]),
    )


def submitter() -> str:
    """Who submits, as others are told: USER@HOST."""
    import pwd

    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def _print(facts: Mapping[str, Any], as_json: bool, text: str) -> None:
    sys.stdout.write((json.dumps(facts) if as_json else text) + "\n")
