"""What is to be done about items and workers: small facts that `Handout` returns and a launcher carries out."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Start:
    """Start a process for this worker. `Handout.started` says that it was done."""

    worker: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class Give:
    """Send these items to a worker."""

    worker: int
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TakeBack:
    """Ask a worker for what it has done and not told, and for the items it has not begun."""

    worker: int


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill a worker. What it says from now on does not count; its items are already somebody else's."""

    worker: int
    why: str


@dataclass(frozen=True, slots=True)
class Retry:
    """Note that an item will be tried again: its `attempt`-th failed on that worker."""

    number: int
    worker: int
    attempt: int
    why: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """An item has used up its attempts. It is done: its result is an error."""

    number: int
    worker: int
    attempts: int
    why: str


@dataclass(frozen=True, slots=True)
class Fail:
    """Nothing can be done: workers end before they do anything."""

    why: str


Decision = Start | Give | TakeBack | Kill | Retry | GiveUp | Fail
