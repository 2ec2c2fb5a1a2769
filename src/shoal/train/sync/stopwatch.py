"""Waiting for other workers, and how long that took."""

import time
from collections.abc import Sequence

from shoal.comm.shm import ShmGroup
from shoal.spec.spans import SPANS

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
        if SPANS.is_on:
            SPANS.add("wait" if last in (None, self._group.rank) else f"wait for rank {last}", "wait", began)


class Arrivals:
    """Who came last to a collective where ranks exchange messages, and for how long the others waited.

    All are done with a collective at nearly the same moment, so how late a rank comes to the next one is how much
    longer it was busy in between. Each measures that by its own clock, which so needs not agree with any other, and
    tells it in the table that travels anyway.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._done: float | None = None
        self._own = 0.0

    def arrive(self, now: float) -> float:
        """This rank is here; returns how long it was busy, 0 where there was nothing before."""
        self._own = 0.0 if self._done is None else now - self._done
        return self._own

    def done(self, now: float) -> None:
        """The collective is over, for all."""
        self._done = now

    def judge(self, own_seconds: Sequence[float], spent: float) -> tuple[float, int | None]:
        """How much of what the collective took was waiting, and for whom."""
        if min(own_seconds) <= 0:
            return 0.0, None  # someone has only just come
        last = max(range(len(own_seconds)), key=own_seconds.__getitem__)
        wait = min(spent, max(0.0, own_seconds[last] - self._own))
        return wait, last if wait > SHORT_SECONDS else None
