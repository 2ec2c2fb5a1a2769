"""Checksums of parameters: no flipped bit escapes them, and what most copies have is right."""

import pytest
import torch

from shoal.train.divergence import NUM_PARTS, checksum_of, find_diverged, part_of


@pytest.mark.parametrize("count", [1, 7, 8])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_bit_counts(dtype, count):
    values = torch.randn(count, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)
    before, as_bytes = checksum_of(values), values.view(torch.uint8)
    for bit in range(8 * len(as_bytes)):
        as_bytes[bit // 8] ^= 1 << bit % 8
        assert checksum_of(values) != before, f"bit {bit % (8 * values.element_size())}"
        as_bytes[bit // 8] ^= 1 << bit % 8
    assert checksum_of(values) == before


@pytest.mark.parametrize("start", [0, 1, 2, 3])
def test_parts_begin_anywhere(start):
    values = torch.arange(1.0, 12.0, dtype=torch.bfloat16)[start:]
    before = checksum_of(values)
    values[-1] = -values[-1]
    assert checksum_of(values) != before


@pytest.mark.parametrize("total", [0, 1, 2**63 - 1, -(2**63), -1, 2**62])
def test_sums_that_wrap(total):
    """Whatever a sum is before, each bit of each element changes what is left of it, up or down."""
    for bit in range(64):
        for change in (2**bit, -(2**bit)):
            values = torch.tensor([total, (change + 2**63) % 2**64 - 2**63])
            assert checksum_of(values) != checksum_of(torch.tensor([total, 0]))


def test_a_checksum_fits_into_the_table():
    """It travels as a float64, and must come out as it went in."""
    for value in (-1.0, float("nan"), 1e300):
        found = checksum_of(torch.full((100_000,), value, dtype=torch.float64))
        assert 0 <= found == int(float(found))


@pytest.mark.parametrize("count", [1, 31, 32, 33, 1000, 1024])
def test_everything_is_looked_at_within_a_hundred_steps(count):
    """From any step on, and each element as often as any other."""
    assert NUM_PARTS <= 100
    values = torch.arange(count)
    for start in (0, 17, 12_345):
        seen = torch.cat([part_of(values, step) for step in range(start, start + NUM_PARTS)])
        assert seen.sort().values.tolist() == values.tolist()


@pytest.mark.parametrize(
    ("checksums", "diverged", "source"),
    [
        ([5, 5, 5], [], 0),
        ([5, 6, 5], [1], 0),
        ([6, 5, 5], [0], 1),
        ([5, 6], [1], 0),
        ([5, 6, 7], [1, 2], 0),
        ([6, 5, 7, 5], [0, 2], 1),
    ],
)
def test_most_are_right(checksums, diverged, source):
    assert find_diverged(checksums) == (diverged, source)
