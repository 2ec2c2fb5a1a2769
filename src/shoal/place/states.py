"""The different ways in which nodes are full: what is worked out for one node holds for all that are alike.

A large cluster has few sorts of nodes, and few things are asked for; so of ten thousand nodes only some hundreds
differ in what they have free.
"""

from dataclasses import dataclass, field

import numpy as np

from shoal.place.space import Ints, Space, State

FEW = 64


@dataclass(slots=True)
class States:
    """Numbers for states, shared by all spaces over the same nodes. A number never changes its meaning."""

    numbers: dict[State, int] = field(default_factory=dict)
    listed: list[State] = field(default_factory=list)
    known: tuple[int, int, Space] | None = None

    def number(self, state: State) -> int:
        found = self.numbers.get(state)
        if found is None:
            found = self.numbers[state] = len(self.listed)
            self.listed.append(state)
        return found

    def room(self, like: Space, first: int) -> Space:
        """A space whose nodes are the states from `first` on."""
        # One need after the other asks for the same.
        if self.known is None or self.known[:2] != (first, len(self.listed)):
            table = np.array(self.listed[first:], np.int64)
            space = like.with_room(table[:, 0], table[:, 1], table[:, 2], table[:, 3], table[:, 4:])
            self.known = first, len(self.listed), space
        return self.known[2]


@dataclass(slots=True)
class Numbered:
    """The number of every node's state in one space, brought up to date by what changed there."""

    space: Space
    states: States
    numbers: list[int] | None = None
    seen: int = 0

    def now(self) -> list[int]:
        space = self.space
        if self.numbers is None:
            self.numbers = [0] * len(space.nodes)
            self._renew(np.arange(len(space.nodes)))
        elif self.seen != len(space.changes):
            changed = set(space.changes[self.seen :])
            if len(changed) <= FEW:
                for at in changed:
                    self.numbers[at] = self.states.number(space.state(at))
            else:
                self._renew(np.array(sorted(changed), np.int64))
        self.seen = len(space.changes)
        return self.numbers

    def _renew(self, at: Ints) -> None:
        assert self.numbers is not None
        space = self.space
        parts = (space.kind[at], space.cores[at], space.memory[at], space.disk[at], np.sort(space.gpu[at], axis=1))
        rows = np.column_stack(parts).tolist()
        for number, row in zip(at.tolist(), rows, strict=True):
            self.numbers[number] = self.states.number(tuple(row))
