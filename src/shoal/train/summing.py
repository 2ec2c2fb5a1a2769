"""Adding up the gradients of all workers, in an order that is fixed by the step or, faster, by the ranks."""

from collections.abc import Callable, Sequence

import torch

from shoal.train import tree


class StepSum:
    """The additions that turn the workers' sums of a step into one.

    In exact mode the terms are the subtrees that each worker has summed, else each worker's one slot. `shards` says
    of each term which shards it is the sum of.
    """

    def __init__(self, assignment: Sequence[range], num_shards: int, *, exact: bool) -> None:
        busy = [(rank, mine) for rank, mine in enumerate(assignment) if mine]
        if exact:
            covers = [(rank, tree.cover(mine.start, mine.stop, num_shards)) for rank, mine in busy]
            terms = {node: (rank, slot) for rank, nodes in covers for slot, node in enumerate(nodes)}
            self._additions = tree.plan_additions(terms, num_shards)
            self.shards = {source: range(*node) for node, source in terms.items()}
        else:
            terms = {(i, i + 1): (rank, 0) for i, (rank, _) in enumerate(busy)}
            self._additions = tree.plan_additions(terms, len(terms))
            self.shards = {(rank, 0): mine for rank, mine in busy}
        self._only = next(iter(terms.values()))
        self.num_slots = 1 + max(slot for _, slot in terms.values())

    def into(
        self, out: torch.Tensor, term: Callable[[tree.Source], torch.Tensor], registers: Sequence[torch.Tensor]
    ) -> None:
        """Leave the sum in `out`. `term` gives a worker's part of it; `registers` hold intermediate sums."""

        def value(operand: tree.Operand) -> torch.Tensor:
            if not isinstance(operand, int):
                return term(operand)
            return out if operand == 0 else registers[operand - 1][: out.numel()]

        if not self._additions:
            out.copy_(term(self._only))
        for register, left, right in self._additions:
            torch.add(value(left), value(right), out=value(register))


def square_of(chunk: torch.Tensor) -> torch.Tensor:
    """The sum of squares of a chunk, in float32 at least."""
    if chunk.dtype != torch.float32:
        chunk = chunk.float()
    return torch.dot(chunk, chunk)
