"""Where the members of one World meet: who posted, who voted, who updated.

Workers on one host see every word at once, and those of the dead too. Workers that send messages see a vote when it
arrives, and never if its sender died on the way.
"""

from collections.abc import Callable

from shoal.spec.world import World
from tests.simulation.job import SHARDS


class Memory:
    """What one World has written. `seen[reader][writer]` is the last vote that a reader knows of."""

    def __init__(self, world: World, is_shared: bool) -> None:
        self.world, self.is_shared = world, is_shared
        size = world.size
        self.posts: list[tuple[int, bool, frozenset[int]]] = [(0, False, frozenset())] * size
        self.updated = [0] * size
        self.cast = [0] * size  # the truth about votes, which no message kind of worker sees
        shared = [0] * size
        self.seen = [shared if is_shared else [0] * size for _ in range(size)]
        self.is_closed = False

    def post(self, rank: int, turn: int, is_held: bool) -> None:
        shards = frozenset(range(rank, SHARDS, self.world.size))
        self.posts[rank] = (turn, is_held, shards)

    def sum_of(self, turn: int) -> list[int]:
        """The shards that the posts of this turn cover, each as often as it is counted."""
        return sorted(shard for posted, _, shards in self.posts if posted == turn for shard in shards)

    def vote(self, rank: int, turn: int, send: Callable[[int], None]) -> None:
        """Cast a vote. Without shared memory, `send(reader)` brings it to each of the others."""
        self.seen[rank][rank] = self.cast[rank] = turn
        if not self.is_shared:
            for reader in range(self.world.size):
                if reader != rank:
                    send(reader)

    def late(self, turn: int, what: str, rank: int) -> list[str]:
        """Ids of those who are not there yet."""
        values = self._values(what, rank)
        return [member.id for member, value in zip(self.world.members, values, strict=True) if value < turn]

    def is_there(self, turn: int, what: str, rank: int) -> bool:
        return min(self._values(what, rank)) >= turn

    def _values(self, what: str, rank: int) -> list[int]:
        if what == "post":
            return [post[0] for post in self.posts]
        return self.seen[rank] if what == "vote" else self.updated
