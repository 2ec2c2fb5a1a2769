"""Folding: equal lines of several ranks become one, and nobody's own order changes."""

from hypothesis import given
from hypothesis import strategies as st

from shoal.observe.fold import MAX_HELD, WINDOW_SECONDS, Fold, name_ranks


def shown(groups):
    return [(name_ranks(group.ranks), group.text) for group in groups]


def fold_all(num_ranks, lines, now=0.0):
    fold = Fold(num_ranks)
    for rank, text in lines:
        fold.add(rank, text, now)
    return shown(fold.drain())


def test_equal_lines_of_all_ranks_leave_at_once_as_one():
    fold = Fold(3)
    for rank in (2, 0, 1):
        assert fold.take(0.0) == []
        fold.add(rank, "hello", 0.0)
    assert shown(fold.take(0.0)) == [("0-2", "hello")]


def test_a_line_of_one_rank_leaves_when_the_window_ends():
    fold = Fold(2)
    fold.add(0, "alone", 1.0)
    assert fold.next_deadline() == 1.0 + WINDOW_SECONDS
    assert fold.take(1.0 + WINDOW_SECONDS * 0.9) == []
    assert shown(fold.take(1.0 + WINDOW_SECONDS)) == [("0", "alone")]
    assert fold.next_deadline() is None


def test_lines_that_come_too_late_are_not_folded():
    fold = Fold(2)
    fold.add(0, "x", 0.0)
    first = fold.take(1.0)
    fold.add(1, "x", 1.0)
    assert shown(first + fold.drain()) == [("0", "x"), ("1", "x")]


def test_a_rank_that_repeats_itself_is_not_folded_with_itself():
    assert fold_all(2, [(0, "x"), (0, "x"), (1, "x"), (1, "x")]) == [("0-1", "x"), ("0-1", "x")]


def test_lines_between_that_differ_do_not_stop_folding():
    lines = [(rank, text) for rank in range(3) for text in ("start", f"rank {rank}", "end")]
    assert fold_all(3, lines) == [("0-2", "start"), ("0", "rank 0"), ("1", "rank 1"), ("2", "rank 2"), ("0-2", "end")]


def test_opposite_orders_cannot_both_be_folded():
    assert fold_all(2, [(0, "a"), (0, "b"), (1, "b"), (1, "a")]) == [("0", "a"), ("0-1", "b"), ("1", "a")]


def test_a_rank_that_ended_is_not_waited_for():
    fold = Fold(3)
    fold.end()
    fold.add(0, "x", 0.0)
    fold.add(2, "x", 0.0)
    assert shown(fold.take(0.0)) == [("0,2", "x")]


def test_no_more_than_a_bounded_number_is_held():
    fold = Fold(2)
    for number in range(3 * MAX_HELD):
        fold.add(0, str(number), 0.0)
    assert len(fold.take(0.0)) == 2 * MAX_HELD
    assert len(fold.drain()) == MAX_HELD


def test_ranks_are_named_as_people_write_them():
    assert name_ranks([0]) == "0"
    assert name_ranks([3, 1, 2, 0]) == "0-3"
    assert name_ranks([5, 0, 2, 3]) == "0,2-3,5"


moments = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from("abcd"), st.sampled_from([0.0, 0.01, 0.06, 0.2])), max_size=60
)


@given(moments)
def test_whatever_comes_every_line_leaves_once_in_its_ranks_order_and_in_time(lines):
    fold, now, out, came = Fold(4), 0.0, [], {rank: [] for rank in range(4)}
    for rank, text, pause in lines:
        now += pause
        out += [(now, group) for group in fold.take(now)]
        fold.add(rank, text, now)
        came[rank].append((text, now))
        out += [(now, group) for group in fold.take(now)]
    end = now + WINDOW_SECONDS
    out += [(end, group) for group in fold.take(end)]
    assert fold.drain() == []
    for rank, lines_of_rank in came.items():
        left = [(group.text, moment) for moment, group in out if rank in group.ranks]
        assert [text for text, _ in left] == [text for text, _ in lines_of_rank]
        # Lines leave when someone looks: at the next line or tick, here at most 0.2 s after the window.
        assert all(
            moment - came_at <= WINDOW_SECONDS + 0.2 + 1e-9
            for (_, moment), (_, came_at) in zip(left, lines_of_rank, strict=True)
        )
    assert all(len(set(group.ranks)) == len(group.ranks) for _, group in out)
