"""Where loading takes place: between two steps, or in a thread that loads itself or hands on to processes."""

import threading
from collections import deque
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Protocol

from shoal.data.ledger import StepPlan
from shoal.data.readers import Loaded, PlainReader, Reader

_JOIN_SECONDS = 5.0


class Loading(Protocol):
    """Loads the steps of the plans in order."""

    def next(self) -> Loaded | None:
        """The next step, or None after the last one; waits for it."""

    def close(self) -> None:
        """Load no more. May be called twice."""


class InlineLoading:
    """Loads when asked, in the calling thread."""

    def __init__(self, reader: Reader, plans: Iterator[StepPlan]) -> None:
        self._reader = reader
        self._plans = plans

    def next(self) -> Loaded | None:
        plan = next(self._plans, None)
        return None if plan is None else self._reader.load(plan)

    def close(self) -> None:
        self._plans = iter(())


class Work(Protocol):
    """Loads steps in the order in which they were started."""

    def start(self, plan: StepPlan) -> None: ...
    def finish(self) -> Loaded | None:
        """Wait for the oldest step that was started; None if there is no such step any more."""

    def interrupt(self) -> None:
        """Make `finish` return soon, with whatever error. Called from another thread."""

    def close(self) -> None:
        """Release everything. Called once nobody uses it any more."""


class HereWork:
    """Loads in the thread that asks."""

    def __init__(self, reader: PlainReader) -> None:
        self._reader = reader
        self._started: deque[StepPlan] = deque()

    def start(self, plan: StepPlan) -> None:
        self._started.append(plan)

    def finish(self) -> Loaded:
        return self._reader.load(self._started.popleft())

    def interrupt(self) -> None:
        self._reader.interrupt()

    def close(self) -> None:
        self._started.clear()


class BackgroundLoading:
    """Loads up to `depth` steps ahead, in a thread that ends after the last plan, after an error, or once closed."""

    def __init__(self, work: Work, plans: Iterator[StepPlan], depth: int) -> None:
        self._work = work
        self._plans = plans
        self._ready: SimpleQueue[Loaded | BaseException | None] = SimpleQueue()
        self._room = threading.Semaphore(depth)
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="shoal-loader", daemon=True)
        self._thread.start()

    def next(self) -> Loaded | None:
        loaded = None if self._is_closed else self._ready.get()
        if loaded is None or isinstance(loaded, BaseException):
            # Whoever asks again gets the same answer instead of waiting for ever.
            self._ready.put(loaded)
        if isinstance(loaded, BaseException):
            raise loaded
        self._room.release()
        return loaded

    def close(self) -> None:
        """End the thread. One that is stuck in a sample is left behind after a while and ends with that sample."""
        if self._is_closed:
            return
        self._is_closed = True
        self._work.interrupt()
        self._room.release()
        self._thread.join(_JOIN_SECONDS)
        self._work.close()

    def _run(self) -> None:
        try:
            self._load_all()
            self._ready.put(None)
        except BaseException as error:
            self._ready.put(error)

    def _load_all(self) -> None:
        num_started = 0
        while (num_started := num_started + self._start(may_wait=num_started == 0)) and not self._is_closed:
            loaded = self._work.finish()
            num_started -= 1
            if loaded is None:
                return
            self._ready.put(loaded)

    def _start(self, may_wait: bool) -> int:
        """Start as many steps as there is room for; how many. Waits for room only if there is nothing else to do."""
        number = 0
        while self._room.acquire(blocking=may_wait and number == 0):
            plan = None if self._is_closed else next(self._plans, None)
            if plan is None:
                self._room.release()
                return number
            self._work.start(plan)
            number += 1
        return number
