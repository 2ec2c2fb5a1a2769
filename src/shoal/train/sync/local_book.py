"""What each copy that trains by itself has learned from since all agreed, and what is owed when one of them is lost.

Plain bookkeeping, of which nothing depends on time or on who asks: all members draw the same conclusions from it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.data.ledger import Place

Shards = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Owed:
    """What nobody has learned who is still here: of each fragment, the shards of steps before `until`.

    Those steps are taken again with these shards alone. From `until` on steps are as ever.
    """

    until: int = 0
    shards: tuple[Mapping[int, Shards], ...] = ()

    @property
    def first(self) -> int:
        """The first step of which something is owed; `until` where nothing is."""
        return min((step for steps in self.shards for step in steps), default=self.until)

    def at(self, step: int) -> Shards | None:
        """The shards of a step that some fragment has not learned from; None where it is a step like any other."""
        if step >= self.until:
            return None
        return tuple(sorted({shard for steps in self.shards for shard in steps.get(step, ())}))

    def lacks(self, fragment: int, step: int, shard: int) -> bool:
        """Whether this fragment has not learned from the shard."""
        return step >= self.until or shard in self.shards[fragment].get(step, ())

    def without(self, fragments: Iterable[int], before: int) -> "Owed":
        """What is left when everybody has learned all before that step, of these fragments."""
        held = list(self.shards)
        for fragment in fragments if held else ():
            held[fragment] = {step: shards for step, shards in held[fragment].items() if step >= before}
        return Owed(until=self.until, shards=tuple(held))


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What a copy says when the World changes: it has reached `step`, and learned from `learned` in this order.

    Of a fragment that was last agreed on before step `since`, the first `marks` of them are in what was agreed on.
    `owed` and `since` are the same on all copies.
    """

    step: int
    owed: Owed
    since: tuple[int, ...]
    marks: tuple[int, ...]
    learned: tuple[tuple[int, int], ...]

    def to_plain(self) -> dict[str, Any]:
        shards = [[(step, *shards) for step, shards in held.items()] for held in self.owed.shards]
        return {
            "step": self.step,
            "until": self.owed.until,
            "owed": shards,
            "since": self.since,
            "marks": self.marks,
            "learned": [number for pair in self.learned for number in pair],
        }

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> "Account":
        shards = tuple({step: tuple(shards) for step, *shards in held} for held in plain["owed"])
        numbers = plain["learned"]
        return cls(
            step=plain["step"],
            owed=Owed(until=plain["until"], shards=shards),
            since=tuple(plain["since"]),
            marks=tuple(plain["marks"]),
            learned=tuple(zip(numbers[::2], numbers[1::2], strict=True)),
        )


def find_owed(accounts: Sequence[Account], num_shards: int) -> tuple[Owed, int]:
    """What the copies that are left owe, and the step at which they go on: all of them stand at it or beyond."""
    first = accounts[0]
    begun = [step + 1 for account in accounts for step, _ in account.learned]
    until = max([first.owed.until, *first.since, *begun])
    held: list[dict[int, Shards]] = []
    for fragment, since in enumerate(first.since):
        done = {pair for account in accounts for pair in account.learned[account.marks[fragment] :]}
        wanted = dict(first.owed.shards[fragment]) if first.owed.shards else {}
        wanted |= {step: tuple(range(num_shards)) for step in range(max(since, first.owed.until), until)}
        left = {step: tuple(s for s in shards if (step, s) not in done) for step, shards in wanted.items()}
        held.append({step: shards for step, shards in left.items() if shards})
    owed = Owed(until=until, shards=tuple(held))
    return owed, min(owed.first, *(account.step for account in accounts))


def deal(shards: Shards, step: int, num_copies: int) -> tuple[Shards, ...]:
    """What each copy has of the shards that are owed of a step: one by one in turn, another first in each step."""
    return tuple(shards[(copy - step) % num_copies :: num_copies] for copy in range(num_copies))


@dataclass(slots=True)
class Book:
    """One copy's own account, kept up to date. `place` is where it stands: None until it has begun."""

    num_fragments: int
    owed: Owed = field(default_factory=Owed)
    _since: list[int] = field(default_factory=list)
    _marks: list[int] = field(default_factory=list)
    _learned: list[tuple[int, int]] = field(default_factory=list)
    _places: dict[int, Place] = field(default_factory=dict)

    @property
    def place(self) -> Place | None:
        return self._places[max(self._places)] if self._places else None

    @property
    def mark(self) -> int:
        """How much is written down."""
        return len(self._learned)

    def begin(self, place: Place, owed: Owed | None = None) -> None:
        """All before this place is learned, by everybody, but for what is owed."""
        self.owed = owed or Owed()
        self._since, self._marks = [place.step] * self.num_fragments, [0] * self.num_fragments
        self._learned, self._places = [], {place.step: place}

    def learn(self, step: int, shard: int) -> list[bool]:
        """Write down that we learn from this shard; says which fragments lack it."""
        self._learned.append((step, shard))
        return [self.owed.lacks(fragment, step, shard) for fragment in range(self.num_fragments)]

    def reach(self, place: Place) -> None:
        """We have learned from all that was ours before this place."""
        self._places[place.step] = place

    def place_of(self, step: int) -> Place:
        return self._places[step]

    def agree(self, fragments: Iterable[int], step: int, mark: int) -> None:
        """All that anyone has learned from before `step`, of ours what was before `mark`, is in these fragments."""
        fragments = tuple(fragments)
        for fragment in fragments:
            self._since[fragment], self._marks[fragment] = step, mark
        self.owed = self.owed.without(fragments, step)
        cut, oldest = min(self._marks), min(self._since)
        del self._learned[:cut]
        self._marks = [each - cut for each in self._marks]
        self._places = {at: place for at, place in self._places.items() if at >= oldest}

    def account(self) -> Account:
        assert self.place is not None
        return Account(
            step=self.place.step,
            owed=self.owed,
            since=tuple(self._since),
            marks=tuple(self._marks),
            learned=tuple(self._learned),
        )
