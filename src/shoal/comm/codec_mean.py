"""The weighted mean of everybody's values, over any group: as they are, or as int8.

All ranks call these together and end with the same bits. They block; call them where that disturbs nobody.
"""

from collections.abc import Sequence

import torch

from shoal.comm.codec import BLOCK, decode, encode_rest, num_packed
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


def mean_int8(
    group: Group, values: torch.Tensor, weights: Sequence[float], rest: torch.Tensor, rest_of_mean: torch.Tensor
) -> None:
    """The mean in place, of values that travel as int8.

    `rest` is what this rank's messages have left over so far, `rest_of_mean` what means that it sent on for all have
    left over; both are as large as `values`, zero at first, and belong to this function. Two ranks swap all they
    have: a quarter of the bytes. More of them send each rank its part, which adds up and passes the sum on:
    2 (size - 1) / size of a quarter, and a second rounding.
    """
    triples = zip(parts_of(values), parts_of(rest), parts_of(rest_of_mean), strict=True)
    for part, left, left_of_mean in triples:
        if group.size <= 2:
            _swap(group, part, weights, left)
        else:
            _scatter_and_gather(group, part, weights, left, left_of_mean)


def _swap(group: Group, values: torch.Tensor, weights: Sequence[float], rest: torch.Tensor) -> None:
    packed = encode_rest(values, rest)
    everyone = packed.new_empty(group.size * packed.numel())
    group.all_gather(everyone, packed).wait()
    _add_up(values, everyone.split(packed.numel()), weights)


def _scatter_and_gather(
    group: Group, values: torch.Tensor, weights: Sequence[float], rest: torch.Tensor, rest_of_mean: torch.Tensor
) -> None:
    size, num_elements = group.size, values.numel()
    each = -(-num_elements // (size * BLOCK)) * BLOCK
    cuts = [(min(rank * each, num_elements), min((rank + 1) * each, num_elements)) for rank in range(size)]
    packed = [encode_rest(values[start:stop], rest[start:stop]) for start, stop in cuts]
    start, stop = cuts[group.rank]
    theirs = _collect(group, packed, num_packed(stop - start))
    mean = values[start:stop]
    _add_up(mean, theirs, weights)
    mine = packed[0].new_zeros(num_packed(each))
    sent = encode_rest(mean, rest_of_mean[start:stop])
    mine[: sent.numel()] = sent
    everyone = mine.new_empty(size * mine.numel())
    group.all_gather(everyone, mine).wait()
    for (first, last), message in zip(cuts, everyone.split(mine.numel()), strict=True):
        values[first:last] = decode(message[: num_packed(last - first)], last - first)


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
    out.zero_()
    for rank, message in enumerate(messages):
        if weights[rank]:
            out.add_(decode(message, out.numel()), alpha=_share(weights, rank))


def _share(weights: Sequence[float], rank: int) -> float:
    return weights[rank] / sum(weights)
