"""What a model does in a forward besides computing: draw random numbers, change its buffers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """`is_random`: a forward draws random numbers. `changing`: names of buffers that it changes (batch statistics).

    A model with neither gives the same gradient, up to rounding, however a batch is cut, so parts may be merged.
    """

    is_random: bool
    changing: tuple[str, ...]

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
        with torch.no_grad():
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
    return Traits(is_random=is_random, changing=changing)


class ChangingBuffers:
    """The buffers a forward changes, as one vector that can be put back and averaged.

    Every shard starts from the values at the beginning of the step; what it leaves is averaged over all samples of
    the step. So running statistics, too, depend on how a step is cut into shards and not on who computed them.
    Doubles hold float32 values and counters exactly.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        buffers = dict(model.named_buffers())
        self._buffers = [buffers[name] for name in names]
        self._sizes = [buffer.numel() for buffer in self._buffers]

    def __bool__(self) -> bool:
        return bool(self._buffers)

    def read(self) -> torch.Tensor:
        return torch.cat([buffer.reshape(-1).double().cpu() for buffer in self._buffers])

    def write(self, values: torch.Tensor) -> None:
        for buffer, part in zip(self._buffers, values.split(self._sizes), strict=True):
            exact = part if buffer.is_floating_point() else part.round()
            buffer.copy_(exact.view(buffer.shape))


def seed_of(seed: int, step: int, shard: int) -> int:
    """The seed of a shard's random numbers: a mix of (seed, step, shard), never of a rank."""
    value = (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + shard * 0x94D049BB133111EB) & (2**64 - 1)
    value = (value ^ value >> 31) * 0xD6E8FEB86659FD93 & (2**64 - 1)
    return (value ^ value >> 32) & (2**63 - 1)
