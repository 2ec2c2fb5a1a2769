"""Divided state on its way into the next World: who still holds each part of it, and who hands it out.

A worker that is lost leaves a mirror of its part with its neighbour. So the members of the next World, who hold parts
and mirrors as the last one divided them, say what they have, and all come to the same conclusion.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from shoal.comm.group import Group

MOST_CLAIMS = 2
"""What a member holds in the World it is in, and in the one that it was about to enter when another was lost."""

Give = Callable[[str, int, torch.Tensor], None]
"""(key, number, whole): put what this member hands out of a unit's state to its place in a whole of zeros."""


class Holding(Protocol):
    """Parts of divided state that a worker keeps: `parts` of `num_parts`, its own first, then a mirror of another's.

    State is a buffer for each key and unit: of parameters, of what the optimizer keeps, of the moving average. Units
    are the same for any number of parts. `is_whole`: the model has all parameters besides.
    """

    num_parts: int
    parts: tuple[int, ...]

    @property
    def is_whole(self) -> bool: ...
    @property
    def keys(self) -> Sequence[str]: ...

    def give(self, key: str, number: int, part: int, whole: torch.Tensor) -> None:
        """Put a part of a unit to its place."""
        ...

    def inherit(self, give: Give, keys: Sequence[str], scalars: Sequence[Mapping[str, float]]) -> None:
        """Take our new part, and mirror, of what all members give. All call it together."""
        ...

    def assemble(self) -> None:
        """Let the model have all its parameters until the next step. All call it together."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a member says it holds, as the World of that generation divided it.

    `num_parts` is 0 where state is not divided: then it has all of it.
    """

    generation: int
    num_parts: int
    parts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Will:
    """Who hands out what: `givers[part]` is a rank of the new group, None where nobody has that part any more.

    It is about the state as that generation divided it. `mirrored` are the parts whose owner is gone. `is_whole`:
    some member's model has all parameters, so all shall have them.
    """

    generation: int
    givers: tuple[int | None, ...]
    mirrored: tuple[int, ...] = ()
    is_whole: bool = False

    @property
    def is_divided(self) -> bool:
        return bool(self.givers)

    @property
    def lost(self) -> tuple[int, ...]:
        return tuple(part for part, giver in enumerate(self.givers) if giver is None)


def find_will(claims: Sequence[Sequence[Claim]]) -> Will:
    """Of what rank 0 claims, the newest of which everything is there; else its newest. `claims` are by rank.

    Those who differ in generation have the same state, divided in another way: nobody took a step in a World that not
    all had entered.
    """
    found = [_will(claims, claim) for claim in sorted(claims[0], key=lambda claim: -claim.generation)]
    return next((will for will in found if not will.lost), found[0])


def _will(claims: Sequence[Sequence[Claim]], like: Claim) -> Will:
    held = [
        (rank, claim.parts)
        for rank, brought in enumerate(claims)
        for claim in brought
        if claim.generation == like.generation
    ]
    owners = {parts[0]: rank for rank, parts in reversed(held) if parts}
    mirrors = {part: rank for rank, parts in reversed(held) for part in parts[1:]}
    return Will(
        generation=like.generation,
        givers=tuple(owners.get(part, mirrors.get(part)) for part in range(like.num_parts)),
        mirrored=tuple(part for part in range(like.num_parts) if part not in owners and part in mirrors),
    )


def agree_on_will(group: Group, held: Mapping[int, Holding | None]) -> Will:
    """The will of all members of a new group, of which rank 0 has the state. All call it together.

    `held` is what this member holds, by generation; None is all of what is not divided.
    """
    mine = torch.full((MOST_CLAIMS, 5), -1, dtype=torch.int64)
    for row, (generation, holding) in zip(mine, sorted(held.items())[-MOST_CLAIMS:], strict=False):
        row[:2] = torch.tensor([generation, 0])
        if holding is not None:
            row[1:] = torch.tensor([holding.num_parts, int(holding.is_whole), *(*holding.parts, -1)[:2]])
    everyone = torch.empty(group.size * mine.numel(), dtype=torch.int64)
    group.all_gather(everyone, mine.view(-1)).wait()
    rows = everyone.view(group.size, MOST_CLAIMS, 5).tolist()
    will = find_will([[_claim(row) for row in brought if row[0] >= 0] for brought in rows])
    is_whole = any(row[2] > 0 for brought in rows for row in brought)
    return Will(generation=will.generation, givers=will.givers, mirrored=will.mirrored, is_whole=is_whole)


def _claim(row: Sequence[int]) -> Claim:
    generation, num_parts, _, *parts = row
    return Claim(generation=generation, num_parts=num_parts, parts=tuple(part for part in parts if part >= 0))


def hand_out(will: Will, rank: int, holding: Holding | None) -> Give:
    """What this rank gives of what it holds: nothing, if others give all."""
    mine = [part for part, giver in enumerate(will.givers) if giver == rank]
    assert holding is not None or not mine

    def give(key: str, number: int, whole: torch.Tensor) -> None:
        for part in mine:
            assert holding is not None
            holding.give(key, number, part, whole)

    return give
