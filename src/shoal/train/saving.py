"""What becomes of checkpoints: told at once, and once more in the end if the last one is missing."""

import atexit
import os
import sys
from collections.abc import Mapping
from typing import Any, Self

from shoal.observe.recorder import Recorder
from shoal.spec.errors import UserError
from shoal.train import lone


class SaveReport:
    """Listens to the store of one trainer. Training goes on whatever happens here.

    A process that ends without an error, though its last checkpoint could not be saved, has not done what it was
    asked to: its launcher is told so, and the run counts as failed. Nothing is raised before the end, since what the
    script does after training may still save the result elsewhere.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._failure: UserError | None = None
        self._saved_step: int | None = None
        self._pid = os.getpid()
        atexit.register(self._end)

    def tell(self, kind: str, data: Mapping[str, Any]) -> None:
        """Write an event of the store down, and show it where people should know."""
        step = data.get("step")
        self._recorder.event(kind, step, **{name: value for name, value in data.items() if name != "step"})
        if kind == "checkpoint_saved":
            self._saved(step)
        if kind == "checkpoint_failed":
            self._failed(UserError(data["message"], why=data["why"], hint=data["hint"], rank=0, step=step))
        if kind in ("checkpoint_fenced", "fence_failed"):
            say(f"shoal: {data['message']} {data['why']}")
        if kind == "checkpoint_skipped":
            say(f"shoal: skipped the checkpoint {data['path']}: {data['reason']}", self._recorder.rank)

    def _saved(self, step: int | None) -> None:
        self._saved_step = step
        if self._failure is not None:
            self._failure = None
            say(f"shoal: the checkpoint of step {step} was saved")

    def _failed(self, error: UserError) -> None:
        is_known = self._failure is not None and self._failure.hint == error.hint
        self._failure = error
        if is_known:
            say(f"shoal: nor could the checkpoint of step {error.step} be saved")
        else:
            say(error.render().replace("error:", "warning:", 1))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """The trainer is closed: raise if its last checkpoint is missing, unless there is an error already."""
        atexit.unregister(self._end)
        if kind is None and self._failure is not None:
            raise self._missing(self._failure)

    def _missing(self, failure: UserError) -> UserError:
        since = (
            "all that was trained" if self._saved_step is None else f"what was trained after step {self._saved_step}"
        )
        message = f"The last checkpoint, of step {failure.step}, could not be saved: {since} is not on disk."
        return UserError(message, why=failure.why, hint=failure.hint, rank=failure.rank, step=failure.step)

    def _end(self) -> None:
        if self._failure is None or self._pid != os.getpid() or lone.has_failed():
            return
        error = self._missing(self._failure)
        facts = {name: getattr(error, name) for name in ("message", "why", "hint", "exit_code")}
        self._recorder.event("error", error.step, type=type(error).__name__, **facts)
        lone.note_failure()
        say(error.render())


def say(text: str, rank: int = 0) -> None:
    """Tell people something beside the output of the script; only rank 0 does."""
    if rank == 0 and sys.stderr is not None:
        # In one write: prints of the training thread may come at the same moment.
        sys.stderr.write(text + "\n")
