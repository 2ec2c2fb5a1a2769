"""Where in a run each worker stands: which copy of the model it belongs to, and which part of it it holds."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.spec.errors import UserError
from shoal.spec.strategy import Split


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """`num_copies` x `num_parts` workers. Parts of one copy are neighbours: they have more to say to each other.

    Where a model is cut into stages and each of these into slices, slices of one stage are neighbours among parts.
    """

    num_copies: int
    num_parts: int
    num_slices: int = 1

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

    def with_stage(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the slices of one stage together, this one among them."""
        first = rank - rank % self.num_slices
        return tuple(range(first, first + self.num_slices))

    def with_slice(self, rank: int) -> tuple[int, ...]:
        """The ranks of one copy that hold the same slice of its stages, this one among them."""
        first = rank - self.part_of(rank) + rank % self.num_slices
        return tuple(range(first, first + self.num_parts, self.num_slices))


@dataclass(frozen=True, slots=True, kw_only=True)
class Seats:
    """Who does what in a World. `members[seat]` is a position in it; seats are numbered as ranks of the mesh are.

    `lost` are the parts of the model whose state nobody holds any more, while others still hold theirs. Whoever has
    no seat waits for a World in which there is one.
    """

    mesh: Mesh
    members: tuple[int, ...]
    lost: tuple[int, ...]

    def without(self, holders: Sequence[int]) -> tuple[int, ...]:
        """The parts of which somebody gets the state here, who is not among `holders`."""
        missing = [seat for seat, position in enumerate(self.members) if position not in holders]
        return tuple(sorted({self.mesh.part_of(seat) for seat in missing}))


def find_holders(told: Sequence[str], num_fitting: int) -> list[int]:
    """Who has the state of the run, by position. `told`: "COPY ..." from each, or nothing from who has none.

    Where what copies have differs, so many must still be together for a copy to be whole.
    """
    copies = [text.partition(" ")[0] for text in told]
    counts = Counter(copies)
    return [position for position, copy in enumerate(copies) if copy and counts[copy] >= num_fitting]


def find_seats(workers: Sequence[int], holders: Sequence[int], mesh: Mesh) -> Seats:
    """Seats for the members of a World. `workers` are their numbers, `holders` the positions of those with a state.

    `mesh` says how copies are divided, and not how many there are.
    Worker w holds part w % num_parts for as long as it lives, and so does its replacement: a part never has to change
    its worker. There are as many copies as there are workers for every part. Holders come first, so the first copy
    has the state of all parts, or of none.
    """
    num_parts = mesh.num_parts
    columns = [
        sorted(
            (position for position, worker in enumerate(workers) if worker % num_parts == part),
            key=lambda position: position not in holders,
        )
        for part in range(num_parts)
    ]
    num_copies = min(map(len, columns))
    held = {workers[position] % num_parts for position in holders}
    return Seats(
        mesh=replace(mesh, num_copies=num_copies),
        members=tuple(column[copy] for copy in range(num_copies) for column in columns),
        lost=tuple(part for part in range(num_parts) if part not in held) if held else (),
    )


def make_mesh(num_workers: int, split: Split | None, *, is_elastic: bool = False) -> Mesh:
    """The mesh of so many workers. Raises UserError where they do not make whole copies.

    In an elastic run workers may be left over, but not too few for one copy.
    """
    num_parts = split.num_parts if split is not None else 1
    num_copies, left = divmod(num_workers, num_parts)
    if (left and not is_elastic) or not num_copies:
        below, above = num_copies * num_parts, (num_copies + 1) * num_parts
        fitting = f"-n {above}" if not below else f"-n {below} or -n {above}"
        raise UserError(
            f"{num_workers} workers cannot hold copies of {num_parts} parts each.",
            why=f"split={split} divides one copy of the model among {num_parts} workers",
            hint=f"start with {fitting}, or use another split",
        )
    num_slices = split.tensor.size if split is not None and split.tensor is not None else 1
    return Mesh(num_copies=num_copies, num_parts=num_parts, num_slices=num_slices)


def check_share(split: Split | None, batch_size: int, num_copies: int) -> None:
    """Refuse more micro-batches than a copy has samples of a step to make them of."""
    wanted = split.pipeline.microbatches if split is not None and split.pipeline is not None else None
    share = batch_size // num_copies
    if wanted is not None and share < wanted:
        raise UserError(
            f"{share} samples of each copy are too few for {wanted} micro-batches.",
            why="a micro-batch has at least one sample",
            hint=f"use microbatches={max(1, share)}, or batch_size={wanted * num_copies} or more",
        )
