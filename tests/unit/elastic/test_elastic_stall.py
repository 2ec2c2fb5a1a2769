"""Who holds up a run of fixed size."""

import pytest

from shoal.elastic.stall import Stall


def watched(step_seconds: float = 0.1) -> Stall:
    """A stall that has seen ten steps of all, the last at ten times that."""
    stall = Stall()
    for step in range(11):
        stall.stepped(0, step, step * step_seconds)
    return stall


def wait(stall: Stall, waits: dict[int, list[str]], since: float, until: float) -> float:
    """Everyone says twice a second that it waits; returns when somebody was named, or 0."""
    now = since
    while now < until:
        now += 0.5
        for rank, members in waits.items():
            stall.waiting(rank, members, now - since, now)
        if stall.look(now) is not None:
            return now
    return 0.0


@pytest.mark.parametrize(("step_seconds", "limit"), [(0.1, 10.0), (4.0, 20.0)])
def test_the_one_who_does_not_wait_is_named_in_time(step_seconds: float, limit: float) -> None:
    stall, since = watched(step_seconds), 100.0
    named = wait(stall, {0: ["1.0"], 2: ["1.0"]}, since, since + 60)
    assert limit <= named - since <= limit + 1.0
    assert stall.stalled is not None
    assert (stall.stalled.ranks, stall.stalled.waited_by) == ((1,), (0, 2))


def test_who_waits_is_not_to_blame() -> None:
    stall = watched()
    assert wait(stall, {0: ["1.0", "2.0"], 2: ["1.0"]}, 100.0, 120.0)
    assert stall.stalled is not None
    assert stall.stalled.ranks == (1,)


def test_where_all_wait_for_each_other_all_are_named() -> None:
    stall = watched()
    assert wait(stall, {0: ["1.0"], 1: ["0.0"]}, 100.0, 120.0)
    assert stall.stalled is not None
    assert stall.stalled.ranks == stall.stalled.waited_by == (0, 1)


def test_before_the_first_steps_a_minute_passes() -> None:
    assert 160.0 <= wait(Stall(), {0: ["1.0"]}, 100.0, 200.0) <= 161.0


def test_one_report_of_many_steps_is_enough() -> None:
    stall = Stall()
    stall.stepped(0, 0, 99.0)
    stall.stepped(0, 21, 99.5)
    assert 110.0 <= wait(stall, {0: ["1.0"]}, 100.0, 200.0) <= 111.0


def test_it_is_told_once_and_its_end_too() -> None:
    stall = watched()
    named = wait(stall, {0: ["1.0"]}, 100.0, 120.0)
    assert stall.look(named + 0.1) is None
    assert stall.ended(named + 1.0) is None
    over = stall.ended(named + 2.0)
    assert over is not None
    assert over.ranks == (1,)
    assert stall.ended(named + 3.0) is None
    assert wait(stall, {0: ["1.0"]}, 200.0, 220.0), "another one is told again"


def test_a_wait_that_ended_is_forgotten() -> None:
    stall = watched()
    stall.waiting(0, ["1.0"], 9.0, 100.0)
    assert stall.look(105.0) is None
