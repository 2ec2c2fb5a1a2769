"""Who takes part in a run."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One worker process. `node` names its machine: equal names share memory."""

    id: str
    node: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Everyone taking part in the run right now.

    Ranks are dense: the position in `members` is the rank. A World never changes; a join or a loss makes
    a new one with a larger `generation`, and messages from an older generation are dropped.
    """

    generation: int
    members: tuple[Member, ...]

    @property
    def size(self) -> int:
        return len(self.members)

    def rank_of(self, member_id: str) -> int:
        """The rank of a member; raises KeyError for one that is not in this World."""
        for rank, member in enumerate(self.members):
            if member.id == member_id:
                return rank
        raise KeyError(member_id)
