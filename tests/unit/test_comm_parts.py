"""The pure parts of communication: blocks, calls, who can share with whom."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.comm.blocks import cut_blocks, cut_evenly, reduce_terms
from shoal.comm.connect import connect
from shoal.comm.group import DTYPES, KINDS, Call, Op, disagreement
from shoal.comm.process import can_share, decode, describe_self, encode, is_running
from shoal.spec.errors import UserError


@given(st.integers(0, 5000), st.integers(1, 9), st.sampled_from([1, 2, 4, 8]))
def test_slices_cover_everything_and_share_no_cache_line(numel: int, parts: int, item_bytes: int) -> None:
    slices = cut_evenly(numel, parts, item_bytes)
    assert [i for part in slices for i in range(part.start, part.stop)] == list(range(numel))
    assert all(part.start * item_bytes % 64 == 0 or part.start == numel for part in slices)


@given(st.integers(0, 50), st.integers(0, 300), st.integers(1, 100))
def test_blocks_cover_a_slice(start: int, length: int, block: int) -> None:
    blocks = cut_blocks(slice(start, start + length), block)
    assert [i for part in blocks for i in range(part.start, part.stop)] == list(range(start, start + length))
    assert len(blocks) == max(1, -(-length // block))


@pytest.mark.parametrize("num_terms", [1, 2, 3, 5])
def test_terms_may_include_the_result(num_terms: int) -> None:
    for out in range(num_terms):
        terms = [np.full(4, 10.0**i) for i in range(num_terms)]
        want = sum(terms)
        reduce_terms(terms, terms[out], np.empty(4), np.add)
        assert terms[out].tolist() == want.tolist()


@given(
    st.sampled_from(KINDS),
    st.integers(0, 2**40 - 1),
    st.sampled_from(DTYPES),
    st.sampled_from(Op),
    st.integers(0, 4095),
)
def test_a_call_is_one_word_and_back(kind: str, numel: int, dtype: torch.dtype, op: Op, root: int) -> None:
    call = Call(kind, numel, dtype, op, root)
    assert 0 < call.code < 2**64
    assert Call.of(call.code) == call


def test_a_disagreement_names_both() -> None:
    mine, theirs = Call("all_reduce", 10, torch.float32, Op.MAX), Call("broadcast", 5, torch.bfloat16, root=3)
    message = disagreement(0, mine.code, 2, theirs.code).message
    assert message == (
        "Ranks disagree: rank 0 called all_reduce of 10 float32, max; "
        "rank 2 called broadcast of 5 bfloat16 from rank 3."
    )


def test_processes_share_only_within_one_boot_and_container() -> None:
    here = describe_self()
    assert decode(encode(here)) == here
    assert is_running(here)
    assert can_share([here, here]) == (True, "")
    assert "another host (far)" in can_share([here, replace(here, boot="other", host="far")])[1]
    assert "another container" in can_share([here, here, replace(here, pid_namespace=1)])[1]


def test_a_process_with_a_recycled_pid_is_another() -> None:
    here = describe_self()
    assert not is_running(replace(here, started=here.started - 1))
    assert not is_running(replace(here, pid=2**22 + 1))


def test_wrong_ways_to_connect() -> None:
    with pytest.raises(UserError, match="transport"):
        connect(0, 2, transport="carrier pigeon")
    with pytest.raises(UserError, match="needs a store"):
        connect(0, 2)
