"""Where alerts go: a webhook, e-mail, a command. Each has a thread of its own; whatever it does, the run goes on."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from shoal.observe.alerts import Alert
from shoal.observe.clean import one_line

PATIENCE_SECONDS = 10.0
TRIES = (0.0, 2.0, 10.0)
"""Seconds to wait before each attempt to deliver an alert."""
MAX_WAITING = 100


class Sink(Protocol):
    """One place. `send` may raise anything, and returns within about PATIENCE_SECONDS if it can."""

    @property
    def name(self) -> str: ...
    @property
    def min_severity(self) -> str: ...

    def send(self, note: Mapping[str, Any]) -> None: ...

    def stop(self) -> None:
        """End what `send` may have started and still waits for."""


def note_of(alert: Alert, run: str, host: str) -> dict[str, Any]:
    """What is sent: plain values. `text` alone is what Slack, Mattermost and Discord's Slack address show."""
    what = "resolved" if alert.is_resolved else alert.severity
    lines = [f"[{what}] {run}: {alert.message}", *([alert.why] if alert.why else [])]
    lines += [f"Do: {alert.hint}"] if alert.hint and not alert.is_resolved else []
    return {"text": "\n".join(lines), "run": run, "host": host, **alert.plain()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """A POST of JSON. The address may be a secret, and is never shown whole."""

    url: str = field(repr=False)
    min_severity: str = "warning"

    @property
    def name(self) -> str:
        from urllib.parse import urlsplit

        return f"webhook at {urlsplit(self.url).hostname}"

    def send(self, note: Mapping[str, Any]) -> None:
        from urllib.error import HTTPError
        from urllib.request import Request, urlopen

        body = json.dumps(note).encode()
        request = Request(self.url, body, {"Content-Type": "application/json", "User-Agent": "shoal"})
        try:
            with urlopen(request, timeout=PATIENCE_SECONDS) as answer:
                answer.read(1 << 16)
        except HTTPError as error:
            error.close()
            raise OSError(f"it answered {error.code} {error.reason}") from None

    def stop(self) -> None:
        """Nothing of it outlives the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Email:
    """A message by SMTP. `tls` is `starttls`, `tls` (from the first byte) or `none`."""

    to: tuple[str, ...]
    sender: str
    host: str
    port: int
    tls: str = "starttls"
    user: str = ""
    password: str = field(default="", repr=False)
    min_severity: str = "warning"

    @property
    def name(self) -> str:
        return f"e-mail to {', '.join(self.to)}"

    def send(self, note: Mapping[str, Any]) -> None:
        import smtplib
        import ssl
        from email.message import EmailMessage

        message = EmailMessage()
        message["Subject"] = one_line(str(note["text"]).partition("\n")[0])[:200]
        message["From"], message["To"] = self.sender, ", ".join(self.to)
        facts = "\n".join(
            f"{name}: {value}" for name, value in note.items() if name != "text" and value not in ("", None)
        )
        message.set_content(f"{note['text']}\n\n{facts}\n")
        context = ssl.create_default_context()
        server: smtplib.SMTP
        if self.tls == "tls":
            server = smtplib.SMTP_SSL(self.host, self.port, timeout=PATIENCE_SECONDS, context=context)
        else:
            server = smtplib.SMTP(self.host, self.port, timeout=PATIENCE_SECONDS)
        with server:
            if self.tls == "starttls":
                server.starttls(context=context)
            if self.user:
                server.login(self.user, self.password)
            server.send_message(message)

    def stop(self) -> None:
        """Nothing of it outlives the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A program, without a shell. It gets the facts as JSON on stdin, and the main ones in variables."""

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    min_severity: str = "warning"
    _running: list["subprocess.Popen[bytes]"] = field(default_factory=list, repr=False, compare=False)

    @property
    def name(self) -> str:
        return f"command {self.command[0]}"

    def send(self, note: Mapping[str, Any]) -> None:
        facts = {
            name: note.get(name) for name in ("run", "rule", "severity", "rank", "message", "hint", "is_resolved")
        }
        told = {f"SHOAL_ALERT_{name.upper()}": _word(value) for name, value in facts.items()}
        process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**self.environment, **told},
            start_new_session=True,
        )
        self._running.append(process)
        try:
            _, trouble = process.communicate(json.dumps(note).encode(), timeout=PATIENCE_SECONDS)
        except BaseException:
            _kill(process)
            process.communicate()
            raise
        finally:
            self._running.remove(process)
        if process.returncode:
            said = one_line(trouble.decode("utf-8", "replace"))[-200:]
            raise OSError(f"it ended with {process.returncode}" + (f": {said}" if said else ""))

    def stop(self) -> None:
        for process in tuple(self._running):
            _kill(process)


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """With what it has started in turn."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)


def _word(value: Any) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else one_line(value)


class Post:
    """Delivers to one sink, in a thread of its own. A sink that fails is told of once, and tried again."""

    def __init__(self, sink: Sink, report: Callable[[str], None], *, tries: Sequence[float] = TRIES) -> None:
        self._sink, self._report, self._tries = sink, report, tries
        self._waiting: queue.Queue[dict[str, Any] | None] = queue.Queue(MAX_WAITING)
        self._is_ending = threading.Event()
        self._has_failed = False
        self._is_given_up = False
        self._thread = threading.Thread(target=self._run, name="shoal-alerts", daemon=True)
        self._thread.start()

    def offer(self, note: dict[str, Any]) -> None:
        """Take an alert; returns at once. One too many is dropped: the sink hangs, and that is told."""
        severe = ("warning", "error")
        if severe.index(note["severity"]) >= severe.index(self._sink.min_severity):
            with contextlib.suppress(queue.Full):
                self._waiting.put_nowait(note)

    def end(self) -> None:
        """Nothing more will come. Whatever is tried again is tried at once."""
        self._is_ending.set()
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)

    def join(self, seconds: float) -> bool:
        """Whether everything was delivered, or given up, within that time."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._fail("it does not answer")
            self._is_given_up = True
            for _ in range(20):  # it may just be about to start something
                self._sink.stop()
                self._thread.join(0.01)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (note := self._waiting.get()) is not None:
            self._deliver(note)
            if self._is_ending.is_set() and self._waiting.empty():
                return

    def _deliver(self, note: dict[str, Any]) -> None:
        for attempt, pause in enumerate(self._tries):
            if attempt:
                self._is_ending.wait(pause)
            if self._is_given_up:
                return
            try:
                self._sink.send(note)
                return
            except Exception as error:  # a sink may raise anything
                self._fail(tell(error))

    def _fail(self, why: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._report(f"alerts do not reach the {self._sink.name}: {why}; `shoal alerts --test` tries it")


def tell(error: Exception) -> str:
    """Why a sink failed, without what might be a secret."""
    if isinstance(error, subprocess.TimeoutExpired):
        return f"it took longer than {error.timeout:.0f} s"
    # Of urllib it is what lies under it. Errors of TLS have a mere code there, and say more themselves.
    reason = getattr(error, "reason", None)
    error = reason if isinstance(reason, Exception) else error
    return one_line(getattr(error, "strerror", None) or error or type(error).__name__)[:300]


def deliver(sinks: Sequence[Sink], note: dict[str, Any]) -> list[tuple[str, str]]:
    """Send to all of them now, once; the name of each, and why it failed or nothing."""
    results = []
    for sink in sinks:
        try:
            sink.send(note)
            results.append((sink.name, ""))
        except Exception as error:
            results.append((sink.name, tell(error)))
    return results


def join_all(posts: Sequence[Post], seconds: float) -> None:
    """Let all of them deliver the rest, side by side."""
    for post in posts:
        post.end()
    deadline = time.monotonic() + seconds
    for post in posts:
        post.join(max(0.0, deadline - time.monotonic()))
