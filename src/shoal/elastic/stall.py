"""Who holds up a run that nobody can leave: workers say for whom they wait, and who does not wait is to blame.

For runs of fixed size. Nobody is ended for it: the launcher tells people, and the group's own timeout does the rest.
So it may be told a little early: a minute is enough also before the first step.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from shoal.elastic.detect import FEW_STEPS, HUNG_EARLY_SECONDS, HUNG_STEPS, hung_seconds
from shoal.elastic.recent import Recent

FRESH_SECONDS = 1.5
"""A `waiting` is repeated four times a second while it lasts; one that is older has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalled:
    """`ranks` do not come, and `waited_by` wait for them. Where all wait for each other, all are in both."""

    ranks: tuple[int, ...]
    waited_by: tuple[int, ...]
    waited_seconds: float
    limit_seconds: float


@dataclass(slots=True)
class Wait:
    peers: frozenset[int]
    began: float
    said_at: float


@dataclass(slots=True)
class Stall:
    """Takes what workers say and names those who hold up the others. `now` is monotonic seconds."""

    steps: Recent = field(default_factory=Recent)
    stalled: Stalled | None = None
    since: float = 0.0
    _waits: dict[int, Wait] = field(default_factory=dict)
    _seen: dict[int, tuple[int, float]] = field(default_factory=dict)

    def stepped(self, rank: int, step: int, now: float) -> None:
        """A worker has come so far. It says so now and then: steps that it took meanwhile count as several."""
        before, at = self._seen.get(rank, (step, now))
        if (num_steps := step - before) > 0:
            self.steps.extend([(now - at) / num_steps] * min(num_steps, FEW_STEPS))
        self._seen[rank] = step, now

    def waiting(self, rank: int, members: Iterable[str], seconds: float, now: float) -> None:
        """A worker has waited so long for these members, and still does."""
        peers = frozenset(int(member.partition(".")[0]) for member in members) - {rank}
        self._waits[rank] = Wait(peers=peers, began=now - seconds, said_at=now)

    def look(self, now: float) -> Stalled | None:
        """Somebody who holds up the others, told once; `ended` says when that is over."""
        waits = self._fresh(now)
        waited = max((now - wait.began for wait in waits.values()), default=0.0)
        limit = min(hung_seconds(self.steps), max(HUNG_EARLY_SECONDS, HUNG_STEPS * self.steps.longest()))
        if self.stalled is not None or waited <= limit:
            return None
        awaited = {peer for wait in waits.values() for peer in wait.peers}
        self.since = min(wait.began for wait in waits.values())
        self.stalled = Stalled(
            ranks=tuple(sorted(awaited - waits.keys() or awaited)),
            waited_by=tuple(sorted(waits)),
            waited_seconds=waited,
            limit_seconds=limit,
        )
        return self.stalled

    def ended(self, now: float) -> Stalled | None:
        """The stall that is over: nobody waits any more for those who were named."""
        stalled = self.stalled
        if stalled is None or any(wait.peers.intersection(stalled.ranks) for wait in self._fresh(now).values()):
            return None
        self.stalled = None
        return stalled

    def _fresh(self, now: float) -> dict[int, Wait]:
        return {rank: wait for rank, wait in self._waits.items() if now - wait.said_at <= FRESH_SECONDS}
