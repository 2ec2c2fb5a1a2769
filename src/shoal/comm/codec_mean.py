"""The weighted mean of everybody's values, over any group: as they are, or as int8.

All ranks call these together and end with the same bits. They block; call them where that disturbs nobody.
"""

from collections.abc import Sequence

import torch

from shoal.comm.codec import BLOCK, add_decoded, decode, num_packed, pack
from shoal.comm.group import Group

PART = 2**22
"""Elements that travel at a time, so that no single call takes longer than a silent rank is waited for."""


def parts_of(values: torch.Tensor) -> list[torch.Tensor]:
    return list(values.split(PART))


def mean_plain(group: Group, values: torch.Tensor, weights: Sequence[float]) -> None:
    """The mean in place. Moves 2 (size - 1) / size of the bytes per rank."""
    values.mul_(_share(weights, group.rank))
    for part in parts_of(values):
        group.all_reduce(part).wait()


def mean_int8(group: Group, rest: torch.Tensor, weights: Sequence[float], rest_of_mean: torch.Tensor) -> torch.Tensor:
    """The mean of what everybody has in `rest`, which travels as int8.

    `rest` is float32: the values that this rank adds to what its messages have left over so far. It is left with what
    this one leaves over. `rest_of_mean` is as large, and holds what means that this rank passed on have left over: it
    is zero at first, and for no one else. Two ranks swap all they have: a quarter of the bytes. More of them send
    each rank its part, which adds up and passes the sum on: 2 (size - 1) / size of a quarter, and a second rounding.
    """
    mean = torch.zeros_like(rest)
    for out, left, left_of_mean in zip(parts_of(mean), parts_of(rest), parts_of(rest_of_mean), strict=True):
        if group.size <= 2:
            _swap(group, out, weights, left)
        else:
            _scatter_and_gather(group, out, weights, left, left_of_mean)
    return mean


def _swap(group: Group, out: torch.Tensor, weights: Sequence[float], rest: torch.Tensor) -> None:
    packed = pack(rest)
    everyone = packed.new_empty(group.size * packed.numel())
    group.all_gather(everyone, packed).wait()
    _add_up(out, everyone.split(packed.numel()), weights)


def _scatter_and_gather(
    group: Group, out: torch.Tensor, weights: Sequence[float], rest: torch.Tensor, rest_of_mean: torch.Tensor
) -> None:
    size, num_elements = group.size, out.numel()
    each = -(-num_elements // (size * BLOCK)) * BLOCK
    cuts = [(min(rank * each, num_elements), min((rank + 1) * each, num_elements)) for rank in range(size)]
    packed = [pack(rest[start:stop]) for start, stop in cuts]
    start, stop = cuts[group.rank]
    theirs = _collect(group, packed, num_packed(stop - start))
    _add_up(rest_of_mean[start:stop], theirs, weights)
    mine = packed[0].new_zeros(num_packed(each))
    sent = pack(rest_of_mean[start:stop])
    mine[: sent.numel()] = sent
    everyone = mine.new_empty(size * mine.numel())
    group.all_gather(everyone, mine).wait()
    for (first, last), message in zip(cuts, everyone.split(mine.numel()), strict=True):
        out[first:last] = decode(message[: num_packed(last - first)], last - first)


def _collect(group: Group, packed: Sequence[torch.Tensor], num_bytes: int) -> list[torch.Tensor]:
    """Send every rank its part and get everybody's part of ours, in rank order."""
    theirs = [packed[0].new_empty(num_bytes) for _ in packed]
    theirs[group.rank] = packed[group.rank]
    peers = [(group.rank + distance) % group.size for distance in range(1, group.size)]
    sent = [group.send(packed[to], to) for to in peers if packed[to].numel()]
    taken = [group.recv(theirs[source], source) for source in reversed(peers) if num_bytes]
    for work in [*taken, *sent]:  # what was sent has arrived only when the others have taken it
        work.wait()
    return theirs


def _add_up(out: torch.Tensor, messages: Sequence[torch.Tensor], weights: Sequence[float]) -> None:
    """Add the mean of the messages, in rank order, so that it is the same bits wherever it is done."""
    for rank, message in enumerate(messages):
        if weights[rank]:
            add_decoded(out, message, _share(weights, rank))


def _share(weights: Sequence[float], rank: int) -> float:
    return weights[rank] / sum(weights)
