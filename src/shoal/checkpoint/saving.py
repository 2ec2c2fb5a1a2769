"""A save under way: what became of it, and when to try again if it failed."""

import threading
import time

from shoal.checkpoint import disk
from shoal.checkpoint.fence import Stale
from shoal.files import Place
from shoal.spec.errors import BugError, ShoalError, UserError

PAUSES = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
"""Seconds between tries; the last one is repeated."""

_LOOK_SECONDS = 0.25


class Retries:
    """The pauses of one save, and a way to end them from another thread.

    A process whose main thread has ended gets one last try, so that a disk that stays full cannot keep it alive.
    """

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._is_last = False
        self._is_over = False
        self._num_pauses = 0

    def pause(self) -> bool:
        """Wait until the next try is due, and say whether there shall be one."""
        if self._is_last:
            return False
        due = time.monotonic() + PAUSES[min(self._num_pauses, len(PAUSES) - 1)]
        self._num_pauses += 1
        while time.monotonic() < due and not self._is_last and not self._is_over:
            self._asked.wait(min(_LOOK_SECONDS, max(0.0, due - time.monotonic())))
            self._is_last = self._is_last or not threading.main_thread().is_alive()
        return not self._is_over

    def finish(self) -> None:
        """One more try at once, and no more after it."""
        self._is_last = True
        self._asked.set()

    def stop(self) -> None:
        """No more tries."""
        self._is_over = self._is_last = True
        self._asked.set()


class Saving:
    """A save under way. Training need not look at it: failures are also told to `on_event`.

    `path` is set once the checkpoint is durable, `error` while it could not be saved; `seconds` is what writing took.
    A save that failed is tried again (see `FolderStore`), so an error may turn into a path later.
    """

    def __init__(self, step: int, num_bytes: int) -> None:
        self.step = step
        self.num_bytes = num_bytes
        self.path: Place | None = None
        self.error: ShoalError | None = None
        self.seconds = 0.0
        self.retries = Retries()
        self._ended = threading.Event()
        self._settled = threading.Event()

    @property
    def is_durable(self) -> bool:
        return self.path is not None

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until the first try ended, durable or failed; False if the time ran out before."""
        return self._ended.wait(timeout_seconds)

    def wait_settled(self) -> None:
        """Wait until it is durable or given up."""
        self._settled.wait()

    def end(self, seconds: float) -> None:
        """Called after each try, by the store that writes it."""
        self.seconds = seconds
        self._ended.set()

    def settle(self) -> None:
        """Called once, when no more tries follow."""
        self._settled.set()


def may_work_later(error: ShoalError | None) -> bool:
    """The machine's fault, not ours, and not that of a worker that was left behind."""
    return isinstance(error, UserError)


def as_shoal_error(error: Exception, step: int, folder: Place) -> ShoalError:
    """What went wrong with a save, in words."""
    if isinstance(error, Stale):
        return error.at(step=step)
    message = f"The checkpoint of step {step} could not be saved in {folder}; training goes on."
    if isinstance(error, UserError):
        return UserError(message, why=f"{error.message} {error.why}", hint=error.hint, step=step)
    if isinstance(error, OSError):
        why, hint = disk.explain(error)
        return UserError(message, why=why, hint=hint, step=step)
    if isinstance(error, MemoryError):
        return UserError(message, why=str(error), hint="use a machine with more memory, or fewer workers", step=step)
    return BugError(message, why=f"{type(error).__name__}: {error}", hint="please report this", step=step)
