"""What a model does in a forward besides computing: draw random numbers, change its buffers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from shoal.train.homes import watching_homes


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """`is_random`: a forward draws random numbers. `changing`: names of buffers that it changes (batch statistics).

    A model with neither gives the same gradient, up to rounding, however a batch is cut, so parts may be merged.
    `homes`: the modules that are being called whenever a parameter is used, by its name; see `watching_homes`.
    """

    is_random: bool
    changing: tuple[str, ...]
    homes: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def is_plain(self) -> bool:
        return not self.is_random and not self.changing


def probe(model: nn.Module, forward: Callable[[], object], seed: int) -> Traits:
    """Run one forward and see; the model's buffers and the random state are as before afterwards."""
    buffers = dict(model.named_buffers())
    kept = {name: buffer.clone() for name, buffer in buffers.items()}
    versions = {name: buffer._version for name, buffer in buffers.items()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        with torch.no_grad(), watching_homes(model) as homes:
            forward()
        is_random = not torch.equal(before, torch.get_rng_state())
    # Batch statistics are written without counting a version, and a counter may happen to keep its value.
    changing = tuple(
        name
        for name, buffer in buffers.items()
        if buffer._version != versions[name] or not torch.equal(buffer, kept[name])
    )
    with torch.no_grad():
        for name in changing:
            buffers[name].copy_(kept[name])
    return Traits(is_random=is_random, changing=changing, homes=homes)


class ChangingBuffers:
    """The buffers a forward changes, as one vector that can be put back and averaged.

    Every shard starts from the values at the beginning of the step; what it leaves is averaged over all samples of
    the step. So running statistics, too, depend on how a step is cut into shards and not on who computed them.
    Doubles hold float32 values and counters exactly.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        buffers = dict(model.named_buffers())
        self._buffers = sorted((buffers[name] for name in names), key=torch.is_floating_point)
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
        torch._foreach_copy_(self._parts, self._buffers)
        return self._vector.clone()

    def write(self, values: torch.Tensor | None) -> None:
        if values is None:
            return
        self._vector.copy_(values)
        self._vector[: self._num_counts].round_()
        torch._foreach_copy_(self._buffers, self._parts)


def seed_of(seed: int, step: int, shard: int) -> int:
    """The seed of a shard's random numbers: a mix of (seed, step, shard), never of a rank."""
    value = (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + shard * 0x94D049BB133111EB) & (2**64 - 1)
    value = (value ^ value >> 31) * 0xD6E8FEB86659FD93 & (2**64 - 1)
    return (value ^ value >> 32) & (2**63 - 1)
