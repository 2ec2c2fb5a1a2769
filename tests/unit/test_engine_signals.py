import os
import signal
import threading
from collections.abc import Iterator

import pytest

from shoal.engine.signals import StopSignals


@pytest.fixture
def stops() -> Iterator[StopSignals]:
    with StopSignals() as stops:
        yield stops


def test_a_request_is_seen_and_wakes(stops: StopSignals) -> None:
    assert stops.requested is None
    signal.raise_signal(signal.SIGTERM)
    assert stops.requested is signal.SIGTERM
    stops.acknowledge()


def test_a_second_one_counts_unless_it_comes_at_once(stops: StopSignals, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    stops.on_second = lambda: seen.append(1)
    signal.raise_signal(signal.SIGHUP)
    signal.raise_signal(signal.SIGHUP)
    assert seen == []
    monkeypatch.setattr("shoal.engine.signals.SAME_SECONDS", -1.0)
    signal.raise_signal(signal.SIGINT)
    assert seen == [1]
    assert stops.requested is signal.SIGHUP


def test_what_hangs_is_given_up(stops: StopSignals) -> None:
    reader, writer = os.pipe()
    signal.raise_signal(signal.SIGINT)
    # Reading a pipe into which nobody writes would last forever.
    assert stops.attempt(os.read, reader, 1) is False
    assert stops.attempt(os.write, writer, b"x") is True
    os.close(reader)
    os.close(writer)


def test_other_errors_pass(stops: StopSignals) -> None:
    with pytest.raises(ZeroDivisionError):
        stops.attempt(divmod, 1, 0)


def test_handlers_of_before_come_back() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}
    with StopSignals():
        assert signal.getsignal(signal.SIGTERM) != before[signal.SIGTERM]
        signal.raise_signal(signal.SIGTERM)
    assert {number: signal.getsignal(number) for number in before} == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_ignored_signals_stay_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as stops:
            signal.raise_signal(signal.SIGHUP)
            assert stops.requested is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_outside_the_main_thread_nothing_is_caught() -> None:
    seen = []

    def enter() -> None:
        with StopSignals():
            seen.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [before]
