"""A user's optimizer, made to work on chunks of one flat buffer."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shoal.train.flat import Chunk, FlatModel
from shoal.train.undo import BATCH_CHUNKS

ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)
"""Optimizers whose update of one element looks at that element only: they may be cut anywhere."""

FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
"""Those that torch has a one-pass kernel for."""


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Exact types only: a subclass may look at whole tensors."""
    return type(optimizer) in ELEMENTWISE


@contextmanager
def giving_back(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """If what is done inside fails, the optimizer holds the parameters that it held before."""
    before = [(list(group["params"]), group.get("fused")) for group in optimizer.param_groups]
    try:
        yield
    except BaseException:
        for group, (parameters, fused) in zip(optimizer.param_groups, before, strict=True):
            group["params"] = parameters
            if "fused" in group:
                group["fused"] = fused
        raise


class ChunkedOptimizer:
    """Runs the user's own optimizer object over chunks, so that schedulers and hyper-parameters stay where they were.

    The optimizer's per-element state lives in flat buffers like the parameters', so each of them can be read and
    written by parameter name, whichever rank updates which chunk.

    Every group also gets a witness, two elements that belong to nobody. So a rank that owns no chunk of a group
    still knows which state the optimizer keeps and what it counts (Adam's `step`).

    `step` reads the owned chunks' `gradients`. Their `values` are in the flat buffer unless they are given; then
    chunks are places in the state's buffers only.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        flat: FlatModel,
        owned: Sequence[Chunk],
        gradients: Sequence[torch.Tensor | None],
        values: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self.optimizer = optimizer
        self._flat = flat
        self._owned = owned
        self._before = [list(group["params"]) for group in optimizer.param_groups]
        values = [flat.values[c.start : c.stop] for c in owned] if values is None else values
        self._chunks = [nn.Parameter(value) for value in values]
        self._witnesses = [nn.Parameter(flat.values.new_zeros(2)) for _ in optimizer.param_groups]
        self._state: dict[str, torch.Tensor] = {}
        self._fill_groups(range(len(owned)), with_witness=True)
        for group, witness in zip(optimizer.param_groups, self._witnesses, strict=True):
            witness.grad = torch.zeros_like(witness)
            if _may_fuse(optimizer, group):
                group["fused"] = True
        optimizer.state.clear()
        self.use(gradients)

    def _fill_groups(self, numbers: range, *, with_witness: bool) -> None:
        """Let the optimizer's groups hold just these of the owned chunks."""
        for index, (group, witness) in enumerate(zip(self.optimizer.param_groups, self._witnesses, strict=True)):
            chunks = [self._chunks[number] for number in numbers if self._owned[number].group == index]
            group["params"] = [witness, *chunks] if with_witness else chunks

    def use(self, gradients: Sequence[torch.Tensor | None], first: int = 0) -> None:
        """Take these from now on, for as many chunks from the first on."""
        for chunk, gradient in zip(self._chunks[first : first + len(gradients)], gradients, strict=True):
            chunk.grad = gradient

    def _places(self) -> Iterator[tuple[nn.Parameter, Chunk]]:
        return zip(self._chunks, self._owned, strict=True)

    def step(self, allocate: Callable[[str], torch.Tensor]) -> None:
        """Update the owned chunks from `gradients`. `allocate(name)` gives a buffer for state that is new."""
        if not self.optimizer.state:
            self._step_first(allocate)
            return
        self.optimizer.step()
        if self._missing_state():
            self._settle(range(len(self._owned)), allocate)

    def _step_first(self, allocate: Callable[[str], torch.Tensor]) -> None:
        """The optimizer makes its state now: a few chunks at a time, so that it never exists twice."""
        with self.in_batches() as step_some:
            for start in range(0, max(1, len(self._owned)), BATCH_CHUNKS):
                numbers = range(start, min(start + BATCH_CHUNKS, len(self._owned)))
                step_some(numbers)
                self._settle(numbers, allocate)

    def _settle(self, numbers: range, allocate: Callable[[str], torch.Tensor]) -> None:
        """Let what the optimizer has just made for these of the owned chunks live where it belongs."""
        for name in self._missing_state():
            self._state[name] = allocate(name)
        for number in numbers:
            place, kept = self._owned[number], self.optimizer.state[self._chunks[number]]
            for name, flat in self._state.items():
                if name in kept:
                    view = flat[place.start : place.stop]
                    view.copy_(kept[name])
                    kept[name] = view

    @contextmanager
    def in_batches(self) -> Iterator[Callable[[range], None]]:
        """Inside, what is given updates some of the owned chunks at a time: from the first on, until all are done."""

        def step_some(numbers: range) -> None:
            self._fill_groups(numbers, with_witness=numbers.start == 0)
            self.optimizer.step()

        try:
            yield step_some
        finally:
            self._fill_groups(range(len(self._owned)), with_witness=True)

    def changes(self, numbers: range, average: torch.Tensor | None) -> list[torch.Tensor]:
        """Everything that updating these chunks changes and that others need, as flat tensors."""
        flats = [self._flat.values, *self._state.values(), *([] if average is None else [average])]
        return [flat[start:stop] for start, stop in _spans([self._owned[n] for n in numbers]) for flat in flats]

    @contextmanager
    def standing_in(
        self, owned: Sequence[Chunk], scalars: Sequence[Mapping[str, float]]
    ) -> Iterator["ChunkedOptimizer"]:
        """The same optimizer for the chunks of another rank, which had counted `scalars`; then ours is as before.

        Their gradients are still to be given to it.
        """
        groups, state = [group["params"] for group in self.optimizer.param_groups], self.optimizer.state
        self.optimizer.state = defaultdict(dict)
        try:
            other = ChunkedOptimizer(self.optimizer, self._flat, owned, [None] * len(owned))
            other._state = dict(self._state)
            other.restore({f"/{name}": flat for name, flat in self._state.items()}, scalars, self._no_more)
            yield other
        finally:
            self.optimizer.state = state
            for group, params in zip(self.optimizer.param_groups, groups, strict=True):
                group["params"] = params

    @staticmethod
    def _no_more(name: str) -> torch.Tensor:
        raise AssertionError("all state has its place already")

    @property
    def state(self) -> Mapping[str, torch.Tensor]:
        """The flat buffers of what the optimizer keeps for each element."""
        return self._state

    @property
    def state_names(self) -> Sequence[str]:
        """The per-element tensors that have a flat buffer."""
        return tuple(self._state)

    def _missing_state(self) -> list[str]:
        """The per-element tensors that the optimizer keeps and that have no flat buffer yet."""
        return sorted(
            {
                name
                for witness in self._witnesses
                for name, value in self.optimizer.state.get(witness, {}).items()
                if name not in self._state and isinstance(value, torch.Tensor) and value.shape == witness.shape
            }
        )

    def release(self) -> None:
        """Give the optimizer the parameters back that it was made with."""
        for group, parameters in zip(self.optimizer.param_groups, self._before, strict=True):
            group["params"] = parameters

    def forget(self) -> None:
        """Be as before the first step."""
        self.optimizer.state.clear()
        self._state.clear()

    def named_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The optimizer's per-element state, by parameter."""
        for key, values in self._state.items():
            for name, view in self._flat.named(values):
                yield f"{name}/{key}", view

    def scalars(self) -> list[dict[str, float]]:
        """Per group, what the optimizer counts once per parameter, such as Adam's `step`."""
        return [
            {
                name: float(value)
                for name, value in self.optimizer.state.get(witness, {}).items()
                if isinstance(value, torch.Tensor) and value.shape != witness.shape
            }
            for witness in self._witnesses
        ]

    def restore(
        self,
        state: Mapping[str, torch.Tensor],
        scalars: Sequence[Mapping[str, float]],
        allocate: Callable[[str], torch.Tensor],
    ) -> None:
        """Make room for the state of an earlier run, named as in `named_state`; its values are copied in later."""
        for key in sorted({name.rpartition("/")[2] for name in state}):
            if key not in self._state:
                self._state[key] = allocate(key)
        for witness, counts in zip(self._witnesses, scalars, strict=True):
            kept = self.optimizer.state[witness]
            kept.update({name: witness.detach().clone() for name in self._state})
            kept.update(_as_tensors(counts, witness))
        for chunk, place in self._places():
            kept = self.optimizer.state[chunk]
            kept.update({name: flat[place.start : place.stop] for name, flat in self._state.items()})
            kept.update(_as_tensors(scalars[place.group], chunk))


def _spans(chunks: Sequence[Chunk]) -> list[tuple[int, int]]:
    """Where chunks are, those that follow each other as one."""
    spans: list[tuple[int, int]] = []
    for chunk in chunks:
        start = spans.pop()[0] if spans and spans[-1][1] == chunk.start else chunk.start
        spans.append((start, chunk.stop))
    return spans


def _may_fuse(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether the one-pass kernel may be used: the user chose no other, and asked for nothing it cannot do."""
    special = group.get("foreach") or group.get("differentiable") or group.get("capturable")
    return isinstance(optimizer, FUSED) and group["fused"] is None and not special


def _as_tensors(scalars: Mapping[str, float], like: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value, dtype=torch.float32, device=like.device) for name, value in scalars.items()}
