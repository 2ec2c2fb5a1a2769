"""Equal lines of several ranks, folded into one. A state machine without a clock of its own."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from operator import attrgetter

WINDOW_SECONDS = 0.15
MAX_HELD = 2000
MAX_MOVED = 64


class Group:
    """A line held back for a moment, and the ranks that said it so far, in order of arrival.

    `place` orders the groups that are held: smaller ones leave first.
    """

    __slots__ = ("deadline", "place", "ranks", "text")

    def __init__(self, place: float, rank: int, text: str, deadline: float) -> None:
        self.place = place
        self.ranks = [rank]
        self.text = text
        self.deadline = deadline


_place = attrgetter("place")


class Fold:
    """Holds lines for up to `window_seconds` and gives equal ones of different ranks out as one group.

    Lines leave in the order they came, except that lines only one rank has said may move forward where that lets the
    next line of this rank join an equal one. So no line waits longer than the window and the lines of one rank never
    change places. A group that every live rank has joined leaves once it is in front. At most `MAX_HELD` are held.
    """

    def __init__(self, num_ranks: int, window_seconds: float = WINDOW_SECONDS) -> None:
        self._num_live = num_ranks
        self._window = window_seconds
        self._held: list[Group] = []
        self._by_text: dict[str, list[Group]] = {}
        self._last_place: dict[int, float] = {}
        self._count = 0

    def add(self, rank: int, text: str, now: float) -> None:
        """Take one line of one rank."""
        same = self._by_text.get(text)
        group = self._find(rank, same) if same else None
        if group is not None:
            group.ranks.append(rank)
        else:
            self._count += 1
            group = Group(self._count, rank, text, now + self._window)
            self._held.append(group)
            if same is None:
                self._by_text[text] = [group]
            else:
                same.append(group)
        self._last_place[rank] = group.place

    def take(self, now: float) -> list[Group]:
        """The groups that must leave now."""
        excess, full = len(self._held) - MAX_HELD, self._num_live
        num_due = 0
        for group in self._held:
            if group.deadline > now and len(group.ranks) < full and num_due >= excess:
                break
            num_due += 1
            self._forget(group)
        due = self._held[:num_due]
        del self._held[:num_due]
        return due

    def drain(self) -> list[Group]:
        """Everything that is held, at once."""
        out, self._held = self._held, []
        self._by_text.clear()
        return out

    def end(self) -> None:
        """One rank has ended: nobody waits for its lines any more."""
        self._num_live = max(1, self._num_live - 1)

    def begin(self) -> None:
        """One more rank has begun."""
        self._num_live += 1

    def next_deadline(self) -> float | None:
        """When `take` has something to give at the latest, or None while nothing is held."""
        return self._held[0].deadline if self._held else None

    def _find(self, rank: int, same: list[Group]) -> Group | None:
        last = self._last_place.get(rank, 0)
        if same[-1].place > last:
            # The first equal line this rank has not passed yet: joining it keeps the rank's own order.
            return same[bisect_right(same, last, key=_place)]
        for group in same[-4:]:
            if rank not in group.ranks and self._move_before(group, rank):
                return group
        return None

    def _move_before(self, group: Group, rank: int) -> bool:
        """Move what `rank` said after `group` to just before it. False where another rank said it too."""
        held = self._held
        start = bisect_left(held, group.place, key=_place)
        if len(held) - start > MAX_MOVED:
            return False
        later = [other for other in held[start + 1 :] if rank in other.ranks]
        low = held[start - 1].place if start else group.place - 1
        gap = (group.place - low) / (len(later) + 1)
        if any(len(other.ranks) > 1 for other in later) or low + gap == low or group.place - gap == group.place:
            return False
        for number, other in enumerate(later, start=1):
            other.place = low + gap * number
            other.deadline = min(other.deadline, group.deadline)
        held[start:] = later + [other for other in held[start:] if other not in later]
        for other in later:
            self._by_text[other.text].sort(key=_place)
        return True

    def _forget(self, group: Group) -> None:
        same = self._by_text[group.text]
        if len(same) == 1:
            del self._by_text[group.text]
        else:
            same.pop(0)


def name_ranks(ranks: Iterable[int]) -> str:
    """Ranks as people write them: `0`, `0-3`, `0,2-3`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
