"""Equal lines of several ranks, folded into one. A state machine without a clock of its own."""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from operator import attrgetter

WINDOW_SECONDS = 0.15
MAX_HELD = 2000


class Group:
    """A line held back for a moment, and the ranks that said it so far, in order of arrival."""

    __slots__ = ("deadline", "number", "ranks", "text")

    def __init__(self, number: int, rank: int, text: str, deadline: float) -> None:
        self.number = number
        self.ranks = [rank]
        self.text = text
        self.deadline = deadline


_number = attrgetter("number")


class Fold:
    """Holds lines for up to `window_seconds` and gives equal ones of different ranks out as one group.

    Groups leave in the order in which their first line came, so no line waits longer than the window, and the lines
    of one rank never change places. A group that every live rank has joined leaves as soon as it is at the front.
    At most `MAX_HELD` groups are held.
    """

    def __init__(self, num_ranks: int, window_seconds: float = WINDOW_SECONDS) -> None:
        self._num_live = num_ranks
        self._window = window_seconds
        self._held: deque[Group] = deque()
        self._by_text: dict[str, list[Group]] = {}
        self._last_of: dict[int, int] = {}
        self._count = 0

    def add(self, rank: int, text: str, now: float) -> None:
        """Take one line of one rank."""
        same = self._by_text.get(text)
        last = self._last_of.get(rank, 0)
        if same is not None and same[-1].number > last:
            # The first equal line this rank has not passed yet: joining it keeps the rank's own order.
            group = same[bisect_right(same, last, key=_number)]
            group.ranks.append(rank)
        else:
            self._count += 1
            group = Group(self._count, rank, text, now + self._window)
            self._held.append(group)
            if same is None:
                self._by_text[text] = [group]
            else:
                same.append(group)
        self._last_of[rank] = group.number

    def take(self, now: float) -> list[Group]:
        """The groups that must leave now."""
        out = []
        held = self._held
        while held and (held[0].deadline <= now or len(held[0].ranks) >= self._num_live or len(held) > MAX_HELD):
            out.append(self._release(held.popleft()))
        return out

    def drain(self) -> list[Group]:
        """Everything that is held, at once."""
        out = list(self._held)
        self._held.clear()
        self._by_text.clear()
        return out

    def end(self) -> None:
        """One rank has ended: nobody waits for its lines any more."""
        self._num_live = max(1, self._num_live - 1)

    def next_deadline(self) -> float | None:
        """When `take` has something to give at the latest, or None while nothing is held."""
        return self._held[0].deadline if self._held else None

    def _release(self, group: Group) -> Group:
        same = self._by_text[group.text]
        if len(same) == 1:
            del self._by_text[group.text]
        else:
            same.pop(0)
        return group


def name_ranks(ranks: Iterable[int]) -> str:
    """Ranks as people write them: `0`, `0-3`, `0,2-3`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
