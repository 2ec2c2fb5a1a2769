import os
import signal
import threading
from collections.abc import Iterator

import pytest

from shoal.engine.signals import STOP_SIGNALS, StopSignals, holding_back_ctrl_c


@pytest.fixture(autouse=True)
def nothing_ignored() -> Iterator[None]:
    """Tests that run in the background, or under `nohup`, inherit some of them as ignored."""
    ignored = [number for number in STOP_SIGNALS if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


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
    monkeypatch.setattr("shoal.engine.signals.SAME_SECONDS", 1000.0)
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


def raise_interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.fixture
def interrupting() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, raise_interrupt)
    yield
    assert signal.getsignal(signal.SIGINT) is raise_interrupt, "as it was"
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupting")
def test_ctrl_c_that_is_held_back_comes_in_the_end() -> None:
    seen = []

    def work() -> None:
        for number in range(2):
            signal.raise_signal(signal.SIGINT)
            seen.append(number)

    with pytest.raises(KeyboardInterrupt), holding_back_ctrl_c():
        work()
    assert seen == [0, 1]
    with holding_back_ctrl_c():
        pass


@pytest.mark.usefixtures("interrupting")
def test_ctrl_c_that_is_held_back_comes_after_an_error_too() -> None:
    def fail() -> None:
        signal.raise_signal(signal.SIGINT)
        raise ValueError

    with pytest.raises(KeyboardInterrupt) as caught, holding_back_ctrl_c():
        fail()
    assert isinstance(caught.value.__context__, ValueError)


def test_ctrl_c_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with holding_back_ctrl_c():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
