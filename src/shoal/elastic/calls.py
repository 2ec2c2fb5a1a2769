"""Top-level calls that are finished: what a newcomer passes over on its way to where the members are."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Place = tuple[int, int]
"""trainer, call"""


def place_in(data: Mapping[str, Any]) -> Place | None:
    """Where the sender is, if it says so."""
    if data.get("call") is None:
        return None
    return int(data.get("trainer") or 0), int(data["call"])


@dataclass(slots=True)
class Calls:
    """Finished calls in the order in which they finished, and the calls in which members were seen last."""

    finished: dict[Place, dict[str, Any]] = field(default_factory=dict)
    seen: dict[str, Place] = field(default_factory=dict)
    stepping: dict[str, bool] = field(default_factory=dict)

    def finish(self, data: Mapping[str, Any]) -> bool:
        """Remember a call; False where it was known."""
        place = place_in(data)
        if place is None or place in self.finished:
            return False
        self.finished[place] = {"trainer": place[0], "call": place[1], "name": data.get("name", "")}
        self.finished[place]["result"] = data.get("result")
        return True

    def saw(self, member: str, data: Mapping[str, Any]) -> None:
        """A beat of a member, with where it is."""
        place = place_in(data)
        if place is not None:
            self.seen[member] = place
        self.stepping[member] = bool(data.get("is_stepping", True))

    def forget(self, member: str) -> None:
        self.seen.pop(member, None)
        self.stepping.pop(member, None)

    def is_current(self, place: Place, members: tuple[str, ...]) -> bool:
        """Somebody at `place` stands where the members stand: at the first call that is not finished.

        Beats lag behind, and name calls that are finished by now; those say nothing. One that names another call
        which is not finished says that the newcomer took another way.
        """
        if place in self.finished:
            return False
        seen = {self.seen[member] for member in members if member in self.seen}
        return not {other for other in seen if other not in self.finished} - {place}

    def are_stepping(self, members: tuple[str, ...]) -> bool:
        """None of the members said last that it does something else than steps."""
        return all(self.stepping.get(member, True) for member in members)

    def clear(self) -> None:
        """All were lost: what follows begins at the beginning."""
        self.finished.clear()
        self.seen.clear()
        self.stepping.clear()
