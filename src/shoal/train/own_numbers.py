"""`shoal.log`: numbers of the user's own, kept beside those of the run."""

import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from shoal.engine.env import read_worker
from shoal.observe.points import MAX_NAMES, Point, PointsWriter, check_values, shown
from shoal.observe.recorder import Recorder
from shoal.spec.errors import UserError
from shoal.train.lone import LoneRun

MAX_STEP = 1 << 53
"""Up to here a step is a whole number to every program that may read it."""


def log(values: Mapping[str, Any] | None = None, /, *, step: int | None = None, **more: Any) -> None:
    """Record numbers of your own: `shoal.log(accuracy=0.9)`, `shoal.log({"val/accuracy": 0.9}, step=100)`.

    They are kept in the run folder and shown with the other curves. Any worker may call it; what several workers
    log under one name for one step is shown as their mean. Without `step` they belong to the step that the Trainer
    is in or has just taken; without a Trainer each name is counted from 0. Without a run, one is made.

    Costs some microseconds; a thread writes twice a second. Raises UserError for what is not a number.
    """
    taken = check_values({**(values or {}), **more} if more else values or {})
    if step is not None and not (type(step) is int and 0 <= step < MAX_STEP):
        step = _whole(step)
    _book().add(taken, step)


class Book:
    """Where the numbers of this process go."""

    def __init__(
        self, run_dir: str | None, rank: int, recorder: Recorder | None = None, *, is_own: bool = False
    ) -> None:
        self.run_dir = run_dir
        self.is_own = is_own
        self.pid = os.getpid()
        self._rank = rank
        self._recorder = recorder
        self._writer: PointsWriter | None = None
        self._counts: dict[str, int] = {}
        self._is_full = False

    def add(self, values: dict[str, float], step: int | None) -> None:
        if self.run_dir is None:
            return  # rank 0 of a launcher that is not ours has the only folder
        if self._recorder is not None and self._recorder.at_step is None:
            return  # the others have logged it
        if not values.keys() <= self._counts.keys():
            values = self._admit(values)
        if not values:
            return
        if step is None:
            step = self._next_step(values)
        if self._writer is None:
            self._writer = PointsWriter(self.run_dir, self._rank, _say)
        self._writer.write(Point(step=step, time=time.time(), values=values))

    def _next_step(self, values: Mapping[str, float]) -> int:
        if self._recorder is not None and self._recorder.at_step is not None:
            return self._recorder.at_step
        step = max(map(self._counts.__getitem__, values))
        self._counts.update(dict.fromkeys(values, step + 1))
        return step

    def _admit(self, values: dict[str, float]) -> dict[str, float]:
        for name in values:
            if len(self._counts) < MAX_NAMES:
                self._counts.setdefault(name, 0)
            elif not self._is_full and name not in self._counts:
                self._is_full = True
                _say(f"{MAX_NAMES} names were logged; further ones such as {name!r} are left out")
        return {name: value for name, value in values.items() if name in self._counts}

    def flush(self) -> None:
        """Have what was logged in the run folder, now."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


_current: Book | None = None


def _book() -> Book:
    """That of the launcher's run, of the newest Trainer, or of a run that is made now, for this process alone."""
    global _current
    if _current is None or _current.pid != os.getpid():
        facts = read_worker()
        run_dir = _current.run_dir if _current is not None else facts.run_dir
        is_own = run_dir is None and facts.rank == 0
        _current = Book(LoneRun(None).path if is_own else run_dir, facts.rank, is_own=is_own)
    return _current


def log_to(run_dir: str | None, rank: int, recorder: Recorder) -> Book:
    """From now on numbers of the user's own belong to this run, and to the steps of its trainer."""
    global _current
    if _current is not None and _current.pid == os.getpid():
        _current.close()
    _current = Book(run_dir, rank, recorder)
    return _current


def own_folder() -> str | None:
    """The folder of the run that was made for numbers of this process, before it had a trainer."""
    return _current.run_dir if _current is not None and _current.is_own and _current.pid == os.getpid() else None


def _say(text: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(f"shoal: {text}\n")


def _whole(step: Any) -> int:
    try:
        number = step.item() if hasattr(step, "item") else step
        if isinstance(number, str | bytes | bool) or not 0 <= int(number) == number < MAX_STEP:
            raise ValueError
        return int(number)
    except Exception:  # a user's object may do anything
        raise UserError(
            f"shoal.log got {shown(step)} as step.", hint="give it a whole number from 0 on, or leave it out"
        ) from None
