"""A run that nobody launched: `python train.py` keeps its own run folder and says itself how it ended."""

import atexit
import os
import random
import sys
import time
from types import TracebackType
from typing import Self

from shoal.engine.env import shoal_home
from shoal.observe import folder
from shoal.spec.errors import ShoalError
from shoal.spec.where import format_error, place_of


class LoneRun:
    """The run folder of this process. Its end is written down when the trainer is closed or the process ends."""

    def __init__(self, run_dir: str | None, is_resumed: bool = False) -> None:
        facts = {"command": [os.path.basename(sys.executable), *sys.argv], "num_workers": 1}
        if run_dir is not None:
            self._folder = folder.claim(run_dir, facts, time.time(), is_new=not is_resumed)
        else:
            script = sys.argv[0] or "notebook"
            self._folder = folder.create(shoal_home(), script, facts, time.time(), random.Random())
        self.path = self._folder.path
        self._pid = os.getpid()
        atexit.register(self._end_with_process)

    def _end_with_process(self) -> None:
        self._end("failed" if _has_failed else "finished", int(_has_failed))

    def _end(self, status: str, exit_code: int) -> None:
        atexit.unregister(self._end_with_process)
        if self._pid == os.getpid():
            self._folder.update(status=status, exit_code=exit_code, ended=time.time())
            self._folder.close()
        self._pid = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._end("finished" if error is None else "failed", 0 if error is None else 1)


_has_failed = False


def has_failed() -> bool:
    """Whether an error is ending this process."""
    return _has_failed


def note_failure() -> None:
    """Count this process as failed, though no exception ends it."""
    global _has_failed
    _has_failed = True


def show_errors() -> None:
    """From now on an error of ours that ends this process is shown as what it says; others without our frames."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _show


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    note_failure()
    if isinstance(error, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    elif isinstance(error, ShoalError):
        print(error.at(where=place_of(error)).render(), file=sys.stderr)
        sys.stderr.flush()
    else:
        sys.stderr.write(format_error(error))
