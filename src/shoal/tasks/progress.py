"""How far a map is: the progress line, and a line in the journal now and then."""

import time
from collections.abc import Callable
from typing import Any

from shoal.spec.event import Event

SHOW_SECONDS = 0.1
NOTE_SECONDS = 2.0


class Progress:
    """Counts items against the clock. `show` gets an event for the progress line, `note` one for the journal."""

    def __init__(
        self,
        show: Callable[[Event], None],
        note: Callable[[Event], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._show, self._note, self._clock = show, note, clock
        self._began = clock()
        self._next_show = self._began + SHOW_SECONDS
        self._next_note = self._began + NOTE_SECONDS
        self._since, self._before, self._rate = self._began, 0, 0.0

    def told(self, done: int, total: int | None, workers: int, retries: int) -> None:
        """So many items are done; this is cheap, and most of the time nothing happens."""
        now = self._clock()
        if now >= self._next_show:
            self._next_show = now + SHOW_SECONDS
            self._measure(done, now)
            eta = (total - done) / self._rate if total is not None and self._rate > 0 else None
            data = {"num_steps": total, "samples_per_second": self._rate, "workers": workers, "eta_seconds": eta}
            self._show(Event(kind="progress", time=time.time(), rank=0, step=done, data={**data, "unit": "items"}))
        if now >= self._next_note:
            self._next_note = now + NOTE_SECONDS
            self._note(self._event(done, total, retries, now))

    def ended(self, done: int, total: int | None, workers: int, retries: int) -> None:
        """This is all."""
        now = self._clock()
        self._rate = done / max(now - self._began, 1e-9)
        data = {"num_steps": total, "samples_per_second": self._rate, "workers": workers, "unit": "items"}
        self._show(Event(kind="progress", time=time.time(), rank=0, step=done, data=data))
        self._note(self._event(done, total, retries, now))

    def _measure(self, done: int, now: float) -> None:
        """Items a second, of about the last two seconds."""
        recent = (done - self._before) / max(now - self._since, 1e-9)
        self._rate = recent if not self._before else self._rate
        if now - self._since > 2.0:
            self._rate, self._since, self._before = recent, now, done

    def _event(self, done: int, total: int | None, retries: int, now: float) -> Event:
        rate = done / max(now - self._began, 1e-9)
        data: dict[str, Any] = {"done": done, "total": total, "per_second": round(rate, 3), "retries": retries}
        return Event(kind="items_done", time=time.time(), data=data)
