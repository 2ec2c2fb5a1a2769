"""What a policy decides. Jobs that no decision names stay as they are."""

from dataclasses import dataclass, field

from shoal.place.cluster import Allocation, Devices


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Run it there: a start, or for one that runs a change of its size or place.

    `devices` are the GPUs for its workers, where it asked for some.
    """

    job: str
    allocation: Allocation
    why: str = ""
    devices: Devices = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Take its nodes away: it saves, ends, and waits for its next turn."""

    job: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """It stays in the queue, at `position` from 1. `why` is true and for people; `eta_seconds` None: nobody knows."""

    job: str
    why: str
    position: int = 0
    eta_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lower:
    """A running job that is to save, stop, and go on where it is with this much memory for each worker."""

    job: str
    memory_bytes: int
    why: str


Decision = Place | Stop | Wait
