"""Wiring: an elastic run. What happens to its workers goes to the coordinator, and what that decides is done."""

import contextlib
import json
import math
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shoal.elastic.coordinator import Coordinator
from shoal.elastic.decision import Decision, Fail, Kill, Note, Start, Tell
from shoal.engine.cause import EXIT_SECONDS, WINDOW_SECONDS, Evidence, Failure, find_failures
from shoal.engine.engine import Engine
from shoal.engine.stacks import Stack
from shoal.hanging import tell_stack, tell_where
from shoal.spec.errors import MemberLost, UserError
from shoal.spec.event import Event
from shoal.spec.job import WorkerExit, WorkerSpec

TICK_SECONDS = 0.05
"""How often the coordinator looks at the time."""


SPARE_SECONDS = 1.0
"""How long after a change of the World a spare process is started: those who join come first."""

FACTS_SECONDS = 0.3
"""How long after a change run.json says how many there are: a disk may take its time."""

MAX_LOST = 16
"""How many of those that were lost are remembered, to be told if the run fails in the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """What the run around it does for an elastic one."""

    spec_of: Callable[[int, int], WorkerSpec]
    write: Callable[[Event], None]
    show: Callable[[str], None]
    began: Callable[[int], None]
    changed: Callable[[int], None]
    take_stacks: Callable[[str], Mapping[int, Stack]] = lambda reason: {}


class ElasticRun:
    """Keeps a run going while workers come and go. Nothing is done between calls of `look`.

    `failure` is set when the coordinator has given up.
    """

    def __init__(
        self, engine: Engine, min_workers: int, max_workers: int, hooks: Hooks, *, has_spare: bool = False
    ) -> None:
        self.failure: Failure | None = None
        self.min_workers, self.max_workers = min_workers, max_workers
        self._engine = engine
        self._hooks = hooks
        self._coordinator = Coordinator(min_workers=min_workers, max_workers=max_workers)
        self._incarnations: dict[int, int] = {}
        self._decisions: list[Decision] = []
        self._errors: dict[int, Event] = {}
        self._ends: dict[int, str] = {}
        self._lost: deque[tuple[WorkerExit, Event | None]] = deque(maxlen=MAX_LOST)
        self._generation = -1
        self._known: set[str] = set()
        self._due = 0.0
        self._spare_due = 0.0 if has_spare else math.inf
        self._facts_due = math.inf

    @property
    def num_workers(self) -> int:
        """How many take part now and live."""
        world, pids = self._coordinator.world, self._engine.pids
        return len(pids) if world is None else sum(pids.get(each.worker) == each.pid for each in world.members)

    def begin(self) -> None:
        """Workers have been started for the first time: all, or as many as there is room for."""
        for worker, pid in self._engine.pids.items():
            self._incarnations[worker] = 0
            self._decisions += self._coordinator.started(worker, pid, time.monotonic())
        self._decisions += self._coordinator.roomed(self._engine.room, time.monotonic())

    def hear(self, event: Event) -> None:
        """A worker said something that is not for people, or that it failed with a retryable error."""
        worker = event.rank or 0
        if event.kind == "error":
            self._errors[worker] = event
            return
        # What is not of the protocol comes from the user's own code, and must not end the run.
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
            self._decisions += self._coordinator.heard(worker, event.kind, event.data, time.monotonic())

    def exited(self, end: WorkerExit, *, is_failure: bool) -> bool:
        """A worker is gone; True where the run goes on without it. `is_failure`: it was not killed, it failed."""
        self._decisions += self._coordinator.roomed(self._engine.room, time.monotonic())
        error = self._errors.pop(end.rank, None)
        is_lost = end.code != 0 and (error is not None or not is_failure)
        if is_lost:
            self._lost.append((end, error))
        self._ends[end.rank] = self._ends.get(end.rank) or _how(end, error)
        is_retryable = error is not None
        self._decisions += self._coordinator.exited(end.rank, end.code, time.monotonic(), is_retryable=is_retryable)
        return is_lost

    def resize(self, num_workers: int, going: frozenset[int] = frozenset()) -> None:
        """Someone asked for another number of workers, within the limits; those that are `going` go first."""
        self._decisions += self._coordinator.resized(num_workers, time.monotonic(), going)

    def look(self) -> None:
        """Do what has been decided, and what is due."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + TICK_SECONDS
            self._decisions += self._coordinator.roomed(self._engine.room, now)
            self._decisions += self._coordinator.ticked(now)
            self._end_failed()
            self._do_later(now)
        self._carry_out()

    def stop(self, reason: str) -> None:
        """The run is to end: let workers know why they are about to be asked to."""
        self._decisions = [
            each for each in self._coordinator.stopping(reason, time.monotonic()) if isinstance(each, Tell)
        ]
        self._carry_out()

    @property
    def is_waiting(self) -> bool:
        """Nobody may be running, and someone will be started."""
        state = self._coordinator.state
        return bool(state.due_at) and not state.is_ending

    @property
    def lost_ranks(self) -> set[int]:
        return {end.rank for end, _ in self._lost}

    def find_failures(self, evidence: Evidence) -> list[Failure]:
        """What made the run fail, the first cause first. Workers that were lost count if nothing else explains it."""
        failures = find_failures(evidence)
        is_explained = not failures[0].is_lost_peer if failures else bool(evidence.exits)
        if self.failure is None and is_explained:
            return failures
        since = failures[0].time - WINDOW_SECONDS if failures else 0.0
        lost = {end.rank: (end, error) for end, error in self._lost if end.time >= since}
        exits = [end for end, _ in lost.values()]
        errors = [error for _, error in lost.values() if error is not None]
        found = find_failures(replace(evidence, exits=[*exits, *evidence.exits], errors=[*errors, *evidence.errors]))
        return found if self.failure is None else [self.failure, *found]

    def _carry_out(self) -> None:
        while self._decisions and self.failure is None:
            decisions, self._decisions = self._decisions, []
            for decision in decisions:
                self._do(decision)
        self._look_at_world()

    def _do(self, decision: Decision) -> None:
        match decision:
            case Tell():
                self._engine.tell(decision.worker, json.dumps(decision.message).encode())
            case Start():
                self._start(decision.worker)
            case Kill():
                self._ends[decision.worker] = decision.why
                self._engine.kill(decision.worker)
            case Fail():
                self.failure = _as_failure(decision)
            case Note():
                self._note(decision)

    def _start(self, worker: int) -> None:
        incarnation = self._incarnations.get(worker, -1) + 1
        self._incarnations[worker] = incarnation
        try:
            self._engine.start([self._hooks.spec_of(worker, incarnation)])
        except UserError as error:
            # As if it had started and died at once: the coordinator tries again, and gives up in the end.
            self._ends[worker] = f"cannot be started: {error.why or error.message}"
            self._decisions += self._coordinator.started(worker, 0, time.monotonic())
            self.exited(WorkerExit(rank=worker, code=-signal.SIGKILL, time=time.time()), is_failure=False)
            return
        pid = self._engine.pids.get(worker, 0)
        self._ends.pop(worker, None)
        self._hooks.began(worker)
        self._write("worker_started", worker, {"pid": pid, "incarnation": incarnation})
        self._decisions += self._coordinator.started(worker, pid, time.monotonic())

    def _do_later(self, now: float) -> None:
        """What those who are waiting for a new World should not wait for."""
        if now > self._facts_due:
            self._facts_due = math.inf
            if not self._coordinator.state.is_ending:  # who has finished is no loss
                self._hooks.changed(self.num_workers)
        if self._generation >= 0 and now > self._spare_due:
            self._spare_due = now + SPARE_SECONDS
            pids = self._engine.pids
            if pids and not self._coordinator.is_awaiting:
                self._engine.keep_spare(self._hooks.spec_of(min(pids), 0))

    def _end_failed(self) -> None:
        """A worker that reported an error and does not end is held up by threads of its own."""
        for worker, event in self._errors.items():
            if time.time() > event.time + EXIT_SECONDS:
                self._engine.kill(worker)

    def _note(self, note: Note) -> None:
        if note.kind in ("worker_hung", "worker_frozen"):
            self._accuse(note)
            return
        self._write(note.kind, note.rank, note.data)
        worker = -1 if note.rank is None else note.rank
        is_back = self._incarnations.get(worker, 0) > 0
        text = tell(note, self.num_workers, f"({self._ends.get(worker, 'gone')}){self._what_then()}", is_back=is_back)
        if text and not (note.kind == "worker_joined" and note.data.get("id") in self._known):
            self._hooks.show(text)

    def _accuse(self, note: Note) -> None:
        """Somebody is about to be killed: see what everyone is doing while that can be seen."""
        words = tell(note, self.num_workers, "", is_back=False)
        stack = self._hooks.take_stacks(words).get(-1 if note.rank is None else note.rank)
        self._write(note.kind, note.rank, {**note.data, **(stack.facts() if stack is not None else {})})
        self._hooks.show(words)
        if stack is not None:
            self._hooks.show(tell_stack(stack))
        if stack is not None and stack.thread:
            self._hooks.show(tell_where(stack.path))

    def _what_then(self) -> str:
        if self._coordinator.world is None:
            return "; starting it again"
        is_enough = self.num_workers >= self.min_workers
        return f"; going on with {_workers(self.num_workers)}" if is_enough else ""

    def _write(self, kind: str, worker: int | None, data: Mapping[str, Any]) -> None:
        world = self._coordinator.world
        generation = world.generation if world is not None else 0
        self._hooks.write(Event(kind=kind, time=time.time(), rank=worker, generation=generation, data=data))

    def _look_at_world(self) -> None:
        world = self._coordinator.world
        if world is not None and world.generation != self._generation:
            self._generation = world.generation
            self._spare_due = max(self._spare_due, time.monotonic() + SPARE_SECONDS)
            self._known.update(world.ids)
            self._facts_due = time.monotonic() + FACTS_SECONDS


def _how(end: WorkerExit, error: Event | None) -> str:
    """How a worker ended, in a few words."""
    if error is not None:
        return str(error.data.get("message") or error.data.get("type") or "retryable error").partition("\n")[0]
    if end.code >= 0:
        return f"exit code {end.code}"
    try:
        return f"killed by {signal.Signals(-end.code).name}"
    except ValueError:
        return f"killed by signal {-end.code}"


def _as_failure(decision: Fail) -> Failure:
    return Failure(
        rank=None,
        time=time.time(),
        exit_code=MemberLost.exit_code,
        message=decision.message,
        why=decision.why,
        hint=decision.hint,
    )


def tell(note: Note, num_workers: int, how: str, *, is_back: bool) -> str:
    """What people are told about a change, in a line; nothing where it is not worth one.

    `how` is how a worker that was lost ended, and what is done about it.
    """
    data, rank = note.data, note.rank
    match note.kind:
        case "worker_lost":
            return f"lost rank {rank} {how}"
        case "worker_joined":
            return f"rank {rank} {'is back' if is_back else 'has joined'}; {_workers(num_workers)}"
        case "worker_frozen":
            return f"rank {rank} is frozen: no sign of life for {data.get('silent_seconds', 0.0):.1f} s; killing it"
        case "worker_hung":
            then = "; killing it" if data.get("is_ended", True) else ", and it is in code of your own"
            return f"rank {rank} hangs: others have waited {data.get('waited_seconds', 0.0):.1f} s for it{then}"
        case "waiting_for_workers":
            return f"{data.get('present')} left and {data.get('min_workers')} needed; waiting for replacements"
        case "going_on_with_few":
            needed = data.get("min_workers")
            return f"{data.get('present')} left and {needed} needed; going on, for replacements cannot catch up"
    return ""


def _workers(count: int) -> str:
    return f"{count} worker{'s' * (count != 1)}"
