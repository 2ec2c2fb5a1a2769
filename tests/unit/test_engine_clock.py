"""How far a clock is off is told by the quickest answer, and told again only where it has changed."""

from shoal.engine.clock import FIRST_READINGS, WINDOW_READINGS, ClockReadings


def read(readings: ClockReadings, count: int, offset: float, trip: float = 0.002, skew: float = 0.5) -> None:
    """Answers that were given after `skew` of the way there and back."""
    for number in range(count):
        asked = 1000.0 + number
        readings.add(trip, asked + skew * trip + offset, asked + trip)


def test_the_quickest_reading_counts():
    readings = ClockReadings()
    read(readings, FIRST_READINGS - 1, offset=2.5, trip=0.4, skew=0.9)
    assert readings.news("a", [0]) is None
    read(readings, 1, offset=2.5, trip=0.001)
    news = readings.news("a", [0, 1])
    assert news is not None
    assert abs(news.offset_seconds - 2.5) < 1e-9
    assert news.error_seconds == 0.0005
    assert (news.node, news.ranks) == ("a", (0, 1))


def test_the_error_is_a_bound():
    for skew in (0.0, 0.3, 1.0):
        readings = ClockReadings()
        read(readings, FIRST_READINGS, offset=-7.0, trip=0.02, skew=skew)
        news = readings.news("a", [0])
        assert news is not None
        assert abs(news.offset_seconds + 7.0) <= news.error_seconds + 1e-9


def test_nothing_is_told_twice_and_changes_are():
    readings = ClockReadings()
    read(readings, FIRST_READINGS, offset=1.0)
    assert readings.news("a", [0]) is not None
    read(readings, WINDOW_READINGS, offset=1.0005)
    assert readings.news("a", [0]) is None, "it may be wrong by as much"
    read(readings, WINDOW_READINGS - 1, offset=3.0)
    assert readings.news("a", [0]) is None, "once a window is enough"
    read(readings, 1, offset=3.0)
    news = readings.news("a", [0])
    assert news is not None
    assert abs(news.offset_seconds - 3.0) < 1e-9


def test_other_ranks_are_told_soon_and_nobody_of_an_empty_machine():
    readings = ClockReadings()
    read(readings, FIRST_READINGS, offset=1.0)
    assert readings.news("a", []) is None
    assert readings.news("a", [0]) is not None
    read(readings, FIRST_READINGS, offset=1.0)
    news = readings.news("a", [0, 2])
    assert news is not None
    assert news.ranks == (0, 2)
