"""What a model does in a forward besides computing: draw random numbers, change its buffers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from shoal.train.homes import watching_homes


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """`is_random`: a forward draws random numbers. `changing`: names of buffers that it changes (batch statistics).

    A model with neither gives the same gradient, up to rounding, however a batch is cut, so parts may be merged.
    `homes`: the modules that are being called whenever a parameter is used, by its name; see `watching_homes`.
    `saved_bytes`: what a forward keeps for its backward, for each sample.
    """

    is_random: bool
    changing: tuple[str, ...]
    homes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    saved_bytes: float = 0.0

    @property
    def is_plain(self) -> bool:
        return not self.is_random and not self.changing


def probe(
    model: nn.Module, forward: Callable[[], object], seed: int, num_samples: int, device: torch.device
) -> Traits:
    """Run one forward of so many samples and see; buffers and the random state are as before afterwards.

    It is counted what its backward would need, and let go at once: the forward takes no more memory than without.
    """
    buffers = dict(model.named_buffers())
    kept = {name: buffer.clone() for name, buffer in buffers.items()}
    versions = {name: buffer._version for name, buffer in buffers.items()}
    saved = _Saved([*model.parameters(), *buffers.values()])
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        before = read_randomness(device)
        with torch.enable_grad(), saved.counting(), watching_homes(model) as homes:
            forward()
        is_random = not torch.equal(before, read_randomness(device))
    found = dict(model.named_buffers())
    # Batch statistics are written without counting a version, and a counter may happen to keep its value.
    changing = tuple(
        name
        for name, buffer in buffers.items()
        if buffer._version != versions[name] or _differs(found.get(name, buffer), kept[name])
    )
    with torch.no_grad():
        for name in changing:
            holder, last = _holder_of(model, name)
            holder[last] = buffers[name].copy_(kept[name])
    return Traits(
        is_random=is_random, changing=changing, homes=homes, saved_bytes=saved.num_bytes / max(1, num_samples)
    )


def _differs(buffer: torch.Tensor, before: torch.Tensor) -> bool:
    """Whether a forward has left another value. One of another shape is not what goes on with: a cache that grew."""
    is_alike = buffer.shape == before.shape and buffer.dtype == before.dtype
    return is_alike and not torch.equal(buffer, before)


def _holder_of(model: nn.Module, name: str) -> tuple[dict[str, torch.Tensor | None], str]:
    """Where a module keeps this buffer, and under which name."""
    owner, _, last = name.rpartition(".")
    return model.get_submodule(owner)._buffers, last


@contextmanager
def keeping_buffers(model: nn.Module) -> Iterator[None]:
    """Inside, forwards may be tried: buffers are as before afterwards, but for caches that have grown."""
    kept = [
        (module._buffers, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for holder, name, buffer, value in kept:
                buffer.copy_(value)
                found = holder.get(name)
                holder[name] = found if found is not None and found.shape != buffer.shape else buffer


def count_saved(forward: Callable[[], object], known: Sequence[torch.Tensor]) -> int:
    """Bytes that a forward keeps for its backward, besides tensors that are there anyway. Nothing is kept here."""
    saved = _Saved(known)
    with saved.counting():
        forward()
    return saved.num_bytes


def read_randomness(device: torch.device) -> torch.Tensor:
    """Where the random numbers of a forward are: those of main memory, and of the GPU it runs on."""
    state = torch.get_rng_state()
    return torch.cat([state, torch.cuda.get_rng_state(device)]) if device.type == "cuda" else state


class _Saved:
    """Counts the memory that a forward keeps for its backward, besides tensors that are there anyway."""

    def __init__(self, known: Sequence[torch.Tensor]) -> None:
        # References that do not keep memory, but the place of what they refer to: no other gets the same number.
        self._seen = {StorageWeakRef(tensor.untyped_storage()) for tensor in known if _has_storage(tensor)}
        self.num_bytes = 0

    def counting(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Inside, what a forward saves is counted and not kept; there can be no backward."""
        return torch.autograd.graph.saved_tensors_hooks(self._count, lambda nothing: nothing)

    def _count(self, tensor: torch.Tensor) -> None:
        if _has_storage(tensor):
            storage = tensor.untyped_storage()
            reference = StorageWeakRef(storage)
            if reference not in self._seen:
                self._seen.add(reference)
                self.num_bytes += storage.nbytes()


def _has_storage(tensor: torch.Tensor) -> bool:
    """Sparse tensors, and some that wrap others, have none of their own."""
    return tensor.layout == torch.strided and type(tensor) in (torch.Tensor, nn.Parameter)


class ChangingBuffers:
    """The buffers a forward changes, as one vector that can be put back and averaged.

    Every shard starts from the values at the beginning of the step; what it leaves is averaged over all samples of
    the step. So running statistics, too, depend on how a step is cut into shards and not on who computed them.
    Doubles hold float32 values and counters exactly. A forward may also put another tensor in a buffer's place
    (`self.count = self.count + 1`): its value counts, and the buffer is in its place again when values are written.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        buffers = dict(model.named_buffers())
        names = sorted(names, key=lambda name: buffers[name].is_floating_point())
        self._buffers = [buffers[name] for name in names]
        self._holders = [_holder_of(model, name) for name in names]
        sizes = [buffer.numel() for buffer in self._buffers]
        self._vector = torch.zeros(sum(sizes), dtype=torch.float64)
        parts = self._vector.split(sizes)
        self._parts = [part.view(buffer.shape) for part, buffer in zip(parts, self._buffers, strict=True)]
        self._num_counts = sum(buffer.numel() for buffer in self._buffers if not buffer.is_floating_point())

    def __bool__(self) -> bool:
        return bool(self._buffers)

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """The buffers themselves."""
        return self._buffers

    def read(self) -> torch.Tensor:
        found = [holder[name] for holder, name in self._holders]
        torch._foreach_copy_(self._parts, [value.detach() for value in found if value is not None])
        return self._vector.clone()

    def write(self, values: torch.Tensor | None) -> None:
        if values is None:
            return
        self._vector.copy_(values)
        self._vector[: self._num_counts].round_()
        torch._foreach_copy_(self._buffers, self._parts)
        for (holder, name), buffer in zip(self._holders, self._buffers, strict=True):
            holder[name] = buffer


def seed_of(seed: int, step: int, shard: int) -> int:
    """The seed of a shard's random numbers: a mix of (seed, step, shard), never of a rank."""
    value = (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + shard * 0x94D049BB133111EB) & (2**64 - 1)
    value = (value ^ value >> 31) * 0xD6E8FEB86659FD93 & (2**64 - 1)
    return (value ^ value >> 32) & (2**63 - 1)
