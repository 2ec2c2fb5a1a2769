"""Which ways between machines are tried, and what is said of those that are closed."""

import socket
from contextlib import closing

from shoal.engine.ways import Bell, Blocked, no_way, try_places, ways_to_try

BELLS = [("a", 1), ("b", 2), ("c", 3)]


def test_every_way_between_machines_is_tried_once() -> None:
    assert ways_to_try(BELLS, []) == {"a": [("b", 2), ("c", 3)], "b": [("a", 1), ("c", 3)], "c": [("a", 1), ("b", 2)]}
    assert ways_to_try([("a", 1)], []) == {}


def test_those_who_know_each_other_try_who_is_new() -> None:
    assert ways_to_try(BELLS, ["a", "b"]) == {"a": [("c", 3)], "b": [("c", 3)], "c": [("a", 1), ("b", 2)]}
    assert ways_to_try(BELLS, ["a", "b", "c"]) == {}


def test_what_is_closed_is_told_with_host_and_port() -> None:
    blocked = [Blocked(start="a", end="b", port=number, why="no answer") for number in range(6)]
    assert no_way(blocked[:1]).why == "from a to b port 0: no answer"
    assert no_way(blocked).why.endswith("from a to b port 3: no answer; and 2 more")


def test_a_bell_may_be_rung_as_often_as_one_likes() -> None:
    with closing(Bell()) as bell:
        for _ in range(3):
            assert try_places([("127.0.0.1", bell.port)] * 60) == {}
            bell.silence()
    assert "refused" in try_places([("127.0.0.1", bell.port)])["127.0.0.1", bell.port]


def test_places_that_are_none_are_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
        assert list(try_places([("127.0.0.1", port), ("no-such-host.invalid", 80)])) == [("no-such-host.invalid", 80)]
