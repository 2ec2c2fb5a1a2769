"""What follows from a state: whom to start, whom to end, and whether the next World is due. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from shoal.elastic.decision import Decision, Note, Start, Tell
from shoal.elastic.membership import LEAVE_SECONDS, CanJoin, Membership, Phase, Process, Step, condemn
from shoal.elastic.message import hold_message, stop_message, world_message
from shoal.spec.world import World

GRACE_SECONDS = 0.25
"""How long members that stand still wait for a newcomer who is nearly there."""
LONGEST_PAUSE = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where everybody stands. `can_join`: a process that is ready is where the members are.

    `are_stepping`: the members are between or in steps, not inside something that newcomers know nothing of.
    """

    can_join: CanJoin
    are_stepping: bool = True


def settle(state: Membership, places: Places, now: float) -> Step:
    """Draw all conclusions. Applied twice it does nothing more. Worlds come first: survivors are waiting for them."""
    if state.is_failed:
        return state, []
    state, published = publish(state, places, now)
    state, ended = _dismiss(state, now)
    state, begun = _fill(state, now)
    return state, [*published, *ended, *begun]


def _fill(state: Membership, now: float) -> Step:
    """Start who is wanted, not there, and due."""
    if state.is_ending:
        return state, []
    missing = [worker for worker in state.wanted if worker not in state.processes]
    due = [w for w in missing if w not in state.asked and state.due_at.get(w, now) <= now]
    if state.room is not None:
        due = due[: max(0, state.room - len(state.processes) - len(state.asked))]
    return replace(state, asked=state.asked | set(due)) if due else state, [Start(worker) for worker in due]


def _dismiss(state: Membership, now: float) -> Step:
    """End those whom nobody needs: they hold nothing, or had their time to leave."""
    decisions: list[Decision] = []
    for process in state.processes.values():
        if why := _why_dismiss(state, process, now):
            state, killed = condemn(state, process.worker, why)
            decisions += killed
        elif _is_in_vain(state, process):
            state = replace(state, stopped=state.stopped | {process.id})
            decisions.append(Tell(process.worker, stop_message("the run is finished")))
    return state, decisions


def _why_dismiss(state: Membership, process: Process, now: float) -> str:
    is_outside = process.phase in (Phase.STARTING, Phase.READY, Phase.IDLE)
    if is_outside and process.worker not in state.wanted:
        return "the run was resized"
    if process.phase is Phase.LEAVING and now - process.since > LEAVE_SECONDS:
        return "it was let go and did not leave"
    if state.is_ending and state.world is not None and process.phase is Phase.STARTING:
        return "the run is finished"
    if state.is_ending and is_all_lost(state) and process.phase is Phase.MEMBER:
        return "everyone who had a state has left"
    return ""


def _is_in_vain(state: Membership, process: Process) -> bool:
    """A newcomer that waits while the run ends, or a member that has nothing to do."""
    is_ending = state.is_ending and state.world is not None
    is_waiting = process.phase in (Phase.READY, Phase.IDLE) or process.is_aside
    return is_ending and is_waiting and process.id not in state.stopped


def is_all_lost(state: Membership) -> bool:
    """There was a World, and nobody is left who has anything of it."""
    if state.world is None:
        return False
    members = live_members(state)
    return not members or not (state.world.is_fresh or any(process.is_entered for process in members))


def is_forced(state: Membership) -> bool:
    """Somebody whom the members count on is dead: no step of theirs can be completed."""
    assert state.world is not None
    dead = [member_id for member_id in state.world.ids if state.process(member_id) is None]
    return bool(dead) and (state.is_missed or not state.left.issuperset(dead))


def publish(state: Membership, places: Places, now: float) -> Step:
    """Publish the next World if it is due, or make way for it."""
    if state.world is None or is_all_lost(state):
        return _publish_fresh(state, places, now)
    members = live_members(state)
    if any(process.is_condemned for process in members):
        return state, []  # its end is near, and until then it can write
    if is_forced(state):
        return _publish_forced(state, members, places, now)
    if state.is_held and state.standing.issuperset(process.id for process in members if not process.is_aside):
        return _publish_held(state, members, places, now)
    return _hold(state, members, places, now)


def _publish_fresh(state: Membership, places: Places, now: float) -> Step:
    """Nobody has a state, at the start or after all were lost: begin when everybody who is wanted is there.

    Where there is no room for all of them, those there is room for begin, if they are enough.

    After a loss of all, processes that passed over finished calls are of no use, nor are members that never got the
    state or gave it up: there is nothing to go on with. When others ended well there is nothing to begin, either.
    """
    if state.world is not None and state.is_ending:
        return state, []
    stale = [p for p in state.processes.values() if p.is_told or p.phase in (Phase.MEMBER, Phase.LEAVING)]
    if state.world is not None and stale:
        return _condemn_all(state, stale, "nobody is left who has the state of the run: all begin anew")
    wanted = state.wanted
    present = [state.processes[worker] for worker in wanted if worker in state.processes]
    needed = len(wanted) if state.room is None else max(state.min_workers, min(len(wanted), state.room))
    if not present or (len(present) < needed and not state.is_ending):
        return state, []
    if any(p.phase is not Phase.READY or p.is_condemned or not places.can_join(p) for p in present):
        return state, []
    return _make_world(state, present, [], now)


def _publish_forced(state: Membership, members: Sequence[Process], places: Places, now: float) -> Step:
    """Somebody is dead: the survivors go on at once.

    Where they are too few they wait for newcomers, who can be let in here if a step was interrupted: it is settled
    first, and then all stand at its end. In the middle of an evaluation nobody can: then the few finish that, and
    wait before their next step.
    """
    if len(members) >= state.min_workers or state.is_ending or not places.are_stepping:
        return _make_world(state, members, [], now)
    together = [*members, *_joiners(state, places)]
    if _are_too_few(state, together):
        return _wait_for_workers(state, len(together))
    state, made = _make_world(state, together, [], now)
    return state, [*made, *_note_few(state, len(together))]


def _are_too_few(state: Membership, present: Sequence[Process]) -> bool:
    """They have to wait for more. Those may still come: one is not here who did not find that it cannot."""
    if len(present) >= state.min_workers or state.is_ending:
        return False
    missing = set(state.wanted) - {process.worker for process in present}
    return any(w not in state.processes or state.processes[w].phase is not Phase.IDLE for w in missing)


def _note_few(state: Membership, num_present: int) -> list[Decision]:
    if num_present >= state.min_workers:
        return []
    return [Note("going_on_with_few", None, {"present": num_present, "min_workers": state.min_workers})]


def _hold(state: Membership, members: Sequence[Process], places: Places, now: float) -> Step:
    """Ask the members to stand still: there is a reason, all are at work, and it was not in vain just now."""
    assert state.world is not None
    if state.is_held or not state.is_entered or now < state.next_hold:
        return state, []
    if not (_joiners(state, places) or _too_many(state, members) or _are_too_few(state, members)):
        return state, []
    message = hold_message(state.world.generation)
    return replace(state, is_held=True), [Tell(process.worker, message) for process in members]


def _publish_held(state: Membership, members: Sequence[Process], places: Places, now: float) -> Step:
    """All stand still: let newcomers in and those too many go. Where nothing changes they go on as they are.

    Too few wait here.
    """
    joiners, leaving = _joiners(state, places), _too_many(state, members)[: state.most_leaving]
    is_late = any(p.phase is Phase.READY and p not in joiners for p in state.processes.values())
    if is_late and not state.is_ending and now - state.standing_since < GRACE_SECONDS:
        return state, []
    if len(members) - len(leaving) + len(joiners) < state.min_workers:
        leaving = []
    if _are_too_few(state, [*members, *joiners]):
        return _wait_for_workers(state, len(members) + len(joiners))
    is_fruitless = not joiners and not leaving
    fruitless = state.num_fruitless + 1 if is_fruitless else 0
    pause = min(LONGEST_PAUSE, 2.0**state.num_fruitless) if is_fruitless else 0.0
    state = replace(state, num_fruitless=fruitless, next_hold=now + pause)
    staying = [process for process in members if process not in leaving]
    return _make_world(state, [*staying, *joiners], leaving, now)


def _make_world(state: Membership, members: Sequence[Process], leaving: Sequence[Process], now: float) -> Step:
    """The next World: who has worked before stays in order, newcomers follow."""
    ordered = sorted(members, key=lambda process: not process.is_entered)
    world = World(
        generation=state.world.generation + 1 if state.world is not None else 0,
        members=tuple(process.as_member() for process in ordered),
        joined=tuple(process.id for process in ordered if not process.is_entered),
    )
    decisions = _tell(world, "; ".join(state.reasons) or _why_changed(world, leaving), [*ordered, *leaving])
    phases = {process.worker: Phase.MEMBER for process in ordered}
    phases |= {process.worker: Phase.LEAVING for process in leaving}
    processes = {
        worker: replace(process, phase=phases[worker], since=now, is_aside=False) if worker in phases else process
        for worker, process in state.processes.items()
    }
    return _with_world(replace(state, processes=processes), world), decisions


def _with_world(state: Membership, world: World) -> Membership:
    """Nothing that was said about an older World counts for this one."""
    return replace(
        state,
        world=world,
        is_entered=False,
        is_missed=False,
        is_held=False,
        is_short=False,
        standing=frozenset(),
        at_work=frozenset(),
        reasons=(),
    )


def _why_changed(world: World, leaving: Sequence[Process]) -> str:
    if world.is_fresh:
        return "all are ready"
    if leaving and not world.joined:
        return f"{len(leaving)} let go"
    return f"{len(world.joined)} joined" if world.joined else "nobody came"


def _tell(world: World, reason: str, processes: Iterable[Process]) -> list[Decision]:
    message = world_message(world, reason)
    data = {
        "generation": world.generation,
        "members": list(world.ids),
        "joined": list(world.joined),
        "reason": reason,
    }
    joined: list[Decision] = []
    if world.generation > 0:
        newcomers = [member for member in world.members if member.id in world.joined]
        joined += [Note("worker_joined", m.worker, {"id": m.id, "generation": world.generation}) for m in newcomers]
    return [*(Tell(process.worker, message) for process in processes), Note("world", None, data), *joined]


def _wait_for_workers(state: Membership, num_present: int) -> Step:
    if state.is_short:
        return state, []
    note = Note("waiting_for_workers", None, {"present": num_present, "min_workers": state.min_workers})
    return replace(state, is_short=True), [note]


def live_members(state: Membership) -> list[Process]:
    """In rank order, those of the newest World that live."""
    ids = state.world.ids if state.world is not None else ()
    return [process for member_id in ids if (process := state.process(member_id)) is not None]


def _joiners(state: Membership, places: Places) -> list[Process]:
    """In the order of their numbers, those who may come in now."""
    outside = [p for p in state.processes.values() if p.phase is Phase.READY and not p.is_condemned]
    numbers = set(state.wanted)
    wanted = [p for p in outside if p.worker in numbers and not state.is_ending]
    return sorted((p for p in wanted if places.can_join(p)), key=lambda process: process.worker)


def _too_many(state: Membership, members: Sequence[Process]) -> list[Process]:
    numbers = set(state.wanted)
    return [process for process in members if process.worker not in numbers]


def _condemn_all(state: Membership, processes: Iterable[Process], why: str) -> Step:
    decisions: list[Decision] = []
    for process in processes:
        state, killed = condemn(state, process.worker, why)
        decisions += killed
    return state, decisions
