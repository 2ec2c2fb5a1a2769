"""Where in a run each worker stands: which copy of the model it belongs to, and which part of it it holds."""

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
