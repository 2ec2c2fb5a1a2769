"""Who is in the World: a frozen state, an event, the next state and what to do about it. No clock, no I/O.

A process is started, says it is ready, becomes a member, and is lost or leaves. `settle.settle` follows every event
and publishes the next World when it is due. What makes this safe is its order: **nobody who was in an earlier World
and is not in the next can still write when the next is published**. The lost are dead and reaped. Newcomers come in,
and those too many go, only while all members stand still at a boundary between two steps.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, TypeVar

from shoal.elastic.decision import Decision, Fail, Kill, Note
from shoal.spec.world import Member, World

V = TypeVar("V")

MOST_LOSSES = 5
MOST_VAIN_STARTS = 9
"""Replacements that may be lost in a row before they take part, while others have the state, and would lose it."""
LONGEST_DELAY = 60.0
LEAVE_SECONDS = 30.0


class Phase(Enum):
    STARTING = "starting"
    READY = "ready"
    IDLE = "idle"
    MEMBER = "member"
    LEAVING = "leaving"


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """The living process of a worker number. `is_condemned`: it will be killed, and its end has not been seen yet.

    `is_entered`: it has worked in some World, so it may hold the state of the run. `is_told`: it knows of
    finished calls, and may have passed over them. `is_aside`: it is a member and has nothing to do in this World,
    because workers left over do not make a whole copy of the model.
    """

    id: str
    worker: int
    pid: int
    node: str = ""
    phase: Phase = Phase.STARTING
    since: float = 0.0
    is_condemned: bool = False
    is_entered: bool = False
    is_told: bool = False
    is_aside: bool = False

    def as_member(self) -> Member:
        return Member(id=self.id, worker=self.worker, node=self.node, pid=self.pid)


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """Everything that is known.

    Processes: the first `num_wanted` workers that are not `away` should be there, as far as there is `room` (None:
    any number). `asked` are being started, `due_at` says when others will be. `failures` counts how often in a row
    one was lost before it took part; `losses` counts losses since the last step, for each worker and (under −1) of
    Worlds, the last of them `lost_generation`.

    The World: `at_work` are the members heard of in it, `is_entered` says that all were. `is_held`: they were asked
    to stand still; `standing` are those that do, the last since `standing_since`; they say how many of them can be
    let go at a time (`most_leaving`; None: any number). `num_fruitless` counts times when it was for nothing,
    `next_hold` is when it may be asked again. `is_short`: it was said that there are too few.

    The end: `left` are the ids of those who ended well, `stopped` of newcomers that were told to. `is_missed`:
    someone needs one who left. `is_ending`: nobody is replaced. `is_failed`: nothing is decided any more.
    """

    min_workers: int
    max_workers: int
    num_wanted: int = 0
    away: frozenset[int] = frozenset()
    room: int | None = None
    world: World | None = None
    is_entered: bool = False
    processes: Mapping[int, Process] = field(default_factory=dict)
    incarnations: Mapping[int, int] = field(default_factory=dict)
    asked: frozenset[int] = frozenset()
    due_at: Mapping[int, float] = field(default_factory=dict)
    failures: Mapping[int, int] = field(default_factory=dict)
    losses: Mapping[int, int] = field(default_factory=dict)
    lost_generation: int | None = None
    left: frozenset[str] = frozenset()
    stopped: frozenset[str] = frozenset()
    is_missed: bool = False
    is_ending: bool = False
    is_failed: bool = False
    is_held: bool = False
    next_hold: float = 0.0
    num_fruitless: int = 0
    standing: frozenset[str] = frozenset()
    standing_since: float = 0.0
    most_leaving: int | None = None
    at_work: frozenset[str] = frozenset()
    is_short: bool = False
    reasons: tuple[str, ...] = ()

    def process(self, member_id: str) -> Process | None:
        """The living process with this id."""
        process = self.processes.get(int(member_id.partition(".")[0]))
        return process if process is not None and process.id == member_id else None

    @property
    def wanted(self) -> list[int]:
        """The numbers of the workers that should be there."""
        numbers = range(self.num_wanted + len(self.away))
        return [worker for worker in numbers if worker not in self.away][: self.num_wanted]

    def is_member(self, worker: int) -> bool:
        process = self.processes.get(worker)
        return process is not None and self.world is not None and process.id in self.world.ids


Step = tuple[Membership, list[Decision]]
CanJoin = Callable[[Process], bool]


def change(state: Membership, worker: int, **changes: Any) -> Membership:
    """The same state with other facts about one process."""
    process = replace(state.processes[worker], **changes)
    return replace(state, processes={**state.processes, worker: process})


def without(mapping: Mapping[int, V], key: int) -> Mapping[int, V]:
    return {k: value for k, value in mapping.items() if k != key}


def started(state: Membership, worker: int, pid: int, now: float) -> Membership:
    """A process was started for this worker number. Before the first World this also says how many are wanted."""
    incarnation = state.incarnations.get(worker, -1) + 1
    process = Process(id=f"{worker}.{incarnation}", worker=worker, pid=pid, since=now)
    return replace(
        state,
        num_wanted=max(state.num_wanted, worker + 1) if state.world is None else state.num_wanted,
        processes={**state.processes, worker: process},
        incarnations={**state.incarnations, worker: incarnation},
        asked=state.asked - {worker},
        due_at=without(state.due_at, worker),
    )


def ready(state: Membership, worker: int, node: str) -> Membership:
    """It wants to be in the World. Said again by a member it means nothing."""
    if state.processes[worker].phase is not Phase.STARTING:
        return state
    return change(state, worker, phase=Phase.READY, node=node)


def idle(state: Membership, worker: int) -> Membership:
    """It has found that it can never be in the World."""
    if state.processes[worker].phase is not Phase.READY:
        return state
    return change(state, worker, phase=Phase.IDLE)


def aside(state: Membership, worker: int) -> Membership:
    """A member found that there is nothing for it to do in the newest World. It holds no state from here on.

    Nobody waits for it: it counts as at work, and as standing still whenever that is asked for.
    """
    return entered(change(state, worker, is_aside=True), state.processes[worker].id)


def met(state: Membership) -> Membership:
    """All members of the newest World have met in it: from here on each may hold the state of the run."""
    assert state.world is not None
    ids = set(state.world.ids)
    processes = {
        w: replace(p, is_entered=p.is_entered or (p.id in ids and not p.is_aside)) for w, p in state.processes.items()
    }
    failures = {worker: n for worker, n in state.failures.items() if not state.is_member(worker)}
    return replace(state, processes=processes, failures=failures)


def entered(state: Membership, member_id: str) -> Membership:
    """A member works in the newest World. When all do, newcomers may be thought of."""
    world = state.world
    assert world is not None
    at_work = state.at_work | {member_id}
    worker = int(member_id.partition(".")[0])
    state = change(state, worker, is_entered=not state.processes[worker].is_aside)
    return replace(state, at_work=at_work, is_entered=at_work.issuperset(world.ids))


def stood(state: Membership, member_id: str, now: float, most_leaving: int | None = None) -> Membership:
    """A member has stopped after a step and waits for the next World. It may say how many can be let go at a time."""
    if member_id in state.standing:
        return state
    return replace(state, standing=state.standing | {member_id}, standing_since=now, most_leaving=most_leaving)


def progressed(state: Membership) -> Membership:
    """A step was committed: losses before it are forgiven."""
    return replace(state, losses={}, lost_generation=None) if state.losses else state


def missed(state: Membership) -> Membership:
    """A member waits for one who ended well: it has to go on without it."""
    return replace(state, is_missed=True)


def ending(state: Membership) -> Membership:
    """Nobody is replaced or let in any more."""
    return replace(state, is_ending=True)


def told(state: Membership, worker: int) -> Membership:
    return change(state, worker, is_told=True)


def condemn(state: Membership, worker: int, why: str) -> Step:
    """Have it killed, once. It counts as there until its end is seen."""
    if state.processes[worker].is_condemned:
        return state, []
    return change(state, worker, is_condemned=True), [Kill(worker, why)]


def resized(state: Membership, num_workers: int, going: frozenset[int] = frozenset()) -> Step:
    """So many workers are wanted from now on. Those that are `going` go, and then those with the highest numbers."""
    wanted = max(state.min_workers, min(num_workers, state.max_workers))
    note = Note("resized", None, {"asked": num_workers, "num_workers": wanted, "before": state.num_wanted})
    reasons = (*state.reasons, f"resized to {wanted}")
    state = replace(state, num_wanted=wanted, away=_away(state, wanted, going), reasons=reasons)
    there = set(state.wanted)
    return replace(state, due_at={worker: at for worker, at in state.due_at.items() if worker in there}), [note]


def _away(state: Membership, wanted: int, going: frozenset[int]) -> frozenset[int]:
    """The numbers to pass over, so that those who are there stay, as far as they may."""
    if not going and not state.away:
        return state.away
    there = [p.worker for p in state.processes.values() if p.phase is not Phase.LEAVING and not p.is_condemned]
    staying = [worker for worker in sorted(there) if worker not in going][:wanted]
    others = [worker for worker in range(state.max_workers) if worker not in staying]
    filling = sorted(others, key=lambda worker: (worker in going, worker))[: wanted - len(staying)]
    chosen = {*staying, *filling}
    return frozenset(range(max(chosen))) - chosen


def roomed(state: Membership, room: int | None) -> Membership:
    """Machines came or went. Whom there is no room for is wanted all the same, and is started when there is."""
    is_first = state.world is None and state.room is None and room is not None
    return replace(state, room=room, num_wanted=state.max_workers if is_first else state.num_wanted)


def exited(state: Membership, worker: int, code: int, now: float, *, is_retryable: bool) -> Step:
    """The process is gone and reaped. Who was lost is replaced; who left, or was let go, is not."""
    gone = state.processes[worker]
    state = replace(state, processes=without(state.processes, worker))
    if state.is_failed:
        return state, []
    if gone.phase is Phase.LEAVING or (gone.phase is not Phase.MEMBER and worker not in state.wanted):
        return state, []
    if gone.is_condemned and state.is_ending and not (gone.phase is Phase.MEMBER and gone.is_entered):
        return state, []  # nobody needed it any more
    if code == 0 and not gone.is_condemned:
        return replace(state, is_ending=True, left=state.left | {gone.id}), []
    if code > 0 and not is_retryable and not gone.is_condemned:
        return replace(state, is_failed=True), []  # the user's error: the caller ends the run with it
    return _lost(state, gone, code, now)


def _lost(state: Membership, gone: Process, code: int, now: float) -> Step:
    how = f"was killed by signal {-code}" if code < 0 else f"failed with code {code}"
    reason = f"rank {gone.worker} {how}"
    note = Note("worker_lost", gone.worker, {"id": gone.id, "code": code, "reason": reason})
    if gone.phase is Phase.MEMBER:
        state = replace(state, reasons=(*state.reasons, reason))
    state, fails = _count(state, gone)
    state = _schedule(state, gone, now)
    return state, [note, *fails]


def _count(state: Membership, gone: Process) -> Step:
    """Losses in a row. Several members of one World lost together count once: a host has one plug.

    Whoever said that it has nothing that others need, and ends, is no loss.
    """
    if gone.is_aside:
        return state, []
    if gone.phase is Phase.MEMBER and state.world is not None:
        if state.lost_generation == state.world.generation:
            return state, []
        state, key = replace(state, lost_generation=state.world.generation), -1
    elif gone.is_condemned:
        return state, []
    else:
        key = gone.worker
    count = state.losses.get(key, 0) + 1
    is_kept = any(process.is_entered for process in state.processes.values())
    is_failed = count > (MOST_VAIN_STARTS if is_kept and key >= 0 else MOST_LOSSES)
    state = replace(state, losses={**state.losses, key: count}, is_failed=is_failed)
    return state, [_too_many(gone.worker, count)] if is_failed else []


def _too_many(worker: int, count: int) -> Fail:
    return Fail(
        message=f"Workers were lost {count} times in a row without a step in between.",
        why=f"the last one was rank {worker}; whatever ends them also ends their replacements",
        hint="see the end of the logs with `shoal logs`, then go on with `shoal run --resume`",
    )


def _schedule(state: Membership, gone: Process, now: float) -> Membership:
    """Start it again: at once, or later and later if it keeps failing before it takes part."""
    failures = 0 if gone.is_entered or gone.is_condemned else state.failures.get(gone.worker, 0) + 1
    delay = 0.0 if failures < 2 else min(LONGEST_DELAY, 2.0 ** (failures - 2))
    return replace(
        state,
        failures={**state.failures, gone.worker: failures},
        due_at={**state.due_at, gone.worker: now + delay},
    )
