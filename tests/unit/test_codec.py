"""Numbers as int8: how far off they may be, and that nothing is lost for good."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.comm.codec import BLOCK, decode, encode, encode_rest, num_packed

floats = st.floats(-1e6, 1e6, width=32)


@given(st.lists(floats, min_size=1, max_size=3 * BLOCK))
def test_an_element_is_off_by_half_a_scale_at_most(numbers):
    values = torch.tensor(numbers, dtype=torch.float32)
    packed = encode(values)
    assert packed.numel() == num_packed(values.numel())
    found = decode(packed, values.numel())
    for block, back in zip(values.split(BLOCK), found.split(BLOCK), strict=True):
        largest = block.abs().max()
        assert (block - back).abs().max() <= largest / 254 * (1 + 1e-5) + 1e-37


def test_zeros_signs_and_extremes_stay():
    values = torch.zeros(2 * BLOCK)
    values[:3] = torch.tensor([-5.0, 5.0, 0.0])
    assert torch.equal(decode(encode(values), values.numel()), values)


def test_tiny_numbers_become_zeros_and_not_nonsense():
    values = torch.full((7,), 1e-44)
    assert torch.equal(decode(encode(values), 7), torch.zeros(7))


def test_it_takes_a_quarter_of_the_bytes():
    assert num_packed(2**20) < 4 * 2**20 / 3.9


@given(st.integers(0, 2**32 - 1), st.integers(1, 20))
def test_what_is_left_over_is_sent_later(seed, rounds):
    """The sum of what arrived is the sum of what was sent, but for what one message leaves over."""
    generator = torch.Generator().manual_seed(seed)
    rest, sent, arrived = torch.zeros(300), torch.zeros(300), torch.zeros(300)
    for _ in range(rounds):
        values = torch.randn(300, generator=generator)
        sent += values
        arrived += decode(encode_rest(values, rest), 300)
    # Each message is of values and a rest below 1/254 of its largest: less than 6 in 300 draws.
    assert rest.abs().max() < 6 / 254
    torch.testing.assert_close(arrived + rest, sent, atol=1e-4, rtol=0)
