"""How large pieces may be: decided from numbers, and from memory that is only played."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shoal.spec.errors import UserError
from shoal.train.room import (
    CAUTION,
    MARGIN,
    MOST_GROWTH,
    STEPS_EACH,
    Gauge,
    Limit,
    Need,
    Peak,
    Room,
    choose_piece,
    first_piece,
    gauge_of,
)
from shoal.train.traits import probe

MB = 1 << 20
SET = Limit(1000 * MB, "memory=1000MB")


def test_what_fits_many_times_over_is_not_bounded() -> None:
    assert first_piece(MB, 200 * MB, SET, 100) is None
    assert first_piece(0.0, 200 * MB, SET, 10**9) is None


def test_what_might_not_fit_begins_small() -> None:
    assert first_piece(MB, 200 * MB, SET, 101) == 800 / CAUTION
    assert first_piece(500 * MB, 200 * MB, SET, 4) == 1


def test_memory_that_nobody_has_limited_is_used_with_less_caution() -> None:
    assert first_piece(MB, 200 * MB, Limit(1000 * MB, "machine"), 400) is None
    assert first_piece(MB, 200 * MB, Limit(1000 * MB, "machine"), 401) == 400


def test_one_peak_makes_a_line_from_what_was_used_before() -> None:
    # 10 MB a sample, and 255 MB are left.
    assert choose_piece([Peak(15, 250 * MB)], 100 * MB, 550 * MB, 1000) == 40


def test_two_peaks_know_what_comes_with_every_step() -> None:
    # 100 MB of state that is there in every step and 5 MB a sample; from the first peak alone it seemed more.
    limit = int(507 * MB / MARGIN)
    assert choose_piece([Peak(10, 150 * MB)], 0, limit, 1000) == 33
    assert choose_piece([Peak(10, 150 * MB), Peak(33, 265 * MB)], 0, limit, 1000) == 81


def test_pieces_grow_a_few_times_at_once_and_not_beyond_what_is_wanted() -> None:
    assert choose_piece([Peak(2, 101 * MB)], 100 * MB, 10_000 * MB, 1000) == 2 * MOST_GROWTH
    assert choose_piece([Peak(2, 101 * MB)], 100 * MB, 10_000 * MB, 5) == 5


def test_too_large_pieces_shrink_but_never_to_nothing() -> None:
    assert choose_piece([Peak(20, 600 * MB)], 100 * MB, 510 * MB, 1000) == 14
    assert choose_piece([Peak(2, 900 * MB)], 100 * MB, 500 * MB, 1000) == 1


def test_noise_does_not_make_samples_free() -> None:
    """A larger piece that seemed to take less says nothing about what a sample takes."""
    assert choose_piece([Peak(10, 210 * MB), Peak(20, 209 * MB)], 109 * MB, 400 * MB, 1000) == 52
    assert choose_piece([Peak(10, 100 * MB)], 100 * MB, 400 * MB, 1000) == 40


class Played:
    """A process whose memory is a function of the piece."""

    def __init__(self, state: int, each: float, used: int = 300 * MB) -> None:
        self.state, self.each, self.now = state, each, used
        self.most = 0

    def step(self, piece: int) -> None:
        self.now = 300 * MB + self.state + int(self.each * piece)
        self.most = max(self.most, self.now)

    @property
    def gauge(self) -> Gauge:
        return Gauge(used=lambda: self.now, peak=lambda: self.now, forget=lambda: None)


def make(played: Played, limit: Limit | None, *, saved: float, is_cuttable: bool = True, unit: int = 1) -> Room:
    need = Need(saved_bytes=saved, unit=unit, batch_size=4096, is_cuttable=is_cuttable)
    room = Room(played.gauge, lambda: limit, need, lambda *_, **__: None)
    room.enter(4096)
    return room


def play(room: Room, played: Played, num_steps: int = 30) -> None:
    for step in range(num_steps):
        piece = room.piece or 4096
        room.open()
        played.step(piece)
        room.close(step, piece)


@given(
    each=st.floats(0.1, 40.0),
    state=st.integers(0, 200),
    factor=st.floats(0.5, 3.0),
    limit=st.integers(700, 4000),
)
def test_no_limit_is_ever_passed_and_most_of_it_is_used(each: float, state: int, factor: float, limit: int) -> None:
    """Whatever a sample really takes besides what it keeps, and whatever comes with the first step."""
    played = Played(state * MB, each * MB)
    room = make(played, Limit(limit * MB, "cgroup"), saved=each * factor * MB)
    play(room, played)
    assert played.most <= limit * MB
    # Where state that comes with the first step is most of what was measured, samples seem to take more than they do.
    if room.piece is not None and room.piece < 4096 and state <= (limit - 300) / 10:
        largest = (MARGIN * (limit - 300) - state) / each
        assert room.piece >= min(4096, largest) / 2 - 1


def test_samples_that_become_larger_make_pieces_smaller() -> None:
    played = Played(0, 4 * MB)
    room = make(played, SET, saved=4 * MB)
    play(room, played)
    before = room.piece
    assert before is not None
    played.each *= 2
    play(room, played)
    assert room.piece is not None
    assert room.piece <= before / 1.8
    assert played.now <= SET.num_bytes


def test_without_a_limit_nothing_is_measured() -> None:
    played = Played(0, MB)
    room = make(played, None, saved=MB)
    play(room, played, STEPS_EACH)
    assert room.piece is None


def test_not_even_one_sample() -> None:
    with pytest.raises(UserError, match=r"memory of 1000 MB \(memory=1000MB\) is too little") as caught:
        make(Played(0, 0), SET, saved=800 * MB)
    assert caught.value.why == "it uses 300 MB already, and one sample needs at least 800 MB more"
    assert caught.value.hint == "give it memory=2112MB or more"


def test_one_sample_that_turned_out_too_large() -> None:
    played = Played(0, 900 * MB)
    room = make(played, SET, saved=300 * MB)
    with pytest.raises(UserError, match="is too little") as caught:
        play(room, played)
    assert caught.value.hint == "give it memory=1334MB or more"


def test_shards_that_cannot_be_cut_say_how_many_there_should_be() -> None:
    with pytest.raises(UserError) as caught:
        make(Played(0, 0), SET, saved=4 * MB, is_cuttable=False, unit=512)
    assert caught.value.hint == "cut steps into more shards, on all workers: shards=24"
    assert make(Played(0, 0), SET, saved=4 * MB, is_cuttable=False, unit=100).piece is None


def test_what_a_forward_keeps_is_counted_and_let_go() -> None:
    """Each tanh keeps its output, which the next layer keeps too: once. Parameters are there anyway."""
    model = nn.Sequential(nn.Linear(16, 1024), nn.Tanh(), nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 1))
    data = torch.zeros(32, 16)
    kept: list[torch.Tensor] = []
    traits = probe(model, lambda: kept.append(model(data).sum()), 0, 32, torch.device("cpu"))
    assert traits.saved_bytes == (16 + 1024 + 1024) * 4
    assert traits.is_plain
    with pytest.raises((RuntimeError, TypeError)):
        kept[0].backward()


def test_memory_of_this_process_is_measured() -> None:
    gauge = gauge_of(torch.device("cpu"))
    gauge.forget()
    before = gauge.peak()
    assert 0 < gauge.used() <= before + 4 * MB
    held = torch.ones(64 * MB // 4)
    assert gauge.peak() >= before + 50 * MB
    assert held.sum() > 0
