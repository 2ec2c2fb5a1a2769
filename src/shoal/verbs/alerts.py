"""`shoal alerts`: what a run would have woken you up for, and whether alerts reach you."""

import json
import os
import sys
import time
from collections.abc import Sequence

from shoal.alerting import Alerts, read_alerts
from shoal.engine.env import shoal_home
from shoal.observe import journal
from shoal.observe.alert_sinks import deliver, note_of
from shoal.observe.alerts import Alert, replay
from shoal.observe.clean import clean
from shoal.observe.metrics import read as read_metrics
from shoal.observe.runs import RunInfo, find_run
from shoal.observe.system import SystemReader
from shoal.run import ALERTS_FILE
from shoal.spec.errors import UserError
from shoal.verb_parser import Parser


def main(argv: list[str]) -> int:
    """What `shoal alerts RUN` and `shoal alerts --test` do; returns the exit code."""
    parser = Parser("alerts", "What was wrong in a run, and when; or try where alerts go.", "RUN | --test [--json]")
    parser.add_argument("run", metavar="RUN", nargs="?")
    parser.add_argument("--test", action="store_true", help="send a trial alert to every place there is")
    parser.add_argument(
        "-o", "--option", metavar="K=V", action="append", default=[], help="such as alert.no_progress=60"
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(argv)
    if options.test == (options.run is not None):
        raise UserError("Name a run, or use --test.", hint="for example: `shoal alerts last`")
    given = dict(text.partition("=")[::2] for text in options.option)
    path = os.path.join(shoal_home(), ALERTS_FILE)
    alerts = read_alerts(path, given)
    if options.test:
        return _try_all(alerts, path, as_json=options.json)
    return _tell(find_run(shoal_home(), options.run), alerts, as_json=options.json)


def _try_all(alerts: Alerts, path: str, *, as_json: bool) -> int:
    if not alerts.sinks:
        raise UserError(
            "Alerts go to the terminal only.",
            why=f"{clean(path)} names no other place",
            hint="docs/alerts.md has an example of it",
        )
    trial = Alert(
        rule="trial",
        message="This is a trial: alerts of your runs will look like this.",
        why="`shoal alerts --test` was called",
        hint="nothing",
        time=time.time(),
    )
    results = deliver(alerts.sinks, note_of(trial, "trial", os.uname().nodename))
    if as_json:
        facts = [{"to": name, "is_sent": not why, "why": why} for name, why in results]
        sys.stdout.write(json.dumps(facts) + "\n")
    else:
        for name, why in results:
            sys.stdout.write(f"{'FAILED' if why else 'sent  '}  {name}{f': {why}' if why else ''}\n")
    return 1 if any(why for _, why in results) else 0


def find_alerts(run: RunInfo, alerts: Alerts) -> list[Alert]:
    """What the rules find in a run as it is recorded."""
    events = [event for event in journal.read(os.path.join(run.path, "journal.jsonl")) if event.kind != "alert"]
    metrics = read_metrics(run.path)
    # The run folder's disk is that of the launcher; other machines have disks of their own.
    samples = SystemReader(run.path).read_new().get(run.host, [])
    until = time.time() if run.status == "running" else None
    return list(replay(metrics, events, alerts.limits, samples=samples, until=until))


def _tell(run: RunInfo, alerts: Alerts, *, as_json: bool) -> int:
    found = find_alerts(run, alerts)
    if as_json:
        plain = [journal.to_plain(alert.plain()) for alert in found]
        sys.stdout.write(json.dumps({"run": run.name, "alerts": plain}) + "\n")
    else:
        sys.stdout.write(_text(run, found))
    return 0


def _text(run: RunInfo, found: Sequence[Alert]) -> str:
    if not found:
        return f"{clean(run.name)}: nothing was wrong\n"
    lines = []
    for alert in found:
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(alert.time))
        word = "over" if alert.is_resolved else alert.severity
        lines.append(f"{moment}  {word:7}  {alert.rule:17}  {clean(alert.message)}")
        for name, text in (("why", alert.why), ("do", alert.hint if not alert.is_resolved else "")):
            lines += [f"{'':21}{name:>7}: {clean(text)}"] if text else []
    return "\n".join(lines) + "\n"
