"""Planted bugs: each is a small wrong turn in a real function, of the kind that reads well."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from shoal.elastic import commit, coordinator, detect, membership, settle
from shoal.elastic.calls import Calls
from shoal.elastic.coordinator import Coordinator
from shoal.elastic.relay import Relay
from tests.simulation.simulator import Simulation

Patch = Callable[[pytest.MonkeyPatch], None]


def world_before_the_dead_is_reaped(patch: pytest.MonkeyPatch) -> None:
    """One that will be killed counts as dead already."""
    real = membership.Membership.process

    def process(state: Any, member_id: str) -> Any:
        found = real(state, member_id)
        return None if found is not None and found.is_condemned else found

    patch.setattr(membership.Membership, "process", process)


def stale_values_are_gathered(patch: pytest.MonkeyPatch) -> None:
    """A value counts, whatever World it was meant for."""
    real = Relay.gather

    def gather(relay: Relay, member: str, data: Any, now: float) -> Any:
        generation = relay.world.generation if relay.world is not None else 0
        return real(relay, member, {**data, "generation": generation}, now)

    patch.setattr(Relay, "gather", gather)


def only_survivors_votes_count(patch: pytest.MonkeyPatch) -> None:
    """Who is not in the next World is not asked how it voted."""

    def votes(sim: Any, memory: Any, rank: int, newest: Any) -> list[int]:
        both = zip(memory.world.members, memory.seen[rank], strict=True)
        return [vote for member, vote in both if member.id in newest.ids]

    patch.setattr(Simulation, "votes_that_count", votes)


def newcomers_come_in_anywhere(patch: pytest.MonkeyPatch) -> None:
    """Nobody looks where a newcomer stands."""
    patch.setattr(Calls, "is_current", lambda calls, place, members: True)


def missed_commits_are_not_made_up_for(patch: pytest.MonkeyPatch) -> None:
    """One who voted for a turn that counts, and did not see it committed, goes on without it."""
    real = commit._act

    def act(report: commit.Report, turn: int) -> commit.Act:
        found = real(report, turn)
        return commit.Act.KEEP if found is commit.Act.APPLY and report.committed < turn else found

    patch.setattr(commit, "_act", act)


def committed_one_too_early(patch: pytest.MonkeyPatch) -> None:
    """Off by one."""
    patch.setattr(commit, "is_committed", lambda votes, turn: min(votes) >= turn - 1)


def replaced_twice(patch: pytest.MonkeyPatch) -> None:
    """It is forgotten who is being started already."""
    real = settle._fill

    def fill(state: Any, now: float) -> Any:
        state, decisions = real(replace(state, asked=frozenset()), now)
        return state, decisions

    patch.setattr(settle, "_fill", fill)


def one_stands_for_all(patch: pytest.MonkeyPatch) -> None:
    """The first at the boundary opens the door."""
    real = membership.stood

    def stood(state: Any, *given: Any, **more: Any) -> Any:
        state = real(state, *given, **more)
        return replace(state, standing=frozenset(state.world.ids))

    patch.setattr(membership, "stood", stood)


def the_starved_blame_others(patch: pytest.MonkeyPatch) -> None:
    """The coordinator takes the time in which it did not run for silence of the others."""

    def at(own: Any, now: float) -> float:
        own.now, own.lateness = now, 0.0
        return now

    patch.setattr(detect.OwnTime, "at", at)


def losses_wait_for_the_meeting(patch: pytest.MonkeyPatch) -> None:
    """A World that has not met yet is left alone, though one of it is dead."""
    real = settle.is_forced
    patch.setattr(settle, "is_forced", lambda state: state.is_entered and real(state))


def silence_alone_condemns(patch: pytest.MonkeyPatch) -> None:
    """Nobody asks whether anyone waits for the silent one, nor for how long silence is usual."""
    patch.setattr(detect, "SILENCE_FLOOR", 0.3)
    patch.setattr(
        Coordinator,
        "_missing_since",
        lambda self: dict.fromkeys(self.world.ids if self.world else (), self._time.now),
    )
    patch.setattr(detect.Limit, "seconds", lambda limit, now: 0.3)


def the_dead_are_heard(patch: pytest.MonkeyPatch) -> None:
    """What the process before said is taken for a word of the one that replaced it."""
    real = Coordinator.heard

    def heard(self: Coordinator, worker: int, kind: str, data: Any, now: float) -> Any:
        return real(self, worker, kind, {k: v for k, v in data.items() if k not in ("member", "process")}, now)

    patch.setattr(Coordinator, "heard", heard)


def leavers_are_replaced(patch: pytest.MonkeyPatch) -> None:
    """Whoever was let go comes back."""
    real = membership.exited

    def exited(state: Any, worker: int, code: int, now: float, *, is_retryable: bool) -> Any:
        state, decisions = real(state, worker, code, now, is_retryable=is_retryable)
        return replace(state, is_ending=False), decisions

    patch.setattr(coordinator.membership, "exited", exited)


def calls_are_not_told(patch: pytest.MonkeyPatch) -> None:
    """All were lost, and those who begin again are told what the others had finished."""
    patch.setattr(Calls, "clear", lambda calls: None)
    patch.setattr(coordinator, "is_all_lost", lambda state: False)


@dataclass(frozen=True)
class Trouble:
    """What brings a bug to light soon."""

    kinds: tuple[str, ...] = ()
    remote_share: float = 0.35


KILLS = Trouble(("kill",))
AFAR = Trouble(("kill",), remote_share=1.0)
MUTANTS: dict[Patch, Trouble] = {
    world_before_the_dead_is_reaped: Trouble(("freeze", "kill")),
    stale_values_are_gathered: AFAR,
    only_survivors_votes_count: KILLS,
    newcomers_come_in_anywhere: Trouble(),
    missed_commits_are_not_made_up_for: KILLS,
    committed_one_too_early: Trouble(),
    replaced_twice: KILLS,
    one_stands_for_all: Trouble(("resize", "kill")),
    the_starved_blame_others: Trouble(("starve", "kill"), remote_share=1.0),
    losses_wait_for_the_meeting: KILLS,
    silence_alone_condemns: Trouble(("starve", "slow")),
    the_dead_are_heard: AFAR,
    leavers_are_replaced: Trouble(),
    calls_are_not_told: KILLS,
}
