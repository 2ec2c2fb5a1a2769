"""How long jobs are, learned from those that have ended: a job is likely as long as others of its kind were."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

Key = tuple[Hashable, ...]
"""What is known of a job when it is submitted, the most telling first: (script, arguments, workers asked for)."""

MAX_KEPT = 64


@dataclass(frozen=True, slots=True)
class Lengths:
    """Amounts of work that jobs took in all, by key and by each beginning of it. Any unit; the same for one key."""

    seen: Mapping[Key, tuple[float, ...]] = field(default_factory=dict)

    def learned(self, key: Key, amount: float) -> "Lengths":
        """With one more job that has ended. The last `MAX_KEPT` of a key are kept."""
        new = dict(self.seen)
        for size in range(1, len(key) + 1):
            new[key[:size]] = (*new.get(key[:size], ()), amount)[-MAX_KEPT:]
        return Lengths(new)

    def expect(self, key: Key, done: float = 0.0) -> float | None:
        """How much is left of a job that has done so much: the mean of those that took more. None: nobody knows.

        If it has done more than any, as much again as it has done: long jobs are of all lengths.
        """
        for size in range(len(key), 0, -1):
            amounts = self.seen.get(key[:size])
            if amounts:
                longer = [amount - done for amount in amounts if amount > done]
                return sum(longer) / len(longer) if longer else max(done, 1e-9)
        return None
