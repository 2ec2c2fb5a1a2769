"""`shoal send`: the numbers of a run, for other tools."""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TextIO

from shoal.engine.env import shoal_home
from shoal.observe.exporters import KINDS, Target, parse_target
from shoal.observe.runs import RunInfo, find_run, read_run
from shoal.observe.send import Sender, Sent, follow
from shoal.observe.status import count
from shoal.spec.errors import UserError
from shoal.verb_parser import Parser

SHOW_SECONDS = 0.5


def main(argv: list[str]) -> int:
    """What `shoal send RUN --to ...` does; returns the exit code."""
    parser = Parser("send", "Take the numbers of a run to other tools.", "RUN --to TOOL[:PLACE] [--follow] [--json]")
    parser.add_argument("run", metavar="RUN")
    parser.add_argument(
        "--to", metavar="TOOL[:PLACE]", action="append", required=True, help=f"{', '.join(KINDS)}; may be repeated"
    )
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the run ends")
    parser.add_argument("--json", action="store_true", help="say as JSON what was sent")
    options = parser.parse_args(argv)
    targets = [parse_target(text) for text in dict.fromkeys(options.to)]
    run = find_run(shoal_home(), options.run)
    for target in targets:
        _check(run, target, is_following=options.follow)
    results = _send_all(run, targets, is_following=options.follow)
    if options.json:
        facts = [{"to": str(target), "is_whole": whole, **asdict(sent)} for target, sent, whole in results]
        sys.stdout.write(json.dumps({"run": run.name, "sent": facts}) + "\n")
    else:
        for target, sent, is_whole in results:
            words = f"{sent.steps} steps, {sent.numbers} numbers" + ("" if is_whole else "; not all of them")
            sys.stdout.write(f"{run.name} sent to {target}: {words}\n")
    return 0 if all(whole for _, _, whole in results) else 1


def _check(run: RunInfo, target: Target, *, is_following: bool) -> None:
    if KINDS[target.kind].is_live and not (is_following and run.status == "running"):
        why = "Prometheus asks for what is now" if run.status == "running" else f"the run is over: {run.status}"
        raise UserError(
            f"{run.name} cannot be sent to {target.kind}.",
            why=why,
            hint=f"use `shoal run --to {target.kind}`, or `shoal send RUN --to {target.kind} --follow` while it runs",
        )


def _send_all(run: RunInfo, targets: list[Target], *, is_following: bool) -> list[tuple[Target, Sent, bool]]:
    """One after the other; side by side while a run is followed."""
    senders = [(target, Sender(run, target, _report)) for target in targets]
    progress = _progress(sys.stderr)
    if is_following:
        while _status(run) == "running":
            for _, sender in senders:
                sender.poll(progress)
            time.sleep(1.0)
    status = _status(run)
    results = []
    for target, sender in senders:
        is_whole = follow(sender, lambda: True, progress=progress)
        is_closed = sender.close(status)
        results.append((target, sender.sent, is_whole and is_closed))
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    return results


def _status(run: RunInfo) -> str:
    now = read_run(run.path)
    return now.status if now is not None else "lost"


def _report(text: str) -> None:
    sys.stderr.write(f"shoal: {text}\n")


def _progress(stream: TextIO) -> Callable[[Sent], None] | None:
    if not stream.isatty():
        return None
    shown: dict[str, Any] = {"at": 0.0}

    def show(sent: Sent) -> None:
        if time.monotonic() >= shown["at"] + SHOW_SECONDS:
            shown["at"] = time.monotonic()
            stream.write(f"\r\x1b[K{count(sent.steps)} steps, {count(sent.numbers)} numbers sent")
            stream.flush()

    return show
