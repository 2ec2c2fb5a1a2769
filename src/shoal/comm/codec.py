"""Numbers in a quarter of their bytes: int8 with a scale for each block. Pure functions of tensors.

A block's scale is its largest magnitude / 127, so an element is off by at most half a scale: 1/254 of the largest of
its block. What rounding took away is kept by the sender and added to what it sends next (error feedback), so over
many messages nothing is lost, only late.
"""

import torch

BLOCK = 256
"""Elements that share a scale: 4 bytes for 256, which is 1.6 % more."""

LEVELS = 127


def num_packed(num_elements: int) -> int:
    """The bytes of so many numbers: the scales of all blocks, then the numbers, the last block filled up."""
    num_blocks = -(-num_elements // BLOCK)
    return num_blocks * (4 + BLOCK)


def encode(values: torch.Tensor) -> torch.Tensor:
    """Flat float32 values as packed bytes (uint8). A block of zeros stays zeros. Values must be finite."""
    num_blocks = -(-values.numel() // BLOCK)
    packed = torch.empty(num_packed(values.numel()), dtype=torch.uint8, device=values.device)
    blocks = _in_blocks(values.float(), num_blocks)
    scales = blocks.abs().amax(1, keepdim=True) / LEVELS
    # A scale that is zero, or too small to divide by, stands for zeros.
    inverse = torch.where(scales > torch.finfo(torch.float32).tiny, 1.0 / scales, torch.zeros_like(scales))
    packed[: 4 * num_blocks].view(torch.float32).copy_(scales.view(-1))
    packed[4 * num_blocks :].view(torch.int8).view(num_blocks, BLOCK).copy_(
        (blocks * inverse).round_().clamp_(-LEVELS, LEVELS)
    )
    return packed


def decode(packed: torch.Tensor, num_elements: int) -> torch.Tensor:
    """What `encode` packed, as float32: the same bits wherever it is done."""
    num_blocks = -(-num_elements // BLOCK)
    scales = packed[: 4 * num_blocks].view(torch.float32).view(-1, 1)
    blocks = packed[4 * num_blocks :].view(torch.int8).view(num_blocks, BLOCK)
    return (blocks * scales).view(-1)[:num_elements]


def encode_rest(values: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """`encode` values and what was left over before; leaves in `rest` what is left over now."""
    rest.add_(values)
    packed = encode(rest)
    rest.sub_(decode(packed, rest.numel()))
    return packed


def _in_blocks(values: torch.Tensor, num_blocks: int) -> torch.Tensor:
    missing = num_blocks * BLOCK - values.numel()
    padded = torch.nn.functional.pad(values, (0, missing)) if missing else values
    return padded.view(num_blocks, BLOCK)
