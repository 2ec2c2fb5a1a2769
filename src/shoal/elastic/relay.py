"""Rendezvous through the coordinator: everyone gives a value, everyone gets all of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.elastic.decision import Decision, Tell
from shoal.elastic.message import gathered_message
from shoal.spec.world import World

Round = tuple[int, str]
"""trainer, key. A key is used once in a generation."""


@dataclass(slots=True)
class Relay:
    """The rounds of the newest World. A value of another generation is dropped: some members of that one are gone.

    A value that comes twice changes nothing, also after its round is over. A round may be among some members only,
    whom each of them names.
    """

    world: World | None = None
    open: dict[Round, dict[str, Any]] = field(default_factory=dict)
    among: dict[Round, tuple[str, ...]] = field(default_factory=dict)
    over: set[Round] = field(default_factory=set)
    since: float | None = None

    def published(self, world: World) -> None:
        """A new World: rounds of the one before can never be completed."""
        self.world, self.since = world, None
        self.open.clear()
        self.among.clear()
        self.over.clear()

    def gather(self, member: str, data: Mapping[str, Any], now: float) -> list[Decision]:
        """Take a member's value; when it is the last one, tell all."""
        world = self.world
        if world is None or int(data["generation"]) != world.generation or member not in world.ids:
            return []
        key: Round = int(data.get("trainer") or 0), str(data["key"])
        ids = self.among.get(key) or tuple(data.get("among") or world.ids)
        if key in self.over or member not in ids or not set(ids).issubset(world.ids):
            return []
        self.since = now if self.since is None else self.since
        values = self.open.setdefault(key, {})
        self.among[key] = ids
        values.setdefault(member, data.get("value"))
        if len(values) < len(ids):
            return []
        del self.open[key]
        self.over.add(key)
        message = gathered_message(world.generation, *key, [values[member_id] for member_id in ids])
        return [Tell(other.worker, message) for other in world.members if other.id in ids]

    def missing(self) -> set[str]:
        """Members that some round lacks."""
        return {
            member_id for key, values in self.open.items() for member_id in self.among[key] if member_id not in values
        }

    def missing_since(self) -> dict[str, float]:
        """Who is missing while the World meets for the first time, and since when the others wait for it.

        Later on members wait for each other for reasons of their own, and say so themselves.
        """
        if self.since is None or self.over:
            return {}
        return dict.fromkeys(self.missing(), self.since)
