"""Telling the launcher of a run of fixed size whom this worker waits for, so that a hang has a name."""

import time
from collections.abc import Sequence

from shoal.observe.control import ControlPipe
from shoal.spec.event import Event

LONG_SECONDS = 1.0
EVERY_SECONDS = 0.5


class Waiting:
    """What a group calls while it waits. Shorter waits than a second are told to nobody."""

    def __init__(self, control_fd: int) -> None:
        self._control = ControlPipe(control_fd)
        self._next = 0.0

    def look(self, ranks: Sequence[int], seconds: float) -> None:
        now = time.monotonic()
        if seconds >= LONG_SECONDS and now >= self._next:
            self._next = now + EVERY_SECONDS
            data = {"members": [f"{rank}.0" for rank in ranks], "seconds": seconds, "generation": -1}
            self._control.offer(Event(kind="waiting", time=time.time(), data=data))
