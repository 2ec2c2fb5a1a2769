"""What the coordinator wants done. The launcher does it, in the order given."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Tell:
    """Send `message` to a worker as one line of JSON. A worker that is gone by now misses nothing."""

    worker: int
    message: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Start:
    """Start a process for this worker number, then call `started`."""

    worker: int


@dataclass(frozen=True, slots=True)
class Kill:
    """End the worker's process with SIGKILL and reap it, then call `exited`."""

    worker: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """End the run with this error."""

    message: str
    why: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Note:
    """Journal it. `rank` is the number of the worker it is about, None where it is about all."""

    kind: str
    rank: int | None = None
    data: Mapping[str, Any] = field(default_factory=dict)


Decision = Tell | Start | Kill | Fail | Note
