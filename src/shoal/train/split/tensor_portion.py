"""A part of an activation that shows itself to the user's code as the whole, so that the code need not know."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import ref

import torch

from shoal.comm.group import Group
from shoal.train.cut import Slice
from shoal.train.split import tensor_talk as talk


@dataclass(frozen=True, slots=True)
class Layout:
    """Which dimension is cut, and of how many equal blocks it consists, each of which is cut (see `Slice`)."""

    dim: int
    blocks: int = 1


class Stuck(Exception):
    """A function for which there is no rule, or whose rule does not hold here. `met_whole`: see `Rehearsal`."""

    def __init__(self, why: str, *, met_whole: bool = False) -> None:
        super().__init__(why)
        self.met_whole = met_whole


class Region(Protocol):
    """Where parts of a model are computed with. `part` of `num_parts` is ours."""

    num_parts: int
    part: int

    def enter(self, whole: torch.Tensor) -> torch.Tensor:
        """A whole tensor for use in a part: see `tensor_talk.enter`."""
        ...

    def gather(self, portion: "Portion", why: Stuck) -> torch.Tensor:
        """The whole, for a function that cannot do with a part."""
        ...

    def admit(self, whole: torch.Tensor, like: "Portion") -> None:
        """A whole tensor meets a part of another: Stuck where that would be a bad deal."""
        ...

    def divide(self, size: int, portion: "Portion") -> None:
        """So many things are to be divided among the parts."""
        ...

    def look(self, portions: "Sequence[Portion]") -> None:
        """Something is about to be done with these."""
        ...


class Parts:
    """The region of a run: the workers that hold one copy together."""

    def __init__(self, group: Group) -> None:
        self.num_parts, self.part = group.size, group.rank
        self.meet(group)

    def meet(self, group: Group) -> None:
        """Other workers hold the other parts from here on; ours stays the same."""
        self.group = group
        self._entered: tuple[ref[torch.Tensor], int, torch.Tensor] | None = None

    def enter(self, whole: torch.Tensor) -> torch.Tensor:
        """Layers that read the same tensor share one sum of gradients, as queries, keys and values do."""
        if not whole.requires_grad or not torch.is_grad_enabled():
            return whole
        if self._entered is not None:
            seen, version, entered = self._entered
            if seen() is whole and version == whole._version:
                return entered
        entered = talk.enter(whole, self.group)
        self._entered = ref(whole, self._forget), whole._version, entered
        return entered

    def _forget(self, seen: "ref[torch.Tensor]") -> None:
        """A tensor that nobody has any more need not be kept for them."""
        if self._entered is not None and self._entered[0] is seen:
            self._entered = None

    def leave(self, term: torch.Tensor) -> torch.Tensor:
        return talk.leave(term, self.group)

    def gather(self, portion: "Portion", why: Stuck) -> torch.Tensor:
        return talk.gather(portion.local, self.group, portion.cut.dim, portion.cut.blocks)

    def admit(self, whole: torch.Tensor, like: "Portion") -> None:
        """The plan was found to be good."""

    def divide(self, size: int, portion: "Portion") -> None:
        if size % self.num_parts:
            raise Stuck(f"{size} cannot be divided among {self.num_parts}")

    def look(self, portions: "Sequence[Portion]") -> None:
        """Nothing to see."""


class Portion(torch.Tensor):
    """Looks like a tensor of shape `whole`; is `local`, a part of it.

    Functions of torch are called with the local tensors, and their shapes and dimensions translated, by the rules in
    `tensor_rules`; gradients flow through the local tensors alone. A function without a rule gets the whole.
    """

    local: torch.Tensor
    cut: Layout
    region: Region
    whole: tuple[int, ...]
    sources: frozenset[str]
    has_grad: bool
    apply: Callable[..., Any]
    """Set by `tensor_rules`, which needs this class."""

    @staticmethod
    def __new__(
        cls, local: torch.Tensor, layout: Layout, region: Region, sources: frozenset[str] = frozenset()
    ) -> "Portion":
        shape = list(local.shape)
        shape[layout.dim] *= region.num_parts
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        assert isinstance(made, Portion)
        made.local, made.cut, made.region, made.sources = local, layout, region, sources
        made.whole, made.has_grad = tuple(shape), torch.is_grad_enabled()
        return made

    def __init__(self, *_: object) -> None:
        """All is done in `__new__`."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return Portion.apply(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own has no class
        cls, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        raise TypeError(f"{func} cannot be used on an activation of which each worker has a part")

    def __repr__(self) -> str:  # type: ignore[override]
        parts = self.region.num_parts
        return f"Portion(1/{parts} of {list(self.whole)}, cut in dimension {self.cut.dim}: {self.local!r})"


def slice_of(layout: Layout, size: int, region: Region) -> Slice:
    """Our slice of a dimension that is `size` long as a whole."""
    share = size // layout.blocks // region.num_parts
    return Slice(layout.dim, region.part * share, (region.part + 1) * share, size, layout.blocks)


def cut_like(whole: torch.Tensor, like: Portion) -> torch.Tensor:
    """What belongs to a portion of a whole tensor that meets it: all where it is broadcast, else a slice."""
    dim = like.cut.dim - len(like.whole)
    if whole.requires_grad:
        like.region.admit(whole, like)
        whole = like.region.enter(whole)
    if whole.dim() < -dim or whole.shape[dim] == 1:
        return whole
    size = like.whole[like.cut.dim]
    if whole.shape[dim] != size:
        raise Stuck(f"a tensor of shape {list(whole.shape)} meets one of {list(like.whole)}")
    return slice_of(Layout(whole.dim() + dim, like.cut.blocks), size, like.region).of(whole)
