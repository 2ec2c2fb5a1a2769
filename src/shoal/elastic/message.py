"""What the launcher tells workers: plain dictionaries, one JSON object a line."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from shoal.spec.world import Member, World

Message = Mapping[str, Any]


def world_message(world: World, reason: str) -> Message:
    """The World as it is sent; `read_world` is the way back."""
    return {
        "kind": "world",
        "generation": world.generation,
        "members": [asdict(member) for member in world.members],
        "joined": list(world.joined),
        "reason": reason,
    }


def read_world(message: Message) -> World:
    """The World of a message of kind `world`. Raises KeyError or TypeError for one that is not whole."""
    return World(
        generation=message["generation"],
        members=tuple(Member(**member) for member in message["members"]),
        joined=tuple(message["joined"]),
    )


def gathered_message(generation: int, trainer: int, key: str, values: Sequence[Any]) -> Message:
    """The answer to everyone's `gather`: the values in rank order."""
    return {"kind": "gathered", "generation": generation, "trainer": trainer, "key": key, "values": list(values)}


def called_message(calls: Iterable[Message]) -> Message:
    """Finished top-level calls, as they were reported. Told twice it means the same."""
    return {"kind": "called", "calls": [dict(call) for call in calls]}


def hold_message(generation: int) -> Message:
    """Stop together after some step, say `boundary`, and wait for the next World."""
    return {"kind": "hold", "generation": generation}


def stop_message(reason: str) -> Message:
    """Finish the step, save a checkpoint, end."""
    return {"kind": "stop", "reason": reason}
