"""Numbers in a quarter of their bytes: int8 with a scale for each block. Pure functions of tensors.

A block's scale is its largest magnitude / 127, so an element is off by at most half a scale: 1/254 of the largest of
its block. What rounding took away is kept by the sender and added to what it sends next (error feedback), so over
many messages nothing is lost, only late.
"""

from collections.abc import Iterator

import torch

from shoal.spec.spans import timed

BLOCK = 256
"""Elements that share a scale: 4 bytes for 256, which is 1.6 % more."""

LEVELS = 127

CHUNK = 256 * BLOCK
"""Elements that are coded at a time, so that all of it stays in a core's own cache: five times as fast."""


def num_packed(num_elements: int) -> int:
    """The bytes of so many numbers: the scales of all blocks, then the numbers, the last block filled up."""
    return _num_blocks(num_elements) * (4 + BLOCK)


@timed("encode", "codec")
def encode(values: torch.Tensor) -> torch.Tensor:
    """Flat values as packed bytes (uint8). A block of zeros stays zeros. Values must be finite."""
    return encode_rest(values, torch.zeros_like(values, dtype=torch.float32))


def encode_rest(values: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """`encode` values and what was left over before; leaves in `rest` what is left over now."""
    rest.add_(values)
    return pack(rest)


def pack(rest: torch.Tensor) -> torch.Tensor:
    """`rest`, flat and float32, as packed bytes; leaves in it what rounding took away. About 2 ns an element."""
    packed = torch.empty(num_packed(rest.numel()), dtype=torch.uint8, device=rest.device)
    scratch = _scratch(rest)
    for values, scales, codes in _chunks(rest, packed):
        some = scratch[: values.numel()].view_as(values)
        torch.abs(values, out=some)
        torch.div(some.amax(1), LEVELS, out=scales)
        # A scale that is zero, or too small to divide by, stands for zeros.
        inverse = torch.where(scales > torch.finfo(torch.float32).tiny, 1.0 / scales, torch.zeros_like(scales))
        torch.mul(values, inverse.unsqueeze(1), out=some).round_()
        codes.copy_(some)
        values.sub_(some.mul_(scales.unsqueeze(1)))
    return packed


def decode(packed: torch.Tensor, num_elements: int) -> torch.Tensor:
    """What was packed, as float32: the same bits wherever it is done."""
    out = torch.zeros(num_elements, device=packed.device)
    add_decoded(out, packed, 1.0)
    return out


@timed("decode", "codec")
def add_decoded(out: torch.Tensor, packed: torch.Tensor, factor: float) -> None:
    """Add what was packed, times a factor, to flat float32 values."""
    scratch = _scratch(out)
    for values, scales, codes in _chunks(out, packed):
        some = scratch[: values.numel()].view_as(values)
        some.copy_(codes)
        values.add_(some.mul_(scales.unsqueeze(1)), alpha=factor)


def _scratch(flat: torch.Tensor) -> torch.Tensor:
    return torch.empty(min(CHUNK, _num_blocks(flat.numel()) * BLOCK), device=flat.device)


def _num_blocks(num_elements: int) -> int:
    return -(-num_elements // BLOCK)


def _chunks(flat: torch.Tensor, packed: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(values in rows of a block, their scales, their codes), a chunk at a time; what is done to the values stays."""
    num_blocks, num_whole = _num_blocks(flat.numel()), flat.numel() // BLOCK
    scales = packed[: 4 * num_blocks].view(torch.float32)
    codes = packed[4 * num_blocks :].view(torch.int8).view(num_blocks, BLOCK)
    whole = flat[: num_whole * BLOCK].view(num_whole, BLOCK)
    rows = CHUNK // BLOCK
    for start in range(0, num_whole, rows):
        span = slice(start, min(start + rows, num_whole))
        yield whole[span], scales[span], codes[span]
    if num_whole < num_blocks:
        tail = flat[num_whole * BLOCK :]
        padded = torch.nn.functional.pad(tail, (0, BLOCK - tail.numel())).view(1, BLOCK)
        yield padded, scales[num_whole:], codes[num_whole:]
        tail.copy_(padded.view(-1)[: tail.numel()])
