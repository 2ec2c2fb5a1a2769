"""A turn counts everywhere or nowhere."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.elastic.commit import NOTHING, Act, Report, is_committed, outcome_of


@pytest.mark.parametrize(
    ("votes", "turn", "expected"),
    [([5, 5, 5], 5, True), ([5, 4, 5], 5, False), ([6, 5, 5], 5, True), ([5], 5, True), ([], 0, False)],
)
def test_all_votes_make_a_commit(votes, turn, expected):
    assert is_committed(votes, turn) is expected


def test_nobody_knows_it_committed_so_it_is_not():
    outcome = outcome_of([Report(committed=4, voted=5), Report(committed=4, voted=5), Report(committed=4, voted=4)])
    assert outcome.turn == 4
    assert outcome.acts == (Act.KEEP, Act.KEEP, Act.KEEP)


def test_one_knows_it_committed_so_it_is():
    outcome = outcome_of([Report(committed=4, voted=5), Report(committed=5, voted=5), Report(committed=NOTHING)])
    assert outcome.turn == 5
    assert outcome.acts == (Act.APPLY, Act.KEEP, Act.FETCH)
    assert outcome.source == 1


def test_one_who_missed_a_turn_without_a_vote_fetches_it():
    outcome = outcome_of([Report(committed=7, voted=7), Report(committed=4, voted=5)])
    assert outcome.acts == (Act.KEEP, Act.FETCH)


def test_newcomers_alone_have_no_source():
    assert outcome_of([Report(committed=NOTHING), Report(committed=NOTHING)]).source is None


@given(st.data())
def test_after_any_death_in_a_turn_all_survivors_stand_at_the_same_turn(data):
    """Members vote, see some of the others' votes, and apply if they see all; then any of them die."""
    size = data.draw(st.integers(1, 5))
    voted = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    sees_all = [data.draw(st.booleans()) and all(voted) for _ in range(size)]
    reports = [Report(committed=9 + sees_all[rank], voted=9 + voted[rank]) for rank in range(size)]
    survivors = data.draw(st.lists(st.sampled_from(reports), min_size=1, max_size=size))
    outcome = outcome_of(survivors)
    ends = []
    for report, act in zip(survivors, outcome.acts, strict=True):
        assert act is not Act.FETCH, "who took part has all it needs"
        assert act is Act.KEEP or report.voted == 10, "only who voted holds the sum"
        ends.append(report.committed + (act is Act.APPLY))
    assert set(ends) == {outcome.turn}
    assert outcome.turn == 9 or all(voted)
