"""Wiring: alerts of a run that goes on, and where they go. `~/.shoal/alerts.toml` and `-o alert.*` say how."""

import os
import shutil
import time
import tomllib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.engine.env import inherited_env
from shoal.engine.fit import parse_bytes
from shoal.observe.alert_sinks import Command, Email, Post, Sink, Webhook, join_all, note_of
from shoal.observe.alerts import NAMES, Alert, Limits, Memory, Sight, judge
from shoal.observe.clean import clean
from shoal.observe.journal import JournalReader
from shoal.observe.metrics import MetricsReader
from shoal.spec.errors import UserError
from shoal.spec.event import Event
from shoal.verb_parser import unknown

LOOK_SECONDS = 1.0
END_SECONDS = 5.0
"""How long sinks have for the last alerts when the run is over."""
_NUMBERS = ("no_progress", "straggler", "cool_down")
OPTIONS = (*_NUMBERS, "disk_low", "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class Alerts:
    """What is an alert, and where it goes."""

    limits: Limits = field(default_factory=Limits)
    sinks: tuple[Sink, ...] = ()


class AlertWatch:
    """Judges one run, once a second. Nothing is done between calls of `look`; sinks have threads of their own."""

    def __init__(
        self,
        run_dir: str,
        alerts: Alerts,
        write: Callable[[Event], None],
        show: Callable[[str], None],
        *,
        since: float = 0.0,
    ) -> None:
        self._run_dir, self._limits, self._write, self._show = run_dir, alerts.limits, write, show
        self._since = since
        self._metrics = MetricsReader(run_dir)
        self._journal = JournalReader(run_dir)
        self._memory = Memory()
        self._problems: deque[str] = deque(maxlen=100)
        self._posts = [Post(sink, self._problems.append) for sink in alerts.sinks]
        self._due = 0.0

    def look(self, last: Event | None = None) -> None:
        """Tell what is new. `last` is the event with which the journal will end."""
        if last is None and time.monotonic() < self._due:
            return
        self._due = time.monotonic() + LOOK_SECONDS
        for alert in judge(self._see(last), self._memory, self._limits):
            self._tell(alert)
        while self._problems:
            self._show(self._problems.popleft())

    def close(self) -> None:
        """Let the last alerts arrive."""
        join_all(self._posts, END_SECONDS)
        self._posts.clear()
        while self._problems:
            self._show(self._problems.popleft())

    def _tell(self, alert: Alert) -> None:
        self._write(alert.event())
        if not alert.is_told:
            self._show(f"alert: {alert.text()}")
        note = note_of(alert, os.path.basename(self._run_dir), os.uname().nodename)
        for post in self._posts:
            post.offer(note)

    def _see(self, last: Event | None) -> Sight:
        steps = {
            rank: new
            for rank, rows in self._metrics.read_new().items()
            if (new := [row for row in rows if row.time >= self._since])
        }
        try:
            disk = shutil.disk_usage(self._run_dir)
        except OSError:
            disk = None
        events = [event for event in self._journal.read_new() if event.time >= self._since]
        return Sight(
            now=time.time(),
            steps=steps,
            events=[*events, last] if last is not None else events,
            disk_free=disk.free if disk else None,
            disk_total=disk.total if disk else None,
        )


def read_alerts(path: str, options: Mapping[str, str]) -> Alerts:
    """What the file and options of a run say. Raises UserError for what cannot be."""
    config = _read_file(path)
    where = clean(path)
    known = ("to", *OPTIONS)
    for name in config:
        if name not in known:
            raise unknown(name, f"setting in {where}", known, f"it has {', '.join(known)}")
    limits = _limits(Limits(), {name: config[name] for name in OPTIONS if name in config}, where, "")
    own = {name: text for name, text in options.items() if name.startswith("alert.")}
    plain: dict[str, Any] = {}
    for name, text in own.items():
        short = name.removeprefix("alert.")
        if short not in OPTIONS:
            raise unknown(name, "option", [f"alert.{each}" for each in OPTIONS], "see docs/alerts.md")
        plain[short] = text.split(",") if short == "off" else text
    limits = _limits(limits, plain, "-o", "alert.")
    places = config.get("to", [])
    if not isinstance(places, list) or not all(isinstance(place, dict) for place in places):
        raise UserError(f"`to` in {where} is not a list of tables.", hint="begin each place with `[[to]]`")
    return Alerts(limits=limits, sinks=tuple(_sink(place, where) for place in places))


def _read_file(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(
            f"Cannot read {clean(path)}.",
            why=str(error),
            hint="mend it, or move it away: docs/alerts.md has an example",
        ) from error


def _limits(limits: Limits, given: Mapping[str, Any], where: str, prefix: str) -> Limits:
    for name, value in given.items():
        if name == "off":
            rules = [str(rule).strip() for rule in (value if isinstance(value, list) else [value])]
            for rule in rules:
                if rule not in (*NAMES, "all"):
                    raise unknown(rule, f"rule to turn off in {where}", NAMES, f"there are {', '.join(NAMES)}")
            limits = replace(limits, off=frozenset(NAMES if "all" in rules else rules))
        elif name == "disk_low":
            limits = replace(limits, disk_low=parse_bytes(str(value)))
        else:
            changed: dict[str, Any] = {name: _positive(value, f"{prefix}{name}", where)}
            limits = replace(limits, **changed)
    return limits


def _positive(value: Any, name: str, where: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = -1.0
    if not 0 < number < float("inf") or isinstance(value, bool):
        raise UserError(f"{name} is {value!r} ({where}).", why="it is a number above zero", hint="see docs/alerts.md")
    return number


_KINDS = {
    "webhook": ("webhook", "min_severity"),
    "email": ("email", "from", "smtp", "tls", "user", "password", "password_file", "min_severity"),
    "command": ("command", "min_severity"),
}


def _sink(place: Mapping[str, Any], where: str) -> Sink:
    """One `[[to]]` of the file."""
    kinds = [kind for kind in _KINDS if kind in place]
    if len(kinds) != 1:
        raise UserError(
            f"A place in {where} has {' and '.join(kinds) or 'nothing to send to'}.",
            hint=f"each `[[to]]` has one of {', '.join(_KINDS)}",
        )
    for name in place:
        if name not in _KINDS[kinds[0]]:
            raise unknown(name, f"setting of `{kinds[0]}` in {where}", _KINDS[kinds[0]], "see docs/alerts.md")
    severity = place.get("min_severity", "warning")
    if severity not in ("warning", "error"):
        raise UserError(f"min_severity is {severity!r} ({where}).", hint="use `warning` or `error`")
    return {"webhook": _webhook, "email": _email, "command": _command}[kinds[0]](place, where, severity)


def _webhook(place: Mapping[str, Any], where: str, severity: str) -> Sink:
    url = place["webhook"]
    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        raise UserError(f"A webhook in {where} is not an address.", hint="it begins with https:// or http://")
    return Webhook(url=url, min_severity=severity)


def _command(place: Mapping[str, Any], where: str, severity: str) -> Sink:
    command = place["command"]
    if not isinstance(command, list) or not command or not all(isinstance(part, str) for part in command):
        raise UserError(
            f"A command in {where} is not a list of texts.",
            why="it is started without a shell",
            hint='for example: `command = ["notify-send", "shoal"]`',
        )
    return Command(command=tuple(command), environment=inherited_env(), min_severity=severity)


def _email(place: Mapping[str, Any], where: str, severity: str) -> Sink:
    to = place["email"] if isinstance(place["email"], list) else [place["email"]]
    texts = [*to, place.get("from", to[0] if to else ""), place.get("user", ""), place.get("password", "")]
    if not to or not all(isinstance(text, str) and "\n" not in text for text in texts) or "@" not in str(to[0]):
        raise UserError(f"An e-mail in {where} has no address.", hint='for example: `email = "me@example.org"`')
    host, _, port = str(place.get("smtp", "localhost:25")).rpartition(":")
    tls = place.get("tls", "none" if host in ("localhost", "127.0.0.1", "[::1]") else "starttls")
    if not host or not port.isdecimal():
        raise UserError(
            f"smtp is {place.get('smtp')!r} ({where}).", hint='for example: `smtp = "mail.example.org:587"`'
        )
    if tls not in ("starttls", "tls", "none"):
        raise UserError(f"tls is {tls!r} ({where}).", hint="use `starttls`, `tls` or `none`")
    return Email(
        to=tuple(to),
        sender=texts[len(to)],
        host=host.strip("[]"),
        port=int(port),
        tls=tls,
        user=place.get("user", ""),
        password=_password(place, where),
        min_severity=severity,
    )


def _password(place: Mapping[str, Any], where: str) -> str:
    if "password_file" not in place:
        return str(place.get("password", ""))
    path = os.path.expanduser(str(place["password_file"]))
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"Cannot read the password in {clean(path)} ({where}).", why=str(error), hint="check it"
        ) from error
