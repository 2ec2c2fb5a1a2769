"""Signals that ask a launcher to end, or to pause."""

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

from shoal.spec.errors import UserError

SAME_SECONDS = 0.2
BUSY_SECONDS = 0.2
LOOK_SECONDS = 0.05
GRACE_SECONDS = 2.0
MAX_GRACE_SECONDS = 86400.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def grace_of(options: Mapping[str, str]) -> float:
    """Seconds that workers have to save and end in when a run is stopped: the option `engine.grace`, or 2."""
    text = options.get("engine.grace", str(GRACE_SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.0 <= seconds <= MAX_GRACE_SECONDS:
        raise UserError(f"engine.grace is {text!r}.", hint=f"give it seconds, from 0 to {MAX_GRACE_SECONDS:.0f}")
    return seconds


class Interrupted(BaseException):
    """A stop was asked for, and the launcher hangs in something that may never end, such as a write."""


class StopSignals:
    """Catches Ctrl-C, SIGTERM and a closed terminal while it is open, and says so through `requested` and `wake_fd`.

    A second one, unless it comes at once (a shell and the kernel may both tell us about a closed terminal), calls
    `on_second`. Ctrl-Z pauses the workers with the launcher, through `on_pause` and `on_resume`.
    Signals that were ignored before (`nohup`, `&` in a script) stay ignored. Outside the main thread, where Python
    allows no signal handlers, nothing is caught. The handlers of before come back in the end.
    """

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self.on_second: Callable[[], None] = _nothing
        self.on_pause: Callable[[], None] = _nothing
        self.on_resume: Callable[[], None] = _nothing
        self.wake_fd, self._wake_end = os.pipe()
        self._before: dict[signal.Signals, Any] = {}
        self._busy_since: float | None = None
        self._requested_at = 0.0

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                self._install(number, self._stop)
            self._install(signal.SIGTSTP, self._pause)
            self._install(signal.SIGALRM, self._look)
        return self

    def __exit__(self, *_: object) -> None:
        if self.requested is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
        os.close(self.wake_fd)
        os.close(self._wake_end)

    def attempt(self, act: Callable[..., object], *args: Any) -> bool:
        """Do something that is given up, with False, when a stop was asked for and it takes longer than 0.2 s."""
        try:
            try:
                self._busy_since = time.monotonic()
                act(*args)
            finally:
                self._busy_since = None
        except Interrupted:
            return False
        return True

    def acknowledge(self) -> None:
        """Make `wake_fd` quiet again, once `requested` was seen."""
        os.read(self.wake_fd, 1)

    def _install(self, number: signal.Signals, handler: Callable[[int, FrameType | None], None]) -> None:
        before = signal.getsignal(number)
        if before is not signal.SIG_IGN:
            self._before[number] = before
            signal.signal(number, handler)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self.requested is not None:
            if time.monotonic() > self._requested_at + SAME_SECONDS:
                self.on_second()
            return
        self._requested_at = time.monotonic()
        self.requested = signal.Signals(number)
        os.write(self._wake_end, b"!")
        signal.setitimer(signal.ITIMER_REAL, LOOK_SECONDS, LOOK_SECONDS)

    def _look(self, number: int, frame: FrameType | None) -> None:
        if self._busy_since is not None and time.monotonic() > self._busy_since + BUSY_SECONDS:
            self._busy_since = None
            raise Interrupted

    def _pause(self, number: int, frame: FrameType | None) -> None:
        self.on_pause()
        # Stopping ourselves with the uncatchable one returns when someone says `fg`.
        os.kill(os.getpid(), signal.SIGSTOP)
        self.on_resume()


@contextmanager
def holding_back_ctrl_c() -> Iterator[None]:
    """Ctrl-C raises in the end of this instead of anywhere in it.

    A worker would be left to itself that is half started, and Python loses an error that is raised in the middle of
    an import. Outside the main thread, and where Ctrl-C calls nothing of Python, nothing changes.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    frames: list[FrameType | None] = []
    signal.signal(signal.SIGINT, lambda _, frame: frames.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if frames:
            before(signal.SIGINT, frames[0])


def _nothing() -> None:
    pass
