"""What a fleet asks of the cluster that its agents run on."""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol, runtime_checkable

from shoal.engine.wire import Invitation
from shoal.spec.errors import UserError


class Ground(Protocol):
    """Where agents come from: a Ray cluster, hosts that mpirun reaches, executors of a Spark session.

    Each agent that it starts calls `shoal.engine.agent.serve` with the invitation. One that ended is asked for again
    with `replace`; what comes then may be on another machine.
    """

    host: str
    """The address at which this machine is reached from there."""

    def open(self, invitation: Invitation, num_slots: int, least: int) -> int:
        """Have agents come for so many workers, at least `least`. Does not wait; raises UserError where none can.

        Returns for how many they come: fewer, where it was said which machines to use.
        """
        ...

    def look(self) -> Sequence[UserError]:
        """See to agents that are due or gone; called often. Returns what keeps away those that are not needed.

        Raises UserError where those needed will never come.
        """
        ...

    def waiting_for(self, present: Collection[str]) -> str:
        """Why not all agents are there yet, but these, in a few words. May ask others, and take its time."""
        ...

    def replace(self, agent: str) -> None:
        """This agent is gone: have another come in its place, now or when there is a machine for it."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


@runtime_checkable
class Arranged(Ground, Protocol):
    """One that can be told on which machines agents are to be."""

    def arrange(self, nodes: Mapping[str, int], used: Collection[str]) -> set[str]:
        """Have agents for so many workers on each of these, and return those elsewhere, or too many.

        `used` are agents that have workers: where there is a choice they stay.
        """
        ...

    def give_up(self, agent: str) -> None:
        """This agent is not needed any more; its place is given back."""
        ...
