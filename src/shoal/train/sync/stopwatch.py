"""Waiting for other workers, and how long that took."""

import time
from collections.abc import Sequence

from shoal.comm.shm import ShmGroup

SHORT_SECONDS = 1e-4
"""Nobody is blamed for a wait that is shorter."""


class Stopwatch:
    """Waits for signals of a group, and takes note of how long it took and for whom.

    Since the last `start`: `seconds` of all waits, and `waited_for`, who came last in the longest of them.
    """

    def __init__(self, group: ShmGroup) -> None:
        self._group = group
        self.start()

    def start(self) -> None:
        self.seconds = 0.0
        self.waited_for: int | None = None
        self._longest = SHORT_SECONDS

    def wait(self, channel: int, value: int, ranks: Sequence[int] | None = None) -> None:
        """Return when these ranks, or all, have signalled the value. Raises MemberLost where one never will."""
        others = None if ranks is None else [rank for rank in ranks if rank != self._group.rank]
        began = time.perf_counter()
        last = self._group.wait(channel, value, others)
        seconds = time.perf_counter() - began
        if seconds > self._longest:
            self._longest, self.waited_for = seconds, last
        self.seconds += seconds
