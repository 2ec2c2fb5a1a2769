"""Which waits a worker tells its coordinator about."""

from shoal.train.link import Waits


def tell_from(waits: Waits, now: float, length: float, generation: int = 0) -> float | None:
    """A wait that is looked at ten times a second; returns when it was first told."""
    told = None
    for tenth in range(1, int(10 * length) + 1):
        if waits.is_unusual(generation, tenth / 10, now + tenth / 10) and told is None:
            told = tenth / 10
    return told


def test_a_first_long_wait_is_told_soon() -> None:
    assert tell_from(Waits(), 0.0, 2.0) == 0.6


def test_what_is_usual_is_not_told() -> None:
    waits = Waits()
    for step in range(20):
        tell_from(waits, 2.0 * step, 1.0)
    assert tell_from(waits, 50.0, 1.5) is None
    assert tell_from(waits, 60.0, 10.0) is not None


def test_waits_of_a_world_that_is_over_say_nothing_about_what_is_usual() -> None:
    waits = Waits()
    for generation in range(20):
        assert tell_from(waits, 20.0 * generation, 9.0, generation) == 0.6
