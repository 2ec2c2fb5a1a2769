"""Sending a run to an exporter: all there is, and what comes while it goes on. Also a process of its own for that.

A launcher starts one such process for each `--to`. Whatever a tool does there (importing for seconds, hanging in a
network, crashing), the run does not notice.
"""

import json
import os
import select
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shoal.files import mask
from shoal.observe.clean import one_line
from shoal.observe.exporters import KINDS, Exporter, Target, parse_target
from shoal.observe.journal import JournalReader
from shoal.observe.lines import Report
from shoal.observe.runs import RunInfo, read_run
from shoal.observe.scalars import Scalars, ScalarsReader
from shoal.spec.errors import ShoalError
from shoal.spec.event import Event

POLL_SECONDS = 1.0
MAX_UNSENT = 100_000
AT_ONCE = 5000
"""Rows handed over in one call, so that progress can be told, and a failure repeats little."""


@dataclass(slots=True)
class Sent:
    """How much has arrived."""

    steps: int = 0
    numbers: int = 0
    events: int = 0


class Sender:
    """Takes one run to one exporter. A failing tool is told of once, and tried again; so is when it works again.

    Of what a failing tool did not take, the newest 100,000 rows and events are kept.
    """

    def __init__(self, run: RunInfo, target: Target, report: Report, *, since: float = 0.0) -> None:
        self.sent = Sent()
        self.is_failing = False
        self._run, self._target, self._report, self._since = run, target, report, since
        self._rows = ScalarsReader(run.path, since)
        self._journal = JournalReader(run.path)
        self._unsent_rows: deque[Scalars] = deque(maxlen=MAX_UNSENT)
        self._unsent_events: deque[Event] = deque(maxlen=MAX_UNSENT)
        self._has_failed = False
        self._exporter: Exporter = KINDS[target.kind].open(run, target.place)

    def poll(self, progress: Callable[[Sent], None] | None = None, *, is_over: bool = False) -> bool:
        """Send what is new; False where the tool did not take it."""
        self._unsent_rows.extend(self._rows.read_rest() if is_over else self._rows.read_new())
        self._unsent_events.extend(event for event in self._journal.read_new() if event.time >= self._since)
        try:
            self._send(progress)
        except Exception as error:  # a tool may raise anything
            self.is_failing = True
            if not self._has_failed:
                self._has_failed = True
                self._report(
                    f"{self._target} does not take numbers: {tell_error(error)}. The run goes on; it is tried again."
                )
            return False
        if self.is_failing:
            self.is_failing = False
            self._report(f"{self._target} takes numbers again.")
        return True

    def close(self, status: str) -> bool:
        """End with the tool; False where it did not work."""
        try:
            self._exporter.close(status)
        except Exception as error:
            self._report(f"{self._target} did not end well: {tell_error(error)}.")
            return False
        return not self.is_failing

    def _send(self, progress: Callable[[Sent], None] | None) -> None:
        while self._unsent_events:
            self._exporter.event(self._unsent_events[0])
            self._unsent_events.popleft()
            self.sent.events += 1
        while self._unsent_rows:
            rows = [self._unsent_rows[place] for place in range(min(AT_ONCE, len(self._unsent_rows)))]
            self._exporter.write(rows)
            for row in rows:
                self._unsent_rows.popleft()
                self.sent.steps += "loss" in row.values
                self.sent.numbers += len(row.values)
            if progress is not None:
                progress(self.sent)


def tell_error(error: Exception) -> str:
    """What a tool of others' raised, in one line."""
    text = error.message if isinstance(error, ShoalError) else f"{type(error).__name__}: {error}"
    if isinstance(error, ShoalError) and error.why:
        text = f"{text.rstrip('.')} ({error.why})"
    return mask(one_line(text))[:400].rstrip(".")


def follow(
    sender: Sender,
    is_over: Callable[[], bool],
    *,
    wait: Callable[[float], object] = time.sleep,
    progress: Callable[[Sent], None] | None = None,
) -> bool:
    """Send until the run is over, and the rest of it then; False where the tool did not take all."""
    while not is_over():
        sender.poll(progress)
        wait(POLL_SECONDS)
    return sender.poll(progress, is_over=True)


def main() -> int:
    """The process beside a launcher. Its order is a line of JSON on stdin; what it has to tell goes to stdout.

    It ends when stdin does: the run is over, or its launcher is dead. Status and end of the run are in its folder.
    """
    order: dict[str, Any] = json.loads(read_line(0))
    report = say_aloud()
    run = read_run(order["run_dir"])
    try:
        if run is None:
            return 1
        sender = Sender(run, parse_target(order["to"]), report, since=float(order["since"]))
    except Exception as error:
        target = mask(order["to"])
        hint = f"; {error.hint}" if isinstance(error, ShoalError) and error.hint else ""
        report(f"nothing is sent to {target}: {tell_error(error)}{hint}")
        return 1
    is_whole = follow(sender, has_ended, wait=wait_for_end)
    ended = read_run(order["run_dir"])
    is_closed = sender.close(ended.status if ended is not None else "lost")
    if not (is_whole and is_closed):
        report(f"not all was sent; once it works again: `shoal send {run.name} --to {mask(order['to'])}`")
    return 0 if is_whole and is_closed else 1


def say_aloud() -> Report:
    """Make this process one beside a launcher. Only what is reported goes to its stdout: a tool may print, too."""
    words = os.fdopen(os.dup(1), "w", buffering=1)
    with open(os.devnull, "r+b") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    os.nice(10)

    def report(text: str) -> None:
        words.write(f"{text}\n")

    return report


def read_line(fd: int) -> bytes:
    """The order that a process beside a launcher was given."""
    line = b""
    while not line.endswith(b"\n") and (data := os.read(fd, 1)):
        line += data
    return line


def wait_for_end(seconds: float) -> None:
    """Sleep, but not beyond the end of the launcher."""
    select.select([0], [], [], seconds)


def has_ended() -> bool:
    """Whether the launcher has closed our input, or is dead."""
    return bool(select.select([0], [], [], 0)[0]) and os.read(0, 4096) == b""


if __name__ == "__main__":
    sys.exit(main())
