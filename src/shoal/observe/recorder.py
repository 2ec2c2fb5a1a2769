"""What the training loop talks to: events, metrics, and progress, at a cost it does not notice."""

import atexit
import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Self, TextIO

from shoal.observe.console import Console
from shoal.observe.control import ControlPipe
from shoal.observe.gauge import Gauge
from shoal.observe.journal import Journal
from shoal.observe.metrics import MetricsWriter
from shoal.observe.pace import Pace
from shoal.observe.window import Window
from shoal.spec.event import Event, StepMetrics

PROGRESS_SECONDS = 0.2
OTHERS_PROGRESS_SECONDS = 1.0
OFTEN_WORKERS = 16
"""Up to so many workers tell their progress as often as the lead does: all launchers have time for that."""
TOLD_KINDS = frozenset(
    ("error", "step_skipped", "replica_diverged", "checkpoint_failed", "fence_failed", "recording", "recorded")
    + ("pipeline", "tensor_plan")
)
"""Events that the launcher is to hear of at once."""


class Recorder:
    """Records one worker's part of a run.

    With a run folder, events go to its journal and steps to its metrics. Progress goes to the launcher through
    `control_fd`, at most 5 times a second (where workers are many, once a second from all but the lead), with the
    last steps one by one and what the kernel says of this process. Without a launcher rank 0 shows progress itself,
    on stderr. Nothing here raises into the run. A step costs about 4 µs.
    """

    def __init__(
        self,
        run_dir: str | None,
        rank: int,
        world_size: int,
        control_fd: int | None = None,
        *,
        generation: int = 0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank, self.world_size, self.generation = rank, world_size, generation
        self.at_step: int | None = 0
        """The step under way, or the one that was taken last: what the user logs belongs to it. None while a worker
        that came later passes over what the others have done, and have logged."""
        self._clock = clock
        self._pid = os.getpid()
        self._control = ControlPipe(control_fd) if control_fd is not None else None
        self._is_console_ours = console is None and control_fd is None and rank == 0
        self._console = Console(sys.stderr) if self._is_console_ours else console
        if self._console and self._is_console_ours:
            guard_streams(self._console)
        self._journal = Journal(os.path.join(run_dir, "journal.jsonl"), self._report) if run_dir else None
        self._metrics = MetricsWriter(run_dir, rank, self._report) if run_dir else None
        self._pace = Pace(clock())
        self._window, self._gauge, self._equipment = Window(), Gauge(), ""
        self._fresh: list[tuple[StepMetrics, float]] = []
        self._num_steps: int | None = None
        self._enter(world_size, is_lead=rank == 0)
        self._published = -math.inf
        atexit.register(self.close)

    def enter(self, generation: int, world_size: int, *, is_lead: bool) -> None:
        """The World is another now; the lead tells of its progress most often."""
        if self._fresh:
            self._publish(self._clock())  # of the World before; there may be no step more
        self.generation, self.world_size = generation, world_size
        self._enter(world_size, is_lead=is_lead)
        self._window = Window()

    def _enter(self, world_size: int, *, is_lead: bool) -> None:
        self._is_lead = is_lead
        is_often = is_lead or world_size <= OFTEN_WORKERS
        self._progress_every = PROGRESS_SECONDS if is_often else OTHERS_PROGRESS_SECONDS

    def event(self, kind: str, step: int | None = None, **data: Any) -> None:
        """Write an event to the journal; what the launcher should know also goes there, and is never dropped."""
        if kind == "resumed":
            self.at_step = step or 0
        event = self._make(kind, step, data)
        if kind == "worker_settings":
            self._equipment = " ".join(str(data.get(name)) for name in ("device", "precision", "threads"))
        if self._journal:
            self._journal.write(event)
        if kind in TOLD_KINDS and self._control:
            self._control.send(event)

    def step(self, metrics: StepMetrics, num_steps: int | None = None) -> None:
        """Record one step. `num_steps` is how many there will be, where that is known."""
        if self._metrics:
            self._metrics.write(metrics)
        now = self._clock()
        self._fresh.append((metrics, now))  # what follows from it waits until it is told: each step pays for this
        self._num_steps = num_steps
        if now >= self._published + self._progress_every:
            self._publish(now)

    def flush(self) -> None:
        """Have all steps so far in the run folder, now."""
        if self._metrics:
            self._metrics.flush()

    def close(self) -> None:
        """Publish the last progress, write what is left, give the terminal back. Safe to call twice."""
        atexit.unregister(self.close)
        if os.getpid() != self._pid:
            return  # a forked child: all of this is its parent's
        self._pid = -1
        if self._fresh:
            self._publish(self._clock())
        if self._is_console_ours:
            release_streams()
        for part in (self._metrics, self._journal, self._control, self._console if self._is_console_ours else None):
            if part:
                part.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _publish(self, now: float) -> None:
        self._published = now
        for metrics, ended in self._fresh:
            self._pace.add(metrics, ended)
            self._window.add(metrics, ended)
        self._fresh.clear()
        if not self._control and not self._console:
            return
        data = self._pace.summarize(now, self._num_steps, self.world_size)
        data["is_lead"] = self._is_lead
        if self._control:
            data |= {"window": self._window.take(), "strain": self._gauge.read(now), "equipment": self._equipment}
        event = self._make("progress", data.get("step"), data)
        if self._control:
            self._control.offer(event)
        elif self._console:
            self._console.progress(event)

    def _make(self, kind: str, step: int | None, data: dict[str, Any]) -> Event:
        return Event(kind=kind, time=time.time(), rank=self.rank, step=step, generation=self.generation, data=data)

    def _report(self, trouble: str) -> None:
        if self._control:
            self._control.offer(self._make("trouble", None, {"message": trouble}))
        if self._console:
            self._console.note(f"shoal: {trouble}")
        elif sys.stderr:
            print(f"shoal: {trouble}", file=sys.stderr)


class PoliteStream:
    """A standard stream that takes the progress line away before it writes. Everything else is the stream's own."""

    def __init__(self, stream: TextIO, console: Console) -> None:
        self.stream = stream
        self._console = console

    def write(self, text: str) -> int:
        return self._console.give_way(self.stream, text)

    def writelines(self, lines: Any) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def guard_streams(console: Console) -> None:
    """Make prints of this process step around the progress line, where both are on a terminal."""
    if console.is_tty:
        os.register_at_fork(after_in_child=console.renew_lock)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if console.is_tty and stream is not None and stream.isatty():
            setattr(sys, name, PoliteStream(stream, console))


def release_streams() -> None:
    """Give the standard streams back, unless someone has put others in their place since."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, PoliteStream):
            setattr(sys, name, stream.stream)
