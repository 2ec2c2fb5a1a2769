"""What only one worker holds, kept a second time in the memory of another.

A sharded state has no second copy: each worker holds a part that nobody else has. With `redundancy=1` every worker
sends its part to the next one, which keeps it; a worker may then be lost and its part is still there, without a disk.

Two steps are held. A worker that dies in the middle of an exchange leaves some with the new step and some without,
but all with the one before: an exchange begins only after the last one ended everywhere.

What it costs, each time: `redundancy` times the bytes of a part are sent and received by every worker, and two sha256
of them are taken. In memory: 2 * (1 + redundancy) times the bytes of a part.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from shoal.checkpoint.packing import Part, damaged, is_intact, pack, unpack
from shoal.spec.errors import MemberLost, UserError

STEPS_HELD = 2


class Task(Protocol):
    """Something that was begun."""

    def wait(self) -> None: ...


class Peers(Protocol):
    """The part of a group that is needed here; `comm`'s groups have it. A lost rank raises MemberLost."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def send(self, tensor: torch.Tensor, to: int) -> Task: ...
    def recv(self, tensor: torch.Tensor, source: int) -> Task: ...
    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> Task: ...
    def barrier(self) -> None: ...


# Who holds what. Pure: every worker comes to the same answer by itself.


def holders_of(rank: int, size: int, redundancy: int) -> tuple[int, ...]:
    """Who keeps a copy of what `rank` has, the nearest first: the ranks after it, round and round."""
    return tuple((rank + distance) % size for distance in range(1, min(redundancy, size - 1) + 1))


def held_by(rank: int, size: int, redundancy: int) -> tuple[int, ...]:
    """Whose copies `rank` keeps."""
    return tuple((rank - distance) % size for distance in range(1, min(redundancy, size - 1) + 1))


def newest_complete(holdings: Mapping[int, Collection[tuple[int, int]]], size: int) -> int | None:
    """The newest step of which every one of `size` parts is held by a survivor, their own by themselves; or None.

    `holdings` says for each survivor which (owner, step) it holds.
    """
    owners: dict[int, set[int]] = {}
    for held in holdings.values():
        for owner, step in held:
            owners.setdefault(step, set()).add(owner)
    whole = [step for step, found in owners.items() if len(found) == size]
    return max((step for step in whole if all((rank, step) in held for rank, held in holdings.items())), default=None)


def heirs_of(lost: Iterable[int], step: int, holdings: Mapping[int, Collection[tuple[int, int]]]) -> dict[int, int]:
    """Which survivor hands out the part of each lost rank: the lowest rank that holds it."""
    return {owner: min(rank for rank, held in holdings.items() if (owner, step) in held) for owner in lost}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What a survivor has after `recover`: its own tensors of `step`, and those it is the heir of, by lost rank."""

    step: int
    own: dict[str, torch.Tensor]
    inherited: dict[int, dict[str, torch.Tensor]]
    heirs: dict[int, int]


class RedundantStore:
    """Holds this rank's part and copies of its neighbours' for the two newest steps, in memory.

    One for each World: after `recover`, make the next one for the new group, and let go of the old one only when the
    new one has kept a step, or a second loss would find nothing.
    """

    def __init__(self, peers: Peers, redundancy: int = 1) -> None:
        if redundancy < 1 or redundancy >= max(2, peers.size):
            raise UserError(
                f"redundancy={redundancy} is not possible with {peers.size} workers.",
                why="every copy is kept by another worker",
                hint=f"use 1 to {max(1, peers.size - 1)}, and at least 2 workers",
            )
        self.rank, self.size, self.redundancy = peers.rank, peers.size, redundancy
        self._peers = peers
        self._parts: dict[tuple[int, int], Part] = {}
        self._complete: int | None = None

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps of which something is held, the newest first."""
        return tuple(sorted({step for _, step in self._parts}, reverse=True))

    @property
    def num_bytes(self) -> int:
        """Memory used."""
        return sum(len(part.data) for part in self._parts.values())

    def keep(self, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Hold this rank's tensors here and with its neighbours. All ranks call it; the caller may change them after.

        Steps grow. Raises MemberLost if a rank is gone: what was kept before is still held everywhere.
        """
        if self._complete is not None and step <= self._complete:
            raise UserError(
                f"Step {step} cannot be kept after step {self._complete}.", hint="steps only grow", step=step
            )
        # What is older than the last complete step is of no use any more: make room first.
        self._parts = {key: part for key, part in self._parts.items() if key[1] == self._complete}
        own = pack(self.rank, step, tensors)
        self._hold(own)
        if self.size > 1:
            sizes = torch.zeros(self.size, dtype=torch.int64)
            self._peers.all_gather(sizes, torch.tensor([len(own.data)])).wait()
            for distance in range(1, self.redundancy + 1):
                self._exchange(own, distance, sizes)
            self._peers.barrier()
        self._complete = step

    def _exchange(self, own: Part, distance: int, sizes: torch.Tensor) -> None:
        to, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
        data = torch.empty(int(sizes[source]), dtype=torch.uint8)
        sent = self._peers.send(own.data, to)
        self._peers.recv(data, source).wait()
        sent.wait()
        part = Part(owner=source, step=own.step, data=data)
        if not is_intact(part):
            raise damaged(part)
        self._hold(part)

    def _hold(self, part: Part) -> None:
        self._parts[part.owner, part.step] = part

    def recover(self, peers: Peers, members: Sequence[int]) -> Recovered:
        """Find the newest step that is complete, over a group of the survivors; all of them call it.

        `members` are their ranks in the old World, in the order of their new ranks. Every survivor gets its own
        tensors of that step, and those of each lost rank go to exactly one of them. Raises MemberLost if some part
        has no copy left: then only a checkpoint helps.
        """
        holdings = self._gather(peers, members)
        lost = [rank for rank in range(self.size) if rank not in members]
        step = newest_complete(holdings, self.size)
        if step is None:
            raise _all_lost(lost, self.redundancy)
        heirs = heirs_of(lost, step, holdings)
        inherited = {owner: self.read(owner, step) for owner, heir in heirs.items() if heir == self.rank}
        return Recovered(step=step, own=self.read(self.rank, step), inherited=inherited, heirs=heirs)

    def read(self, owner: int, step: int) -> dict[str, torch.Tensor]:
        """The tensors of a rank that are held here, proven by their digest; they belong to the caller."""
        return unpack(self._parts[owner, step])

    def _gather(self, peers: Peers, members: Sequence[int]) -> dict[int, list[tuple[int, int]]]:
        width = (1 + self.redundancy) * STEPS_HELD
        mine = torch.full((width, 2), -1, dtype=torch.int64)
        for row, key in enumerate(sorted(self._intact())):
            mine[row] = torch.tensor(key)
        every = torch.empty(peers.size * width * 2, dtype=torch.int64)
        peers.all_gather(every, mine.view(-1)).wait()
        rows = every.view(peers.size, width, 2).tolist()
        return {
            member: [(owner, step) for owner, step in rows[rank] if owner >= 0] for rank, member in enumerate(members)
        }

    def _intact(self) -> list[tuple[int, int]]:
        """What is held and still has its digest: a bit may have flipped in memory."""
        return [key for key, part in self._parts.items() if is_intact(part)]


def _all_lost(lost: Sequence[int], redundancy: int) -> MemberLost:
    error = MemberLost(
        f"Ranks {', '.join(map(str, lost))} were lost together with every copy of what they held.",
        why=f"redundancy={redundancy} survives {redundancy} at a time, and none before the first step was kept",
        hint="resume from the last checkpoint; a larger `redundancy` survives more",
    )
    error.ranks = tuple(lost)
    return error
