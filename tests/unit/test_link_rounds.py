"""Links between machines: who measures with whom, and what is said of it. The measuring itself goes over loopback."""

import itertools
import socket
import threading

from hypothesis import given
from hypothesis import strategies as st

from shoal.cluster.links import LINKS, Link, encode, plan_rounds, read_links, slowest, table, tell_last, tell_slowest
from shoal.cluster.measuring import End, _answer, measure_link

FAST = Link(first="anna", second="bert", latency_seconds=2e-4, forward=1.2e8, backward=1.1e8)
SLOW = Link(first="anna", second="carl", latency_seconds=9e-4, forward=1.2e8, backward=1.2e7)
BROKEN = Link(first="bert", second="carl", problem="no answer within 5 s (from 10.0.0.2 to 10.0.0.3, TCP port 7)")


@given(st.integers(0, 12))
def test_every_pair_is_measured_once_and_nobody_is_in_two_at_a_time(count):
    names = [str(number) for number in range(count)]
    rounds = plan_rounds(names)
    pairs = [frozenset(pair) for pair in itertools.chain.from_iterable(rounds)]
    assert sorted(map(sorted, pairs)) == sorted(map(sorted, itertools.combinations(names, 2)))
    for each in rounds:
        busy = list(itertools.chain.from_iterable(each))
        assert len(busy) == len(set(busy))
    assert len(rounds) <= max(0, count - 1 + count % 2)


def test_the_slowest_link_is_named():
    assert slowest([]) is None
    assert slowest([FAST, SLOW]) is SLOW
    assert slowest([FAST, SLOW, BROKEN]) is BROKEN
    assert tell_slowest([FAST, SLOW]) == "the slowest link is between anna and carl: 96 Mbit/s, 0.90 ms"
    assert "no way between bert and carl: no answer" in tell_slowest([FAST, BROKEN])
    assert "one machine" in tell_slowest([])


def test_links_are_shown_the_slowest_first():
    shown = table([FAST, SLOW]).splitlines()
    assert shown[1].split() == ["anna", "carl", "0.90", "ms", "960", "Mbit/s", "96", "Mbit/s"]
    assert "880 Mbit/s" in shown[2]


def test_what_was_measured_is_kept_with_its_time(tmp_path):
    assert read_links(str(tmp_path)) is None
    (tmp_path / LINKS).write_text(encode([FAST, BROKEN], 1000.0))
    assert read_links(str(tmp_path)) == ([FAST, BROKEN], 1000.0)
    assert tell_last([FAST], 1000.0, 1065.0).startswith("links, 1:05 ago: the slowest link")
    (tmp_path / LINKS).write_text("{")
    assert read_links(str(tmp_path)) is None


def test_a_link_is_measured_over_loopback():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)
        port = listener.getsockname()[1]
        thread = threading.Thread(target=_answer, args=(listener, b"token"))
        thread.start()
        with socket.create_connection(("127.0.0.1", port), 20) as stranger:
            stranger.sendall(b"nokenp")
            assert stranger.recv(1) == b""
        found = measure_link("127.0.0.1", port, b"token")
        thread.join(30)
    assert 0 < found["latency_seconds"] < 5
    assert found["forward"] > 1e5
    assert found["backward"] > 1e5


def test_what_is_in_the_way_is_part_of_the_answer():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert "refused" in End("127.0.0.1").call("127.0.0.1", port, "token")["problem"].lower()
