"""The calls a script makes on its trainer, counted: a worker that comes later passes over those that are over."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from shoal.observe.recorder import Recorder
from shoal.train.link import Link
from shoal.train.team import Progress, Team


@dataclass(slots=True)
class Call:
    """One call. `is_over`: the others have made it long ago, and `result` is what it gave them."""

    result: Any = None
    is_over: bool = False


class Calls:
    """Only calls that the script makes itself count, not those that a call makes in turn.

    In an elastic run a worker becomes a member of the World with its first call that the others are not done with.
    """

    def __init__(self, team: Team, progress: Progress, trainer: int, recorder: Recorder) -> None:
        self._team, self._progress, self._trainer, self._recorder = team, progress, trainer, recorder
        self._number = self._depth = 0
        self._untold: tuple[str, Any] | None = None
        self._is_kept = True

    @contextmanager
    def make(self, name: str) -> Iterator[Call]:
        """Inside, the call is being made; what is put into its `result` is what later workers get."""
        link = self._team.link
        call = self._arrive(name, link) if link is not None and not self._depth else Call()
        self._depth += 1
        is_done = is_left = False
        try:
            with self._team.apart(False):
                yield call
            is_done = True
        except GeneratorExit:
            is_left = True
            raise
        finally:
            self._depth -= 1
            if link is not None and not self._depth:
                self._number += 1
                if (is_done or is_left) and not call.is_over:
                    self._untold = (name, call.result)
                self._is_kept = is_done
                if is_done:  # a loop that was left may have been left by an error: the next call will tell
                    self._say(link)

    def _say(self, link: Link) -> None:
        """A call is over, and all say it: whoever is to say it alone may die before."""
        if self._untold is not None:
            if not self._is_kept:
                self._progress.keep()
            link.say_called(*self._untold)
            self._untold = None

    def _arrive(self, name: str, link: Link) -> Call:
        self._say(link)
        if self._team.sync is not None:
            link.trainer, link.call = self._trainer, self._number
            return Call()
        self._team.prepare()
        reply = link.await_membership(self._trainer, self._number)
        if isinstance(reply, dict):
            if not self._catch_up(name, reply["result"]):
                self._team.leave()  # nothing of what is prepared will be needed
                link.idle(f"the others have done with {name}(), and this worker cannot catch up")
            self._recorder.at_step = None
            return Call(result=reply["result"], is_over=True)
        self._team.join(reply, self._progress)
        return Call()

    def _catch_up(self, name: str, result: Any) -> bool:
        """Be as if the call had been made: what the script does next may use the model."""
        if name in ("fit", "iterate"):
            return self._progress.catch_up(int(result["step"]))
        return True
