"""Where in a run each worker stands: which copy of the model it belongs to, and which part of it it holds."""

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.spec.errors import UserError
from shoal.spec.strategy import Split


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """`num_copies` x `num_parts` workers. Parts of one copy are neighbours: they have more to say to each other."""

    num_copies: int
    num_parts: int

    def copy_of(self, rank: int) -> int:
        return rank // self.num_parts

    def part_of(self, rank: int) -> int:
        return rank % self.num_parts

    def rank(self, copy: int, part: int) -> int:
        return copy * self.num_parts + part

    def with_part(self, part: int) -> tuple[int, ...]:
        """The ranks that hold this part, one in each copy."""
        return tuple(self.rank(copy, part) for copy in range(self.num_copies))

    def with_copy(self, copy: int) -> tuple[int, ...]:
        """The ranks that hold one copy together."""
        return tuple(self.rank(copy, part) for part in range(self.num_parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Seats:
    """Who does what in a World. `workers[seat]` is a position in it; seat = copy x num_parts + part.

    `sources[part]` is the seat of one who holds the state of that part, or None where nobody does. Whoever has no
    seat waits for a World in which there is one.
    """

    workers: tuple[int, ...]
    sources: tuple[int | None, ...]

    @property
    def is_whole(self) -> bool:
        """Every part of the model is held by someone."""
        return None not in self.sources


def find_seats(held: Sequence[int | None], num_parts: int) -> Seats:
    """Seats for those who hold the state of some part (None: of none), in the order of the World.

    As many whole copies as there are workers for. Everyone keeps its part if it can, the earlier in the World first;
    what is lacking then is filled up with those who are left over. The first copy is made of holders.
    """
    num_copies = len(held) // num_parts
    places: list[list[int | None]] = []
    left = [worker for worker, part in enumerate(held) if part is None]
    for part in range(num_parts):
        holders = [worker for worker, own in enumerate(held) if own == part]
        left += holders[num_copies:]
        kept = holders[:num_copies]
        places.append([*kept, *[None] * (num_copies - len(kept))])
    sources = tuple(part if column and column[0] is not None else None for part, column in enumerate(places))
    spare = iter(sorted(left))
    workers = [
        worker if (worker := places[part][copy]) is not None else next(spare)
        for copy in range(num_copies)
        for part in range(num_parts)
    ]
    return Seats(workers=tuple(workers), sources=sources)


def make_mesh(num_workers: int, split: Split | None) -> Mesh:
    """The mesh of so many workers. Raises UserError where they do not make whole copies."""
    num_parts = split.num_parts if split is not None else 1
    if num_workers % num_parts:
        below, above = num_workers // num_parts * num_parts, -(-num_workers // num_parts) * num_parts
        fitting = f"-n {above}" if not below else f"-n {below} or -n {above}"
        raise UserError(
            f"{num_workers} workers cannot hold copies of {num_parts} parts each.",
            why=f"split={split} divides one copy of the model among {num_parts} workers",
            hint=f"start with {fitting}, or use another split",
        )
    return Mesh(num_copies=num_workers // num_parts, num_parts=num_parts)
