"""Who takes part in a run."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One worker process. `node` names its machine: equal names share memory.

    `worker` is the number users see; a process that replaces another has the same one, and another `id`:
    "1.0", then "1.1".
    """

    id: str
    worker: int
    node: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Everyone taking part in the run right now.

    Ranks are dense: the position in `members` is the rank. A World never changes; a join or a loss makes
    a new one with a larger `generation`, and messages from an older generation are dropped.

    `joined` are the ids of those who have not worked in an earlier World; they come after those who have. Whoever was
    in an earlier World and is not in this one is dead, or stands still and ends when it sees this one.
    """

    generation: int
    members: tuple[Member, ...]
    joined: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(member.id for member in self.members)

    @property
    def is_fresh(self) -> bool:
        """Nobody in it has worked in an earlier World: state comes from the start, or from a checkpoint."""
        return len(self.joined) == len(self.members)

    def rank_of(self, member_id: str) -> int:
        """The rank of a member; raises KeyError for one that is not in this World."""
        for rank, member in enumerate(self.members):
            if member.id == member_id:
                return rank
        raise KeyError(member_id)
