"""The service's own clock: seconds that only go forward, whatever happens to the date. It goes on after a boot."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from shoal.engine.clusters import boot_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A moment as it was written down: of the service's clock, of the machine since its boot, and the date."""

    at: float
    boot: str
    since_boot: float
    wall: float


def go_on(last: Mark | None, now: Mark) -> float:
    """What to add to the seconds since boot from now on. Pure; `now.at` is not looked at.

    In the same boot the machine's own clock has counted on. After another boot nothing has, and the date tells how
    long the machine was off, if it tells something possible.
    """
    if last is None:
        return -now.since_boot
    if last.boot == now.boot:
        return last.at - last.since_boot
    return last.at + max(0.0, now.wall - last.wall) - now.since_boot


def mark_now(boot: str) -> Mark:
    """This moment, for whoever has no clock of the service."""
    return Mark(at=0.0, boot=boot, since_boot=since_boot(), wall=time.time())


def since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(slots=True)
class Clock:
    """Seconds since the service was first started. `offset` comes from `go_on`."""

    offset: float = 0.0
    boot: str = ""
    tick: Callable[[], float] = since_boot
    wall: Callable[[], float] = time.time

    def now(self) -> float:
        return self.offset + self.tick()

    def mark(self) -> Mark:
        tick = self.tick()
        return Mark(at=self.offset + tick, boot=self.boot, since_boot=tick, wall=self.wall())

    def when(self, mark: Mark) -> float:
        """When that was on this clock, of a mark that another process made; its `at` is not looked at."""
        if mark.boot == self.boot:
            return self.offset + mark.since_boot
        return self.now() - max(0.0, self.wall() - mark.wall)

    def resume(self, last: Mark | None) -> None:
        self.boot = self.boot or boot_id()
        self.offset = go_on(last, self.mark())
