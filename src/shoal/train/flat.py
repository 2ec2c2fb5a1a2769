"""One flat buffer for all trainable parameters, cut into chunks that never depend on the number of workers."""

import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from shoal.spec.errors import UserError

ALIGNMENT = 1024
"""Elements. Regions start and end on it, so that vector kernels see whole vectors wherever a slice is cut."""

CHUNK = 64 * 1024
"""Elements of a chunk: 256 KiB of float32, so that a sum and what follows it stay in a core's own cache."""

PARAMETER_ALIGNMENT = 16
"""Elements. Kernels may choose their path by the alignment of a pointer; 64 bytes is what torch's allocator gives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A contiguous part of the flat buffer that belongs to one parameter group of the optimizer."""

    start: int
    stop: int
    group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatLayout:
    """Where each parameter lives. `offsets` belongs to `names`, in the order in which backward fills them."""

    names: tuple[str, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    total: int

    def name(self, what: str) -> str:
        """What a buffer that is laid out like this is called: others have other names."""
        return f"{what}-{zlib.crc32(repr((self.names, self.offsets, self.total)).encode()):08x}"

    def owned(self, rank: int, size: int) -> tuple[Chunk, ...]:
        """The chunks that `rank` of `size` updates: a contiguous run, all ranks' runs together are all chunks."""
        num = len(self.chunks)
        # Rank 0 owns a chunk even where there are fewer chunks than ranks.
        return self.chunks[-(-num * rank // size) : -(-num * (rank + 1) // size)]

    def by_parameter(self) -> tuple[Chunk, ...]:
        """One chunk for each parameter, for those who own everything and divide it with nobody."""
        starts = [chunk.start for chunk in self.chunks]
        return tuple(
            Chunk(start=at, stop=at + size, group=self.chunks[bisect_right(starts, at) - 1].group)
            for at, size in zip(self.offsets, self.sizes, strict=True)
        )

    def dealt(self, rank: int, size: int) -> tuple[Chunk, ...]:
        """Another way to own chunks: one by one in turn, so that each rank has its part of any stretch of them."""
        return self.chunks[rank::size]


def plan_layout(groups: Sequence[Sequence[tuple[str, int]]]) -> FlatLayout:
    """Lay out (name, size) pairs, given per parameter group in forward order, last layers first."""
    names: list[str] = []
    offsets: list[int] = []
    sizes: list[int] = []
    chunks: list[Chunk] = []
    end = 0
    for index, group in enumerate(groups):
        start = end
        for name, size in reversed(group):
            names.append(name)
            offsets.append(end)
            sizes.append(size)
            end = round_up(end + size, PARAMETER_ALIGNMENT)
        end = round_up(end, ALIGNMENT)
        chunks += [Chunk(start=at, stop=min(at + CHUNK, end), group=index) for at in range(start, end, CHUNK)]
    return FlatLayout(names=tuple(names), offsets=tuple(offsets), sizes=tuple(sizes), chunks=tuple(chunks), total=end)


def _layout_of(groups: Sequence[Sequence[tuple[str, nn.Parameter]]]) -> FlatLayout:
    return plan_layout([[(name, p.numel()) for name, p in group] for group in groups])


def plan_flat(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[FlatLayout, torch.dtype]:
    """What a flat buffer for these parameters will look like."""
    groups = named_groups(model, optimizer)
    return _layout_of(groups), next(p for group in groups for _, p in group).dtype


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


class FlatModel:
    """A model whose trainable parameters are views of one flat buffer.

    `parameters` are in the layout's order. `allocate(name, num_elements, dtype)` gives the buffer: private memory, or
    memory that all workers of a host see.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        allocate: Callable[[str, int, torch.dtype], torch.Tensor],
    ) -> None:
        groups = named_groups(model, optimizer)
        self.model = model
        self.layout = _layout_of(groups)
        by_name = {name: p for group in groups for name, p in group}
        self.parameters = [by_name[name] for name in self.layout.names]
        self.dtype = self.parameters[0].dtype
        self.values = allocate(self.layout.name("values"), self.layout.total, self.dtype)

    @property
    def is_placed(self) -> bool:
        """The parameters are in the buffer already."""
        pairs = zip(self.parameters, self.views(self.values), strict=True)
        return all(parameter.data_ptr() == view.data_ptr() for parameter, view in pairs)

    def place(self, *, is_source: bool) -> None:
        """Move the parameters into the buffer; the source's values are everybody's once all have seen them."""
        if is_source and not self.is_placed:
            for parameter, view in zip(self.parameters, self.views(self.values), strict=True):
                view.copy_(parameter.detach())
        self.point_to(self.values)

    def point_to(self, flat: torch.Tensor) -> None:
        """Let the parameters be views of another buffer."""
        for parameter, view in zip(self.parameters, self.views(flat), strict=True):
            parameter.data = view

    def views(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        """`flat` as one tensor per parameter, in the layout's order."""
        for parameter, at, size in zip(self.parameters, self.layout.offsets, self.layout.sizes, strict=True):
            yield flat[at : at + size].view(parameter.shape)

    def named(self, flat: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        return zip(self.layout.names, self.views(flat), strict=True)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Everything in the model that has a name, trainable or not, as `model/...`."""
        for name, value in named_tensors(self.model):
            yield f"model/{name}", value.detach()

    def restore_rest(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy back what is not trainable: buffers and frozen parameters, which every worker has for itself."""
        trainable = {p.data_ptr() for p in self.parameters}
        for name, value in self.tensors():
            if name in tensors and value.data_ptr() not in trainable:
                value.copy_(tensors[name])

    def release(self) -> None:
        """Give every parameter memory of its own again."""
        for parameter in self.parameters:
            parameter.data = parameter.detach().clone()


@contextmanager
def keeping_memory(model: nn.Module) -> Iterator[None]:
    """If what is done inside fails, the parameters are in the memory that they were in before."""
    before = [(parameter, parameter.data) for parameter in model.parameters()]
    try:
        yield
    except BaseException:
        for parameter, data in before:
            parameter.data = data
        raise


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Everything in a model that has a name and values, parameters as such."""
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            yield name, value


def named_groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[tuple[str, nn.Parameter]]]:
    """The optimizer's parameters by group with the names the model gives them; raises where the two disagree."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups: list[list[tuple[str, nn.Parameter]]] = []
    for group in optimizer.param_groups:
        strangers = [tuple(p.shape) for p in group["params"] if id(p) not in names]
        if strangers:
            raise UserError(
                f"The optimizer holds {len(strangers)} parameter(s) that are not in the model.",
                why=f"their shapes are {strangers[:3]}; was the model copied after the optimizer was made?",
                hint="make the optimizer from `model.parameters()` of the model you pass to Trainer",
            )
        groups.append([(names[id(p)], p) for p in group["params"] if p.requires_grad])
    _check(model, groups)
    return groups


def _check(model: nn.Module, groups: list[list[tuple[str, nn.Parameter]]]) -> None:
    held = {id(p) for group in groups for _, p in group}
    if not held:
        raise UserError(
            "The optimizer has nothing to train.",
            why="no parameter it holds has requires_grad=True",
            hint="unfreeze a layer, or use `trainer.evaluate` and `trainer.predict` only",
        )
    missing = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in held]
    if missing:
        raise UserError(
            f"The optimizer does not hold {len(missing)} trainable parameter(s): {shorten(missing)}.",
            why="they would get gradients and never change",
            hint="pass them to the optimizer, or freeze them with `parameter.requires_grad_(False)`",
        )
    dtypes = {p.dtype for group in groups for _, p in group}
    if len(dtypes) > 1:
        raise UserError(
            f"The model's trainable parameters have several types: {', '.join(sorted(map(str, dtypes)))}.",
            why="gradients are summed in one flat buffer of one type",
            hint="convert it with `model.float()` and use precision='bf16' for the arithmetic",
        )
    _check_overlap(groups)


def _check_overlap(groups: list[list[tuple[str, nn.Parameter]]]) -> None:
    """Two Parameter objects over one memory cannot both be moved; one Parameter used twice is fine."""
    spans = sorted(
        (p.data_ptr(), p.data_ptr() + _extent(p), name) for group in groups for name, p in group if p.numel()
    )
    for (_, end, first), (start, _, second) in pairwise(spans):
        if start < end:
            raise UserError(
                f"Parameters {first!r} and {second!r} share memory but are two Parameter objects.",
                why="each would be moved to a place of its own and the sharing lost",
                hint="tie them by using one Parameter in both places: `decoder.weight = encoder.weight`",
            )


def _extent(parameter: torch.Tensor) -> int:
    """Bytes from its first to behind its last element; one that was expanded has fewer than it shows."""
    steps = zip(parameter.shape, parameter.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * parameter.element_size()


def num_bytes_of(model: nn.Module) -> int:
    """What the parameters that a model holds here take."""
    return sum(each.numel() * each.element_size() for each in model.parameters())


def shorten(names: Sequence[str], most: int = 4) -> str:
    """A few names and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
