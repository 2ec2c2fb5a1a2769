"""The ways between machines of a run. Workers meet at ports that the system picks, which a firewall may close."""

import contextlib
import socket
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from shoal.spec.errors import UserError

TRY_SECONDS = 4.0
MOST_AT_ONCE = 64

Place = tuple[str, int]
"""An address, and a port there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocked:
    """A way that is closed: from an address to a port of another, and what happened to whoever tried."""

    start: str
    end: str
    port: int
    why: str

    def __str__(self) -> str:
        return f"from {self.start} to {self.end} port {self.port}: {self.why}"


class Bell:
    """A port that is only there to be tried. Whoever connects is sent away, when `silence` is called."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("", 0), backlog=128)
        self._socket.setblocking(False)
        self.port = int(self._socket.getsockname()[1])

    def silence(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._socket.accept()[0].close()

    def close(self) -> None:
        self._socket.close()


def try_places(places: Iterable[Place], timeout_seconds: float = TRY_SECONDS) -> dict[Place, str]:
    """Connect to places at once; returns what was wrong with each that could not be reached."""
    places = list(places)
    with ThreadPoolExecutor(max_workers=max(1, min(MOST_AT_ONCE, len(places)))) as pool:
        told = pool.map(lambda place: _try_place(place, timeout_seconds), places)
    return {place: what for place, what in zip(places, told, strict=True) if what}


def _try_place(place: Place, timeout_seconds: float) -> str:
    try:
        socket.create_connection(place, timeout_seconds).close()
    except TimeoutError:
        return f"no answer within {timeout_seconds:.0f} s, as if a firewall dropped it"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return ""


def ways_to_try(bells: Sequence[Place], known: Iterable[str]) -> dict[str, list[Place]]:
    """Who is to try which bells: all ways but those between two addresses that are known to work. Pure."""
    known = set(known)
    ways = {
        start: [(end, port) for end, port in bells if end != start and not (start in known and end in known)]
        for start, _ in bells
    }
    return {start: places for start, places in ways.items() if places}


def no_way(blocked: Sequence[Blocked]) -> UserError:
    """What to say where workers could not find each other."""
    hint = "let machines of a run reach each other at all TCP ports from 1024 on, or leave one of them out"
    more = f"; and {len(blocked) - 4} more" if len(blocked) > 4 else ""
    return UserError("Workers could not reach each other.", why="; ".join(map(str, blocked[:4])) + more, hint=hint)
