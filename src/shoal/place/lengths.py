"""How long jobs are, learned from those that have ended: a job is likely as long as others of its kind were."""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field

Key = tuple[Hashable, ...]
"""What is known of a job when it is submitted, the coarsest first: (script, owner, folder, arguments)."""

MAX_KEPT = 64

FIRST_SPREAD = 0.5
"""How far one job may be from another of its kind, as a part of its length, before others were seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What is thought to be left of a job. `spread` is one standard deviation, as a part of `left`.

    `num_jobs` are those that it is told from, and `depth` how much of their key they have in common with it.
    """

    left: float
    spread: float
    num_jobs: int
    depth: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """Amounts of work that jobs took in all, by key and by each beginning of it. Any unit; the same for one key."""

    seen: Mapping[Key, tuple[float, ...]] = field(default_factory=dict)

    def learned(self, key: Key, amount: float) -> "Lengths":
        """With one more job that has ended. The last `MAX_KEPT` of a key are kept."""
        return self.learned_all([(key, amount)])

    def learned_all(self, jobs: Iterable[tuple[Key, float]]) -> "Lengths":
        """The same with many jobs, in the order in which they ended."""
        new = dict(self.seen)
        for key, amount in jobs:
            for size in range(1, len(key) + 1):
                new[key[:size]] = (*new.get(key[:size], ()), amount)[-MAX_KEPT:]
        return Lengths(new)

    def outlook(self, key: Key, done: float = 0.0) -> Outlook | None:
        """How much is left of a job that has done so much: the mean of those that took more. None: nobody knows.

        If it has done more than any, as much again as it has done: long jobs are of all lengths.
        """
        for size in range(len(key), 0, -1):
            amounts = self.seen.get(key[:size])
            if amounts:
                longer = [amount - done for amount in amounts if amount > done]
                if not longer:
                    return Outlook(left=max(done, 1e-9), spread=1.0, num_jobs=0, depth=size)
                left = sum(longer) / len(longer)
                # What was seen, and one job more that is as far off as jobs usually are.
                total = sum((each - left) ** 2 for each in longer) + (FIRST_SPREAD * left) ** 2
                return Outlook(
                    left=left, spread=(total / len(longer)) ** 0.5 / left, num_jobs=len(longer), depth=size
                )
        return None

    def expect(self, key: Key, done: float = 0.0) -> float | None:
        """How much is left of it, without how sure that is."""
        found = self.outlook(key, done)
        return None if found is None else found.left
