"""Wiring: what is wrong with a run is written down and shown, once, while it runs."""

import time
from collections.abc import Callable, Mapping, Sequence

from shoal.engine.cause import Failure
from shoal.engine.stacks import Stack
from shoal.observe.diagnosis import Diagnosis
from shoal.observe.live import ANSWERS, SILENT, UNKNOWN, UNKNOWN_SECONDS, Live
from shoal.spec.event import Event

LOOK_SECONDS = 0.2


class Diagnosing:
    """Listens to one run. Nothing is done between calls of `look`, which costs nothing five times a second.

    `pid_of` is the process of a rank if it is on this machine; elsewhere one is asked for its stack.
    """

    def __init__(
        self,
        pid_of: Callable[[int], int | None],
        take_stacks: Callable[[str], Mapping[int, Stack]],
        write: Callable[[Event], None],
        show: Callable[[str], None],
        addresses: Sequence[str] = (),
        *,
        is_elastic: bool = False,
    ) -> None:
        self._pid_of, self._take_stacks, self._write, self._show = pid_of, take_stacks, write, show
        ranks_at: dict[str, list[int]] = {}
        for rank, address in enumerate(addresses):
            ranks_at.setdefault(address.rpartition(":")[0], []).append(rank)
        self._live = Live(ranks_at)
        self._asked: dict[int, str] = {}
        self._is_elastic = is_elastic
        self._due = 0.0

    def hear(self, event: Event) -> None:
        """A worker said something, or the launcher wrote it down."""
        self._live.hear(event, time.monotonic(), time.time())

    def ended(self, rank: int) -> None:
        self._live.ended(rank)
        self._asked.pop(rank, None)

    def failed(self, failures: Sequence[Failure]) -> None:
        """The run ends for these reasons."""
        self._live.failed(failures)
        self.look(is_due=True)

    def look(self, *, is_due: bool = False) -> None:
        """Tell what is new."""
        now = time.monotonic()
        if not is_due and now < self._due:
            return
        self._due = now + LOOK_SECONDS
        for found in self._live.look(now, self._state_of):
            self._tell(found)

    def _tell(self, found: Diagnosis) -> None:
        self._write(Event(kind="diagnosis", time=time.time(), rank=found.rank, step=found.step, data=found.facts()))
        # Who is frozen or hangs in an elastic run is killed, and that is told.
        if not found.is_told and not (self._is_elastic and found.cause in ("frozen", "hung")):
            self._show(found.text())

    def _state_of(self, rank: int, waited_seconds: float) -> str:
        pid = self._pid_of(rank)
        if pid is not None:
            return _state(pid)
        if waited_seconds < UNKNOWN_SECONDS:
            return UNKNOWN
        if rank not in self._asked:
            stack = self._take_stacks(f"rank {rank} does not come").get(rank)
            self._asked[rank] = ANSWERS if stack is not None and stack.thread else SILENT
        return self._asked[rank]


def _state(pid: int) -> str:
    """The kernel's letter for what a process does; nothing where there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return UNKNOWN
