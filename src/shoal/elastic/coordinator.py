"""The one who decides who takes part: the launcher tells it all that happens to workers, and does what it decides."""

from collections.abc import Mapping
from typing import Any

from shoal.elastic import membership
from shoal.elastic.calls import Calls, Place, place_in
from shoal.elastic.decision import Decision, Note, Tell
from shoal.elastic.detect import Detector, OwnTime, Suspect, silent_too_long
from shoal.elastic.membership import Membership, Phase, Process
from shoal.elastic.message import called_message, stop_message
from shoal.elastic.relay import Relay
from shoal.elastic.settle import Places, is_all_lost, live_members, settle
from shoal.spec.world import World

APART_TIMES = 6.0
"""Whoever hangs in the user's own code, between two calls of a trainer, is named at once and ended so much later."""


class Coordinator:
    """Membership, rendezvous, the history of calls, and detection of the silent. Time is an argument: seconds.

    Decisions are to be carried out in their order and at once. Before `started` is called for a worker again,
    `exited` was, and nothing that the dead process said comes after it. A message may carry `member`, the sender's
    id; then one of a dead sender is recognised and dropped.
    """

    def __init__(self, *, min_workers: int, max_workers: int) -> None:
        self.state = Membership(min_workers=min_workers, max_workers=max_workers)
        self.detector = Detector()
        self.relay = Relay()
        self.calls = Calls()
        self._places: dict[str, Place] = {}
        self._standing: dict[str, float] = {}
        self._time = OwnTime()
        self._best_step = 0
        self._apart: set[str] = set()
        self._named: set[str] = set()
        self._heard = {
            "ready": self._ready,
            "gather": self._gather,
            "boundary": self._boundary,
            "beat": self._beat,
            "waiting": self._waiting,
            "called": self._called,
            "idle": self._idle,
            "aside": self._aside,
            "recording": self._recording,
            "recorded": self._recorded,
        }

    @property
    def world(self) -> World | None:
        """The newest one that was published."""
        return self.state.world

    @property
    def is_awaiting(self) -> bool:
        """Somebody is on its way into the World."""
        return any(process.phase in (Phase.STARTING, Phase.READY) for process in self.state.processes.values())

    @property
    def is_over(self) -> bool:
        """No process is there, and none will be: one that fails again and again is started after a pause."""
        return not self.state.processes and (self.state.is_ending or self.state.is_failed)

    def started(self, worker: int, pid: int, now: float) -> list[Decision]:
        """A process runs for this worker number."""
        self._advance(now)
        self.state = membership.started(self.state, worker, pid, now)
        return self._settle(now)

    def heard(self, worker: int, kind: str, data: Mapping[str, Any], now: float) -> list[Decision]:
        """A worker said something. Other kinds than those of the protocol mean nothing here."""
        process = self.state.processes.get(worker)
        act = self._heard.get(kind)
        if process is None or act is None or data.get("member", process.id) != process.id:
            return []
        self._advance(now)
        return act(process, data, now)

    def exited(self, worker: int, code: int, now: float, *, is_retryable: bool) -> list[Decision]:
        """A worker's process is gone and reaped: it cannot write any more."""
        process = self.state.processes.get(worker)
        if process is None:
            return []
        self._advance(now)
        self._forget(process)
        self.state, decisions = membership.exited(self.state, worker, code, now, is_retryable=is_retryable)
        self._note_missed()
        return self._put_worlds_first(decisions, self._settle(now))

    def resized(self, num_workers: int, now: float, going: frozenset[int] = frozenset()) -> list[Decision]:
        """Another number of workers is wanted; those that are `going` are to be the first to go."""
        self._advance(now)
        self.state, decisions = membership.resized(self.state, num_workers, going)
        return [*decisions, *self._settle(now)]

    def roomed(self, room: int | None, now: float) -> list[Decision]:
        """There is room for so many workers, those that run included; None is for any number."""
        if room == self.state.room:
            return []
        self._advance(now)
        self.state = membership.roomed(self.state, room)
        return self._settle(now)

    def stopping(self, reason: str, now: float) -> list[Decision]:
        """Everybody shall finish the step, save and end. Nobody is replaced from now on."""
        self._advance(now)
        self.state = membership.ending(self.state)
        tells: list[Decision] = [Tell(worker, stop_message(reason)) for worker in self.state.processes]
        return [*tells, *self._settle(now)]

    def ticked(self, now: float) -> list[Decision]:
        """Time passes; call it ten times a second. If it comes late *we* did not run, and nobody else is blamed."""
        self._advance(now)
        decisions: list[Decision] = []
        if self._time.lateness == 0.0:
            decisions += self._end_suspects()
        return [*decisions, *self._settle(now)]

    # What workers say.

    def _ready(self, process: Process, data: Mapping[str, Any], now: float) -> list[Decision]:
        facts = data.get("process") or {}
        if facts.get("pid", process.pid) != process.pid:
            return []
        place = place_in(data) or (0, 0)
        if process.id not in self._places or place not in self.calls.finished:  # one that was overtaken says nothing
            self._places[process.id] = place
        told = self._tell_calls(process)
        self.state = membership.ready(self.state, process.worker, str(facts.get("node", "")))
        return [*told, *self._settle(now)]

    def _gather(self, process: Process, data: Mapping[str, Any], now: float) -> list[Decision]:
        if self._is_of_now(process, data):
            self._saw_step(int(data.get("step") or 0))  # whole Worlds may pass between two beats
        decisions = self.relay.gather(process.id, data, self._time.now)
        if decisions:
            self.state = membership.met(self.state)
        self._note_missed()
        return [*decisions, *self._settle(now)] if self.state.is_missed else decisions

    def _boundary(self, process: Process, data: Mapping[str, Any], now: float) -> list[Decision]:
        """A member stands still between two steps. It says where, and that is newer than any beat."""
        if not self._is_of_now(process, data) or not self.state.is_held:
            return []
        self.calls.saw(process.id, data)
        self._standing.setdefault(process.id, self._time.now)
        self.state = membership.stood(self.state, process.id, now, data.get("most_leaving"))
        self._note_missed()
        return self._settle(now)

    def _beat(self, process: Process, data: Mapping[str, Any], now: float) -> list[Decision]:
        step = int(data.get("step") or 0)
        self.detector.beat(process.id, step, self._time.now)
        (self._apart.add if data.get("is_apart") else self._apart.discard)(process.id)
        if not self.state.is_member(process.worker):
            return self._tell_calls(process)
        if not self._is_of_now(process, data):
            return []
        if process.id not in self.state.standing:
            self.calls.saw(process.id, data)
        self._saw_step(step)
        if process.id in self.state.at_work:
            return []
        self.state = membership.entered(self.state, process.id)
        return self._settle(now)

    def _recording(self, process: Process, data: Mapping[str, Any], now: float) -> list[Decision]:
        self.detector.recording.add(process.id)
        return []

    def _recorded(self, process: Process, data: Mapping[str, Any], now: float) -> list[Decision]:
        self.detector.recording.discard(process.id)
        return []

    def _waiting(self, process: Process, data: Mapping[str, Any], now: float) -> list[Decision]:
        if not self._is_of_now(process, data):
            return []
        members = [str(member) for member in data["members"]]
        self.detector.waiting(process.id, members, float(data["seconds"]), self._time.now)
        if not self.state.left.intersection(members):
            return []
        self.state = membership.missed(self.state)
        return self._settle(now)

    def _called(self, process: Process, data: Mapping[str, Any], now: float) -> list[Decision]:
        """A call is finished. Those who are on their way hear of it, members that do not work yet included."""
        if not self.state.is_member(process.worker) or not self.calls.finish(data):
            return []
        call = list(self.calls.finished.values())[-1:]
        late = [p.worker for p in self.state.processes.values() if (p.is_told or p.is_aside) and not p.is_entered]
        return [*(Tell(worker, called_message(call)) for worker in late), *self._settle(now)]

    def _idle(self, process: Process, data: Mapping[str, Any], now: float) -> list[Decision]:
        """A newcomer cannot get to where the members are. They do not wait for it."""
        self.state = membership.idle(self.state, process.worker)
        return self._settle(now)

    def _aside(self, process: Process, data: Mapping[str, Any], now: float) -> list[Decision]:
        """A member has nothing to do in the newest World, and nothing that others need."""
        if not self._is_of_now(process, data):
            return []
        self.calls.forget(process.id)
        self.state = membership.aside(self.state, process.worker)
        return self._settle(now)

    def _saw_step(self, step: int) -> None:
        if step > self._best_step:
            self._best_step = step
            self._named.clear()
            self.state = membership.progressed(self.state)

    def _is_of_now(self, process: Process, data: Mapping[str, Any]) -> bool:
        """The message is about the newest World, and from one of its members."""
        world = self.world
        is_newest = world is not None and int(data.get("generation", world.generation)) == world.generation
        return is_newest and self.state.is_member(process.worker)

    # What follows.

    def _advance(self, now: float) -> None:
        self._time.at(now)
        if self._time.lateness > 0.0:
            self.detector.starved(self._time.lateness, self._time.now)

    def _settle(self, now: float) -> list[Decision]:
        before = self.world
        if is_all_lost(self.state):
            self.calls.clear()
        self.state, decisions = settle(self.state, self._places_now(), now)
        if self.world is not None and self.world is not before:
            self._begin_world(self.world)
        return decisions

    def _begin_world(self, world: World) -> None:
        self.relay.published(world)
        self.detector.settled()
        self._standing.clear()
        if world.is_fresh:
            self._best_step = 0

    def _places_now(self) -> Places:
        members = self.world.ids if self.world is not None else ()
        return Places(can_join=self._can_join, are_stepping=self.calls.are_stepping(members))

    def _can_join(self, process: Process) -> bool:
        members = self.world.ids if self.world is not None else ()
        return self.calls.is_current(self._places.get(process.id, (0, 0)), members)

    def _tell_calls(self, process: Process) -> list[Decision]:
        """Once, to everyone who was started into a run that is under way."""
        is_newcomer = self.world is not None and not self.state.is_member(process.worker)
        if process.is_told or not is_newcomer or is_all_lost(self.state):
            return []
        self.state = membership.told(self.state, process.worker)
        return [Tell(process.worker, called_message(self.calls.finished.values()))]

    def _forget(self, process: Process) -> None:
        self.detector.forget(process.id)
        self._places.pop(process.id, None)
        self._apart.discard(process.id)
        self._named.discard(process.id)
        self.calls.forget(process.id)

    def _note_missed(self) -> None:
        """Somebody waits for one who ended well: in a meeting, or standing still for a World that cannot come."""
        if self.state.left and (self.state.standing or self.state.left.intersection(self.relay.missing())):
            self.state = membership.missed(self.state)

    @staticmethod
    def _put_worlds_first(decisions: list[Decision], settled: list[Decision]) -> list[Decision]:
        """Survivors wait for their World; journals do not."""
        told = [decision for decision in settled if isinstance(decision, Tell)]
        return [*told, *decisions, *(decision for decision in settled if not isinstance(decision, Tell))]

    # Whom nobody hears.

    def _end_suspects(self) -> list[Decision]:
        ids = self.world.ids if self.world is not None else ()
        living = [member_id for member_id in ids if self.state.process(member_id) is not None]
        decisions: list[Decision] = []
        are_stepping = self.calls.are_stepping(tuple(living))
        missing, now = self._missing_since(), self._time.now
        for suspect in self.detector.suspects(living, missing, now, are_stepping=are_stepping):
            decisions += self._end(suspect)
        outside = [process.id for process in self.state.processes.values() if process.id not in ids]
        is_ending = self.state.is_ending
        for member_id in silent_too_long(self.detector, living, outside, self._time.now, is_ending=is_ending):
            decisions += self._condemn(member_id, "it is silent")
        return decisions

    def _missing_since(self) -> dict[str, float]:
        """Whom others wait for, as seen from here: in the first meeting of a World, and in standing still."""
        missing = self.relay.missing_since()
        if self._standing and self.world is not None:
            since = min(self._standing.values())
            awaited = [process.id for process in live_members(self.state) if not process.is_aside]
            missing |= {member_id: since for member_id in awaited if member_id not in self._standing}
        return missing

    def _end(self, suspect: Suspect) -> list[Decision]:
        word = "frozen" if suspect.is_frozen else "hung"
        is_named, patience = suspect.id in self._named, self._patience(suspect)
        self._named.add(suspect.id)
        killed = [] if suspect.waited_seconds < patience else self._condemn(suspect.id, f"it is {word}")
        data = {
            "id": suspect.id,
            "silent_seconds": round(suspect.silent_seconds, 3),
            "waited_seconds": round(suspect.waited_seconds, 3),
            "limit_seconds": round(suspect.limit_seconds, 3),
            "waited_by": list(suspect.waited_by),
            "is_ended": bool(killed),
        }
        worker = int(suspect.id.partition(".")[0])
        return killed if is_named else [Note(f"worker_{word}", worker, data), *killed]

    def _patience(self, suspect: Suspect) -> float:
        """How long it is waited for before it is ended. One that runs code of the user's own may just take long."""
        is_apart = not suspect.is_frozen and suspect.id in self._apart
        return APART_TIMES * suspect.limit_seconds if is_apart else 0.0

    def _condemn(self, member_id: str, why: str) -> list[Decision]:
        process = self.state.process(member_id)
        if process is None:
            return []
        self.state, killed = membership.condemn(self.state, process.worker, why)
        return killed
