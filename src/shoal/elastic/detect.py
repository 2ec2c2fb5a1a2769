"""Who is frozen, who hangs: silence and waiting, each compared with what has been usual lately.

Nobody is blamed on one signal alone. A member is *frozen* if it has been silent for longer than beats have been apart
lately, and peers wait for it longer than they usually do. It *hangs* if it beats, and peers wait far too long.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from shoal.elastic.recent import Limit, Recent

BEAT_SECONDS = 0.25
SILENCE_FLOOR, SILENCE_UNKNOWN = 1.25, 8.0
HUNG_SECONDS, HUNG_STEPS = 10.0, 5.0
HUNG_EARLY_SECONDS, HUNG_FIRST_SECONDS = 60.0, 600.0
"""How long peers may wait while few steps are known, and before the first: preparing and compiling take long."""
HUNG_ACTING_SECONDS = 120.0
"""The same while they do something else than steps: one of them may be writing to a slow disk for all."""
FEW_STEPS = 3
FRESH_SECONDS = 1.0
"""A `waiting` is repeated four times a second while it lasts; one that is older has ended."""
FIRST_SECONDS = 3.0
"""What a worker says to have waited before it first complained is believed up to this."""
STRIDE_SECONDS = 0.3
"""Whoever lets more time pass between two looks was kept from running."""


class OwnTime:
    """Time as the coordinator lived it: hours in which it did not run are not counted.

    Whoever was starved, stopped or suspended finds every peer silent, and has only itself to blame.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.lateness = 0.0
        self._last: float | None = None

    def at(self, now: float) -> float:
        """Advance to `now` by at most a stride; `lateness` is what was cut off this time."""
        passed = max(0.0, now - self._last) if self._last is not None else 0.0
        self._last = now
        self.lateness = max(0.0, passed - STRIDE_SECONDS)
        self.now += passed - self.lateness
        return self.now


@dataclass(slots=True)
class Heard:
    """What is known of one member."""

    beat_at: float
    step: int | None = None
    stepped_at: float = 0.0
    waits_for: frozenset[str] = frozenset()
    waits_since: float = 0.0
    said_at: float = float("-inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """Someone to be ended, and why. Durations in seconds, as the coordinator lived them."""

    id: str
    is_frozen: bool
    silent_seconds: float
    waited_seconds: float
    limit_seconds: float
    waited_by: tuple[str, ...] = ()


@dataclass(slots=True)
class Detector:
    """Takes beats and complaints, names suspects. All times are of `OwnTime`.

    Silence is compared with the gaps of all members together: what starves one of them on a host starves others.
    """

    gaps: Limit = field(default_factory=lambda: Limit(floor=SILENCE_FLOOR, unknown=SILENCE_UNKNOWN))
    steps: Recent = field(default_factory=Recent)
    heard: dict[str, Heard] = field(default_factory=dict)
    recording: set[str] = field(default_factory=set)
    """Members whose silence means little: a profiler that begins or ends lets no other thread run meanwhile."""

    def beat(self, member: str, step: int, now: float) -> None:
        """A sign of life, with the number of steps the member has behind it."""
        known = self.heard.get(member)
        if known is None:
            self.heard[member] = Heard(beat_at=now, step=step, stepped_at=now)
            return
        self.gaps.add(now - known.beat_at, now)
        known.beat_at = now
        if known.step is not None and step > known.step:
            self.steps.add((now - known.stepped_at) / (step - known.step))
        if step != known.step:
            known.step, known.stepped_at = step, now

    def starved(self, seconds: float, now: float) -> None:
        """The coordinator came late by this much. So may members on its host: silence weighs less for a while."""
        self.gaps.add(BEAT_SECONDS + seconds, now)

    def waiting(self, member: str, peers: Collection[str], seconds: float, now: float) -> None:
        """`member` has been waiting for `peers` for so long, by its own clock, and still does.

        Waits are told early and often, so what counts is how long we have heard of it: where everything stood still
        for a minute, everyone has waited for a minute.
        """
        known, awaited = self.heard.setdefault(member, Heard(beat_at=now)), frozenset(peers)
        goes_on = now - known.said_at <= FRESH_SECONDS and awaited <= known.waits_for
        earliest = known.waits_since if goes_on else now - FIRST_SECONDS
        known.waits_for, known.waits_since, known.said_at = awaited, max(earliest, now - seconds), now

    def forget(self, member: str) -> None:
        self.heard.pop(member, None)
        self.recording.discard(member)

    def settled(self) -> None:
        """A new World: complaints about the old one are void, and the first step takes what it takes."""
        for known in self.heard.values():
            known.said_at, known.step = float("-inf"), None

    def silence(self, member: str, now: float) -> float:
        """Seconds since the last beat; 0 of one that has not begun to beat."""
        known = self.heard.get(member)
        return now - known.beat_at if known else 0.0

    def suspects(
        self, members: Sequence[str], missing_since: dict[str, float], now: float, *, are_stepping: bool = True
    ) -> list[Suspect]:
        """Whom to end now. `missing_since` are members that a meeting has lacked since then."""
        complaints = self._complaints(members, missing_since, now)
        limit = max(hung_seconds(self.steps), 0.0 if are_stepping else HUNG_ACTING_SECONDS)
        accused = [self._judge(each, *complaints[each], now, limit) for each in members if each in complaints]
        frozen = [suspect for suspect in accused if suspect.is_frozen]
        return frozen or self._most_to_blame([s for s in accused if s.waited_seconds > s.limit_seconds], now)

    def _complaints(
        self, members: Sequence[str], missing_since: dict[str, float], now: float
    ) -> dict[str, tuple[float, tuple[str, ...]]]:
        """Who is waited for: since when, and by whom."""
        found: dict[str, tuple[float, tuple[str, ...]]] = {
            member: (since, ()) for member, since in missing_since.items()
        }
        for waiter in members:
            known = self.heard.get(waiter)
            if known is None or now - known.said_at > FRESH_SECONDS:
                continue
            for member in known.waits_for - {waiter}:
                since, by = found.get(member, (known.waits_since, ()))
                found[member] = min(since, known.waits_since), (*by, waiter)
        return found

    def _judge(self, member: str, since: float, by: tuple[str, ...], now: float, hung: float) -> Suspect:
        silent, limit = self.silence(member, now), self.gaps.seconds(now)
        if member in self.recording:  # a busy machine takes long to import and start a profiler
            limit, hung = max(limit, HUNG_SECONDS), max(hung, HUNG_EARLY_SECONDS)
        is_frozen = silent > limit
        known = self.heard.get(member)
        if known is not None and not is_frozen:  # whoever takes steps is slow, and does not hang
            since = max(since, known.stepped_at)
        return Suspect(
            id=member,
            is_frozen=is_frozen,
            silent_seconds=silent,
            waited_seconds=now - since,
            limit_seconds=limit if is_frozen else hung,
            waited_by=by,
        )

    def _most_to_blame(self, hanging: Sequence[Suspect], now: float) -> list[Suspect]:
        """One at a time: who is not itself waiting for others; where all wait for each other, the most waited for."""
        free = [suspect for suspect in hanging if not self._is_waiting(suspect.id, now)]
        return free[:1] or sorted(hanging, key=_weight)[-1:]

    def _is_waiting(self, member: str, now: float) -> bool:
        known = self.heard.get(member)
        return known is not None and now - known.said_at <= FRESH_SECONDS and bool(known.waits_for)


def hung_seconds(steps: Recent) -> float:
    """How long peers may wait for someone who beats, given how long steps have taken lately."""
    if len(steps) < FEW_STEPS:
        return HUNG_EARLY_SECONDS if len(steps) else HUNG_FIRST_SECONDS
    return max(HUNG_SECONDS, HUNG_STEPS * steps.quantile(0.99))


def _weight(suspect: Suspect) -> tuple[int, float]:
    return len(suspect.waited_by), suspect.waited_seconds


def silent_too_long(
    detector: Detector, members: Iterable[str], outside: Iterable[str], now: float, *, is_ending: bool
) -> list[str]:
    """Those whom nobody complains about, and who beat once and then stopped for good.

    Newcomers have no peers yet. A member may have none left, or none that is not frozen too; it has the state of the
    run, so it is given longer, and is given up only where a newcomer that could go on is heard, or others finished.
    """
    limit = max(HUNG_SECONDS, 3.0 * detector.gaps.seconds(now))
    newcomers = {member: detector.silence(member, now) for member in outside if member in detector.heard}
    found = [member for member, silent in newcomers.items() if silent > limit]
    if is_ending or any(silent < FRESH_SECONDS for silent in newcomers.values()):
        found += [member for member in members if detector.silence(member, now) > 3.0 * limit]
    return found
