"""What is wrong with a run while it runs. Pure: what the launcher hears goes in, each trouble comes out once.

Nothing here owns a clock or reads a file. `now` is monotonic seconds, `clock` the launcher's wall clock.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.observe.breakdown import median
from shoal.observe.diagnose import find_cut
from shoal.observe.diagnosis import Diagnosis
from shoal.observe.gauge import Link, Strain, read_strain
from shoal.observe.straggling import explain_straggler, find_straggler
from shoal.observe.window import StepRow, read_rows
from shoal.spec.event import Event

KEPT_STEPS = 64
MAX_SHARES, FEW_STEPS = 256, 3
"""Of so many numbers of samples it is remembered how long the last few steps with them took."""
FIRST_STEPS = 3
"""The first steps of a World pay for what happens once."""
SILENT_SECONDS = 5.0
"""Whoever has told nothing for so long is not compared with the others."""
REPEAT_SECONDS = 600.0
CONTENDED_SECONDS = 20.0
"""Who waits for a core is named only if that lasts: on a busy machine it takes turns."""
STARVED = 0.5
"""If so much of what it takes longer than others is waiting for a core, that may be all that is the matter."""
LAPSE_SECONDS = 1.5
"""What is not seen for so long is over."""
_PATIENCE = {"slow_input": 1.0, "uneven_shares": 10.0, "no_core": CONTENDED_SECONDS}
"""What must last for so long: a loader may be starved for a moment, and shares are about to be made anew."""
STRAIN_SECONDS = 2.0
AHEAD_SECONDS, BEHIND_SECONDS, NUM_CLOCKS = 1.0, 2.0, 3
"""A clock is off if it was ahead, or behind, by so much in so many messages. Messages may come late, never early."""
WAITED_SECONDS, UNKNOWN_SECONDS = 1.0, 3.0
"""How long one who is stopped, or who does not answer, is waited for before that is said."""
FRESH_SECONDS = 1.5
LINK_SAMPLES, MAX_SAMPLES = 2, 24
SURE_SECONDS, LINK_REPEAT_SECONDS = 0.8, 10.0
SLOWED, FAR_SLOWER = 0.15, 0.08
"""A link is slow if it moves less than this part of what it did before, or of what the fastest does. On a busy
machine links that are alike differ by three times and more."""
LINK_BUSY, LINK_COMMUNICATE = 0.15, 0.2
"""It matters if it is busy for this part of the time, and steps are communication by that part."""

STOPPED = frozenset("Tt")
ANSWERS, SILENT, UNKNOWN = "answers", "silent", ""


@dataclass(slots=True)
class Heard:
    """What one rank has told lately."""

    at: float = float("-inf")
    rows: dict[int, StepRow] = field(default_factory=dict)
    shares: dict[int, deque[float]] = field(default_factory=dict)
    strains: deque[tuple[float, Strain]] = field(default_factory=deque)
    links: deque[tuple[tuple[Link, ...], float]] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))
    links_at: float | None = None
    clocks: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_CLOCKS))
    waits_for: frozenset[int] = frozenset()
    waited: float = 0.0
    said_at: float = float("-inf")
    equipment: str = ""

    def strain(self) -> Strain:
        """All that the kernel said in the last seconds."""
        each = [strain for _, strain in self.strains]
        return Strain(
            seconds=sum(one.seconds for one in each),
            cpu=sum(one.cpu for one in each),
            run_delay=sum(one.run_delay for one in each),
            throttled=sum(one.throttled for one in each),
            major_faults=sum(one.major_faults for one in each),
        )


StateOf = Callable[[int, float], str]
"""(rank, seconds it was waited for) -> the kernel's letter for its process, ANSWERS or SILENT, or UNKNOWN."""


def _usual_by_share(heard: Heard) -> dict[int, float]:
    """How long it computed when it last had so many samples, in the order of last times. The first steps pay for what
    happens once."""
    return {number: median([*last]) for number, last in heard.shares.items() if len(last) == FEW_STEPS}


def _delay(strain: Strain) -> float:
    """The part of the time in which the training thread was ready to run and got no core."""
    return strain.run_delay / max(strain.seconds, 1e-6)


class Live:
    """Listens to a run and names what is wrong with it. `ranks_at` has the ranks at an address, where known."""

    def __init__(self, ranks_at: Mapping[str, Sequence[int]] | None = None) -> None:
        self._heard: dict[int, Heard] = {}
        self._ranks_at = dict(ranks_at or {})
        self._generation = 0
        self._cut = ""
        self._found: list[Diagnosis] = []
        self._told: dict[tuple[str, int | None], float] = {}
        self._straggles: dict[tuple[int, str], tuple[float, float]] = {}
        self._accused: dict[int, float] = {}
        self._disk_told_at = self._link_told_at = float("-inf")
        self._link_since = float("inf")

    # What is heard.

    def hear(self, event: Event, now: float, clock: float) -> None:
        """A worker said something, or the launcher wrote something down. What makes no sense is passed over."""
        act = _HEARD.get(event.kind)
        if event.rank is not None and event.kind in ("progress", "beat", "waiting"):
            heard = self._heard.setdefault(event.rank, Heard())
            heard.at = now
            heard.clocks.append(event.time - clock)
        if act is not None:
            try:
                act(self, event, now)
            except (KeyError, TypeError, ValueError, AttributeError):
                return  # it comes from the user's own code

    def ended(self, rank: int) -> None:
        """A worker is gone: nothing it said counts any more."""
        self._heard.pop(rank, None)

    def _progress(self, event: Event, now: float) -> None:
        assert event.rank is not None
        if event.generation > self._generation:
            self._renew(event.generation)
        if event.generation < self._generation:
            return
        heard = self._heard[event.rank]
        heard.equipment = str(event.data.get("equipment") or "")
        for row in read_rows(event.data.get("window")):
            heard.rows[row.step] = row
            last = heard.shares.pop(row.num_samples, None)
            if last is not None or len(heard.shares) < MAX_SHARES:
                heard.shares[row.num_samples] = last or deque(maxlen=FEW_STEPS)
                heard.shares[row.num_samples].append(row.compute)
        for step in sorted(heard.rows)[:-KEPT_STEPS]:
            del heard.rows[step]
        strain = read_strain(event.data.get("strain"))
        heard.strains.append((now, strain))
        while heard.strains[0][0] < now - STRAIN_SECONDS:
            heard.strains.popleft()
        if "links" in (event.data.get("strain") or {}):
            if heard.links_at is not None:
                heard.links.append((strain.links, now - heard.links_at))
            heard.links_at = now
        heard.waits_for = frozenset()

    def _renew(self, generation: int) -> None:
        """Another World: what was usual in the old one says nothing about it."""
        self._generation = generation
        for heard in self._heard.values():
            heard.rows.clear()
            heard.shares.clear()
            heard.links.clear()
            heard.links_at = None

    def _world(self, event: Event, now: float) -> None:
        self._renew(max(self._generation, int(event.data.get("generation") or 0)))

    def _learn_cut(self, event: Event, now: float) -> None:
        self._cut = find_cut([event])

    def _waiting(self, event: Event, now: float) -> None:
        assert event.rank is not None
        heard = self._heard[event.rank]
        ranks = (int(str(member).partition(".")[0]) for member in event.data["members"])
        heard.waits_for = frozenset(ranks) - {event.rank}
        heard.waited, heard.said_at = float(event.data["seconds"]), now

    def _frozen(self, event: Event, now: float) -> None:
        silent = float(event.data.get("silent_seconds") or 0.0)
        self._accuse("frozen", event, f"it has given no sign of life for {silent:.1f} s, and the others wait for it")

    def _hung(self, event: Event, now: float) -> None:
        waited = float(event.data.get("waited_seconds") or 0.0)
        place = f"; it is in {event.data['where']}" if event.data.get("where") else ""
        self._accuse("hung", event, f"others have waited {waited:.1f} s for it, and its process lives{place}")

    def _accuse(self, cause: str, event: Event, why: str) -> None:
        if event.rank is None:
            return
        self._accused[event.rank] = event.time
        word = "is frozen" if cause == "frozen" else "hangs"
        hint = _FROZEN_HINT if cause == "frozen" else "`shoal stacks` shows what every rank is doing"
        self._add(cause, event.rank, f"Rank {event.rank} {word}.", why, hint, is_told=True, step=event.step)

    def _lost(self, event: Event, now: float) -> None:
        rank = event.rank
        if rank is None or event.time - self._accused.pop(rank, float("-inf")) < 30.0:
            return  # it was ended by us, for what was said of it
        reason = str(event.data.get("reason") or "it ended")
        self._add("dead", rank, f"Rank {rank} is dead.", reason, f"`shoal logs RUN --rank {rank}`", is_told=True)

    def _skipped(self, event: Event, now: float) -> None:
        data = event.data
        for rank in data.get("workers") or [None]:
            whose = "the run" if rank is None else f"rank {rank}"
            message = f"A loss or gradient of {whose} is no number, and the step was left out."
            why = " ".join(part for part in (str(data.get("message") or ""), str(data.get("why") or "")) if part)
            self._add("nan", rank, message, why, str(data.get("hint") or ""), step=event.step, is_told=True)

    def _diverged(self, event: Event, now: float) -> None:
        rank = int(event.data["worker"])
        doubt = "" if event.data.get("is_sure") else "; of two copies nobody can tell which one is right"
        self._add(
            "diverged",
            rank,
            f"The parameters of rank {rank} were not those of the others.",
            f"checksums of the copies differed before step {event.step}{doubt}",
            "test the memory of its machine; what it computed since may be wrong",
            step=event.step,
            is_told=True,
        )

    def _trouble(self, event: Event, now: float) -> None:
        """The disk refused something."""
        texts = [str(event.data.get(name) or "") for name in ("message", "why")]
        cause = disk_cause(" ".join(texts))
        if cause is None or now - self._disk_told_at < REPEAT_SECONDS:  # all ranks of a folder say the same
            return
        self._disk_told_at = now
        message = f"Rank {event.rank} cannot write to its disk" + (": it is full." if cause == "disk_full" else ".")
        hint = str(event.data.get("hint") or "") or _DISK_HINT
        self._add(cause, event.rank, message, " ".join(text for text in texts if text), hint)

    def failed(self, failures: Sequence[Any]) -> None:
        """Workers failed and the run ends with it: `failures` has the first cause first (`engine.cause.Failure`)."""
        if not failures:
            return
        first = failures[0]
        if first.is_lost_peer and self._told:
            return  # a consequence of what was told
        cause = first.cause or classify(first.message)
        accused = Counter(rank for each in failures if each.cause == first.cause for rank in each.ranks)
        most = max(accused.values(), default=0)
        rank = max((rank for rank, count in accused.items() if count == most), default=first.rank)
        message, why = first.message, first.why
        if cause == "dead":
            message, why = f"Rank {rank} is dead.", " ".join(part for part in (first.message, first.why) if part)
        self._add(cause, rank, message, why, first.hint, step=first.step, is_told=True)

    # What follows from it.

    def look(self, now: float, state_of: StateOf) -> list[Diagnosis]:
        """What is newly known to be wrong."""
        found, self._found = self._found, []
        found += [*self._stopped(now, state_of), *self._clocks(), *self._stragglers(now)]
        return [each for each in found if self._is_news(each, now)]

    def _is_news(self, found: Diagnosis, now: float) -> bool:
        key = found.cause, found.rank
        before, self._told[key] = self._told.get(key, float("-inf")), now
        return now - before >= REPEAT_SECONDS

    def _add(self, cause: str, rank: int | None, message: str, why: str, hint: str, **more: Any) -> None:
        self._found.append(Diagnosis(cause=cause, rank=rank, message=message, why=why, hint=hint, **more))

    def _stopped(self, now: float, state_of: StateOf) -> Iterator[Diagnosis]:
        """Those who are waited for, wait for nobody, and do not run."""
        fresh = {rank: heard for rank, heard in self._heard.items() if now - heard.said_at < FRESH_SECONDS}
        waits = {rank: heard for rank, heard in fresh.items() if heard.waits_for}
        awaited = {peer for heard in waits.values() for peer in heard.waits_for} - waits.keys()
        for rank in sorted(awaited):
            waited = max(heard.waited for heard in waits.values() if rank in heard.waits_for)
            if waited < WAITED_SECONDS or ("frozen", rank) in self._told:
                continue
            state = state_of(rank, waited)
            if state in STOPPED or state == SILENT:
                self._accused[rank] = now
                why = "its process is stopped" if state in STOPPED else "its process does not answer"
                yield Diagnosis(
                    cause="frozen",
                    rank=rank,
                    message=f"Rank {rank} is frozen.",
                    why=f"{why}, and others have waited {waited:.1f} s for it",
                    hint=_FROZEN_HINT,
                )

    def _clocks(self) -> Iterator[Diagnosis]:
        """Clocks that are off. A message is late by its way, so of several the earliest counts."""
        for rank, heard in self._heard.items():
            if len(heard.clocks) < NUM_CLOCKS:
                continue
            offset = max(heard.clocks)
            if min(heard.clocks) > AHEAD_SECONDS or offset < -BEHIND_SECONDS:
                way = "ahead of" if offset > 0 else "behind"
                yield Diagnosis(
                    cause="clock_skew",
                    rank=rank,
                    message=f"The clock of rank {rank} is {abs(offset):.1f} s {way} the launcher's.",
                    why="times in its logs, metrics and checkpoints cannot be compared with those of the others",
                    hint="let its machine keep time: `timedatectl set-ntp true`, or chrony",
                )

    def _stragglers(self, now: float) -> Iterator[Diagnosis]:
        heard = {rank: one for rank, one in self._heard.items() if now - one.at < SILENT_SECONDS and one.rows}
        first = min((min(one.rows) for one in heard.values()), default=0)
        if link := self._slow_link(heard, now):
            yield link
        if self._link_since <= now:  # whoever waits for a link seems late as well
            return
        # Only a World that has just begun has its first steps among those that are kept.
        is_young = any(len(one.rows) < KEPT_STEPS for one in heard.values())
        least = first + (FIRST_STEPS if is_young else 0)
        rows = {rank: {step: row for step, row in one.rows.items() if step >= least} for rank, one in heard.items()}
        # Parts of a model differ: which one is slow is seen by who is waited for, or by what changes.
        are_alike = len({one.equipment for one in heard.values()}) == 1 and not self._cut
        shares = {rank: _usual_by_share(one) for rank, one in heard.items()}
        found = find_straggler(rows, are_alike=are_alike, shares=shares)
        if found is None:
            return
        strain = heard[found.rank].strain()
        told = explain_straggler(found, rows, strain, self._cut)
        others = median([_delay(one.strain()) for rank, one in heard.items() if rank != found.rank])
        is_starved = _delay(strain) - others > max(0.05, STARVED * found.excess)
        patience = _PATIENCE.get(told.cause, 0.0)
        if is_starved and told.cause in _MAY_STARVE:
            patience = CONTENDED_SECONDS
        since, seen = self._straggles.get((found.rank, found.part), (now, now))
        since = since if now - seen < LAPSE_SECONDS else now
        self._straggles[found.rank, found.part] = since, now
        if now - since < patience:
            return
        yield told

    def _slow_link(self, heard: Mapping[int, Heard], now: float) -> Diagnosis | None:
        """The rank at whose end connections have become, or are, far slower than the others."""
        links = [link for rank, one in heard.items() for link in _links_of(rank, one, self._ranks_at)]
        slow = find_slow_end(links)
        rows = [row for one in heard.values() for row in sorted(one.rows.values())[-8:]]
        communicate = median([(row.communicate + row.wait) / max(row.seconds, 1e-9) for row in rows])
        if slow is None or communicate < LINK_COMMUNICATE:
            self._link_since = float("inf")
            return None
        self._link_since = min(self._link_since, now)
        # Those at the other end may have noticed first: let everyone tell of it.
        is_sure = all((one.links_at or 0.0) >= self._link_since + SURE_SECONDS for one in heard.values())
        if not is_sure or now - self._link_told_at < LINK_REPEAT_SECONDS:
            return None
        self._link_told_at = now
        rank, worst = slow
        last = worst.last
        rtt = f"; an answer takes {1e3 * last.rtt_seconds:.1f} ms" if last.rtt_seconds > 0.002 else ""
        resent = f"; {last.num_resent} packets were sent again" if last.num_resent else ""
        where = f"from rank {worst.sender} to {last.to}"
        return Diagnosis(
            cause="slow_link",
            rank=rank,
            message=f"Rank {rank} has a slow link, and all wait for what goes over it.",
            why=f"{where} {_mbit(worst.rate)} while it is busy, where {_mbit(worst.usual)} is usual{rtt}{resent}",
            hint="check cable, switch port and what else uses that link; or send less: `sync=local(...)`",
            cost=min(0.99, communicate * (1 - worst.rate / worst.usual)),
            step=max((row.step for row in rows), default=None),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Road:
    """One connection from a rank to an address: the least it moved lately, and what it used to move, bytes a second.

    `busy` is the part of the last second in which something was on its way.
    """

    sender: int
    receivers: tuple[int, ...]
    rate: float
    before: float | None
    busy: float
    last: Link
    usual: float = 0.0


def _links_of(rank: int, heard: Heard, ranks_at: Mapping[str, Sequence[int]]) -> Iterator[Road]:
    recent, before = [*heard.links][-LINK_SAMPLES:], [*heard.links][:-LINK_SAMPLES]
    if len(recent) < LINK_SAMPLES:
        return
    for to in {link.to for links, _ in recent for link in links}:
        now = [link for links, _ in recent for link in links if link.to == to]
        if len(now) < LINK_SAMPLES:
            continue
        then = [link.rate for links, _ in before for link in links if link.to == to]
        seconds = sum(passed for _, passed in recent)
        yield Road(
            sender=rank,
            receivers=tuple(ranks_at.get(to, ())),
            rate=max(link.rate for link in now),
            before=median(then) if len(then) >= LINK_SAMPLES else None,
            busy=sum(link.busy_seconds for link in now) / max(seconds, 1e-6),
            last=now[-1],
        )


def find_slow_end(roads: Sequence[Road]) -> tuple[int, Road] | None:
    """Of connections that became far slower, or are far slower than the fastest, the rank that most of them touch.

    A host whose link is bad is slow to send, and slow to answer those who send to it. The one that is slowest decides
    where several ranks are touched alike: its sender has the worse end.
    """
    fastest = max((road.rate for road in roads), default=0.0)
    slow = []
    for road in roads:
        has_slowed = road.before is not None and road.rate <= SLOWED * road.before
        is_slow = len(roads) > 1 and road.rate <= FAR_SLOWER * fastest
        if road.busy >= LINK_BUSY and (has_slowed or is_slow):
            usual = road.before if has_slowed and road.before is not None else fastest
            slow.append(replace(road, usual=usual))
    if not slow:
        return None
    worst = min(slow, key=lambda road: road.rate)
    touched = Counter(rank for road in slow for rank in {road.sender, *road.receivers})
    return max(touched, key=lambda rank: (touched[rank], rank == worst.sender)), worst


def _mbit(rate: float) -> str:
    return f"{8e-6 * rate:.0f} Mbit/s"


_MAY_STARVE = frozenset(("slow_compute", "busy_elsewhere"))
_FROZEN_HINT = "`kill -CONT` lets it go on; an elastic run (`-n 1:4`) replaces such a worker"
_DISK_HINT = "free some space; writing is tried again"
_FULL = ("no space left", "disk quota exceeded", "disk is full", "enospc")
_REFUSED = ("cannot write", "input/output error", "read-only file system", "could not be saved")
_SHAPES = ("shapes cannot be multiplied", "size mismatch", "must match the size", "shape mismatch", "shape '[")


def disk_cause(text: str) -> str | None:
    """`disk_full` or `disk_failed`, where a text tells of it."""
    text = text.lower()
    if any(words in text for words in _FULL):
        return "disk_full"
    return "disk_failed" if any(words in text for words in _REFUSED) else None


def classify(message: str) -> str:
    """The cause of an error of the user's own code, from what it says."""
    text = message.lower()
    if any(words in text for words in _FULL):
        return "disk_full"
    return "shape_mismatch" if any(words in text for words in _SHAPES) else "failed"


_HEARD: Mapping[str, Callable[[Live, Event, float], None]] = {
    "progress": Live._progress,
    "world": Live._world,
    "pipeline": Live._learn_cut,
    "tensor_plan": Live._learn_cut,
    "waiting": Live._waiting,
    "worker_frozen": Live._frozen,
    "worker_hung": Live._hung,
    "worker_lost": Live._lost,
    "step_skipped": Live._skipped,
    "replica_diverged": Live._diverged,
    "trouble": Live._trouble,
    "checkpoint_failed": Live._trouble,
    "fence_failed": Live._trouble,
}
