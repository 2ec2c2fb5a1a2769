"""Backward's output, collected in flat buffers."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from shoal.train import tree
from shoal.train.flat import FlatLayout
from shoal.train.noise import square_of_all
from shoal.train.tree import Node


class Gradients:
    """Takes each parameter's gradient the moment it is ready and adds it to a flat slot.

    A gradient is moved while it is still in cache and its own memory is given back at once. Without `exact` all
    pieces of a step are added up in slot 0. With it, a slot holds the sum of one node of the step's tree, and
    `nodes` says which.

    `on_ready(elements)` is called while the last piece's backward goes on: everything before that offset is final.
    `stalled` is how many seconds of the step it has waited for other workers: never, here.
    `first_square` is the sum of squares of the first piece's gradient, in steps that are begun with `looks`.
    """

    stalled = 0.0

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        layout: FlatLayout,
        slots: Sequence[torch.Tensor],
        *,
        exact: bool,
        on_ready: Callable[[int], None],
    ) -> None:
        self._layout = layout
        self._slots = slots
        self._exact = exact
        self._on_ready = on_ready
        places = list(zip(parameters, layout.offsets, layout.sizes, strict=True))
        self._views = [[slot[at : at + size].view(p.shape) for p, at, size in places] for slot in slots]
        self._num_leaves, self._mine = 1, range(1)
        self.nodes: list[tuple[Node, int]] = []
        self.unused: set[int] = set(range(len(parameters)))
        self._arrived = bytearray(len(parameters))
        self._target = self._views[0]
        self._adds = self._is_last = False
        self._next = 0
        self._looks = False
        self.first_square: float | None = None
        self._hooks = [p.register_post_accumulate_grad_hook(self._hook(i)) for i, p in enumerate(parameters)]

    def begin(self, num_leaves: int, mine: range, *, looks: bool = False) -> None:
        """Start a step of `num_leaves` shards, of which this worker computes those in `mine`."""
        self._num_leaves = num_leaves
        self._mine = mine
        self._looks, self.first_square = looks, None
        self.nodes = []

    def open(self, node: Node, *, is_last: bool) -> None:
        """The next backward belongs to the shards of `node`."""
        self._skip_to(node[0])
        # Only where it is not the last is there anything to compare it with.
        self._looks = self._looks and not self.nodes and not is_last
        self._start(node, is_last=is_last)

    def end(self) -> None:
        """The step's last backward is over."""
        self._skip_to(self._mine.stop)

    def _skip_to(self, shard: int) -> None:
        """In exact mode a shard without samples is a leaf like any other, whose gradient is zero."""
        if self._exact:
            done = self.nodes[-1][0][1] if self.nodes else self._mine.start
            for empty in range(done, shard):
                self._start((empty, empty + 1), is_last=False)
                self.close()

    def _start(self, node: Node, *, is_last: bool) -> None:
        slot = 0
        self._adds = bool(self.nodes)
        if self._exact:
            # A right sibling goes straight on top of the left one; anything else gets the next slot.
            top = self.nodes[-1][0] if self.nodes else None
            self._adds = top is not None and tree.parent_of(top, node, self._num_leaves) is not None
            slot = len(self.nodes) - self._adds
        self._target = self._views[slot]
        self._arrived = bytearray(len(self._arrived))
        self._next = 0
        self._is_last = is_last and not self._exact
        self.nodes.append((node, slot))

    def close(self) -> None:
        """Backward is over: what it did not reach counts as zero. Add up subtrees that are now whole."""
        for index, arrived in enumerate(self._arrived):
            if arrived:
                self.unused.discard(index)
            elif not self._adds:
                self._target[index].zero_()
            elif self._exact:
                # Nothing counts as zero wherever it is added: -0.0 + 0.0 is 0.0.
                self._target[index].add_(0.0)
        if self._looks:
            self.first_square, self._looks = square_of_all(self._slots[self.nodes[-1][1]]), False
        if self._exact:
            self._join()
        else:
            self.nodes = [((self.nodes[0][0][0], self.nodes[-1][0][1]), 0)]
        if self._is_last:
            self._on_ready(self._layout.total)

    def _join(self) -> None:
        while len(self.nodes) > 1:
            (left, low), (right, high) = self.nodes[-2:]
            parent = tree.parent_of(left, right, self._num_leaves)
            if parent is None:
                return
            if low != high:
                self._slots[low].add_(self._slots[high])
            self.nodes[-2:] = [(parent, low)]

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        offsets = (*self._layout.offsets[1:], self._layout.total)

        def take(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            assert gradient is not None
            if gradient.is_sparse:
                gradient = gradient.to_dense()
            if self._adds:
                self._target[index].add_(gradient)
            else:
                self._target[index].copy_(gradient)
            parameter.grad = None
            self._arrived[index] = 1
            if self._is_last and index == self._next:
                while self._next < len(self._arrived) and self._arrived[self._next]:
                    self._next += 1
                self._on_ready(offsets[self._next - 1])

        return take

    def detach(self) -> None:
        """Take the hooks off, so that the model can be trained by other means."""
        for hook in self._hooks:
            hook.remove()
