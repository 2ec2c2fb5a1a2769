"""The different ways in which nodes are full: what is worked out for one node holds for all that are alike.

A large cluster has few sorts of nodes, and few things are asked for; so of ten thousand nodes only some hundreds
differ in what they have free.
"""

from dataclasses import dataclass, field

import numpy as np

from shoal.place.space import Space, State, Table


@dataclass(slots=True)
class States:
    """Numbers for states, shared by all spaces over the same nodes. A number never changes its meaning."""

    numbers: dict[State, int] = field(default_factory=dict)
    listed: list[State] = field(default_factory=list)
    known: tuple[int, int, Table] | None = None

    def number(self, state: State) -> int:
        found = self.numbers.get(state)
        if found is None:
            found = self.numbers[state] = len(self.listed)
            self.listed.append(state)
        return found

    def table(self, first: int, tops: tuple[int, int, int]) -> Table:
        """The states from `first` on."""
        # One need after the other asks for the same.
        if self.known is None or self.known[:2] != (first, len(self.listed)):
            rows = np.array(self.listed[first:], np.int64)
            table = Table(rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3], rows[:, 4:], tops)
            self.known = first, len(self.listed), table
        return self.known[2]


@dataclass(slots=True)
class Numbered:
    """The number of every node's state in one space, brought up to date by what changed there."""

    space: Space
    states: States
    numbers: list[int] = field(default_factory=list)
    seen: int = 0

    def now(self) -> list[int]:
        space, number = self.space, self.states.number
        if not self.numbers:
            self.numbers = [number(space.state(at)) for at in range(len(space.nodes))]
        elif self.seen != len(space.changes):
            for at in set(space.changes[self.seen :]):
                self.numbers[at] = number(space.state(at))
        self.seen = len(space.changes)
        return self.numbers
