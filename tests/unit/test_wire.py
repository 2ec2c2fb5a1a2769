"""The connection of a launcher and an agent, attacked: socket pairs stand for the network."""

import contextlib
import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.engine.wire import (
    _HEAD,
    _HELLO,
    CODE_BYTES,
    MAX_FRAME_BYTES,
    Greeting,
    Invitation,
    Line,
    Refused,
    call_launcher,
)

UP, DOWN = b"u" * 32, b"d" * 32
TOKEN = "a token"


@contextlib.contextmanager
def lines() -> Iterator[tuple[Line, Line, socket.socket, socket.socket]]:
    """An agent's line and the launcher's, with nothing between them: what one sends is moved by `pass_on`."""
    ours, network = socket.socketpair()
    other, theirs = socket.socketpair()
    network.setblocking(False)
    agent, launcher = Line(ours, UP, DOWN), Line(theirs, DOWN, UP)
    try:
        yield agent, launcher, network, other
    finally:
        for each in (agent, launcher, network, other):
            each.close()


def frames_of(messages: list[list[Any]]) -> list[bytes]:
    """What an agent sends for these messages, frame by frame."""
    with lines() as (agent, _, network, _):
        frames = []
        for message in messages:
            agent.put(message)
            assert not agent.flush()
            frames.append(network.recv(1 << 20))
        return frames


def heard(*pieces: bytes) -> list[list[Any]]:
    """What a launcher takes out of these bytes, which arrive one piece after the other."""
    with lines() as (_, launcher, _, other):
        messages = []
        for piece in pieces:
            other.sendall(piece)
            messages += launcher.receive()
        return messages


MESSAGES = [["exit", 0, -9], ["output", 1, b"\x00\xff"], ["beat"], ["control", 2, b"{}"]]


def test_messages_arrive_as_they_were_sent() -> None:
    assert heard(*frames_of(MESSAGES)) == MESSAGES


@given(cuts=st.lists(st.integers(0, 200)))
def test_frames_may_be_cut_anywhere(cuts: list[int]) -> None:
    data = b"".join(frames_of(MESSAGES))
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [data[begin:end] for begin, end in itertools.pairwise(places) if begin < end]
    assert heard(*pieces) == MESSAGES


@given(place=st.integers(0, 10_000), value=st.integers(1, 255))
def test_one_changed_byte_is_noticed(place: int, value: int) -> None:
    """Wherever it is. One in the length may make the frame longer: then nothing of it is believed."""
    data = bytearray(b"".join(frames_of(MESSAGES)))
    data[place % len(data)] ^= value
    with contextlib.suppress(Refused):
        messages = heard(bytes(data))
        assert messages == MESSAGES[: len(messages)]
        assert len(messages) < len(MESSAGES)


def test_a_repeated_frame_is_refused() -> None:
    first, *_ = frames_of(MESSAGES)
    with pytest.raises(Refused, match="did not send"):
        heard(first, first)


def test_frames_in_another_order_are_refused() -> None:
    first, second, *_ = frames_of(MESSAGES)
    with pytest.raises(Refused):
        heard(second, first)


def test_a_frame_that_was_left_out_is_noticed() -> None:
    first, _, third, _ = frames_of(MESSAGES)
    with pytest.raises(Refused):
        heard(first, third)


def test_a_frame_sent_back_to_its_sender_is_refused() -> None:
    frame = frames_of([["kill", 0]])[0]
    with lines() as (agent, _, network, _):
        network.sendall(frame)
        with pytest.raises(Refused):
            agent.receive()


def test_a_frame_of_another_connection_is_refused() -> None:
    """Every connection has keys of its own."""
    with greeted() as (agent, launcher):
        frame = frames_of([["exit", 0, 0]])[0]
        agent._socket.send(frame)
        with pytest.raises(Refused):
            wait_for_messages(launcher)


def test_too_large_a_frame_is_refused_before_it_has_come() -> None:
    with pytest.raises(Refused, match="bytes"):
        heard(_HEAD.pack(MAX_FRAME_BYTES + 1) + bytes(CODE_BYTES))


def test_one_look_takes_a_bounded_part_of_what_is_there() -> None:
    """A machine that sends without end keeps nobody else waiting, and fills no memory."""
    with lines() as (_, launcher, _, other):
        stop = threading.Event()
        frames = frames_of([["output", 0, bytes(50_000)]] * 100)

        def send() -> None:
            for frame in frames:
                other.sendall(frame)
            stop.set()

        threading.Thread(target=send).start()
        num_messages = 0
        while num_messages < 100:
            messages = launcher.receive()
            assert len(messages) < 20
            num_messages += len(messages)
        assert stop.wait(10)


def test_the_end_comes_after_the_last_message() -> None:
    with lines() as (_, launcher, _, other):
        other.sendall(b"".join(frames_of(MESSAGES)))
        other.shutdown(socket.SHUT_WR)
        assert launcher.receive() == MESSAGES
        with pytest.raises(EOFError):
            launcher.receive()


def test_a_slow_network_keeps_messages_in_order() -> None:
    with lines() as (agent, launcher, network, other):
        sent = [["output", number, bytes(30_000)] for number in range(100)]
        for message in sent:
            agent.put(message)
        assert agent.num_waiting_bytes >= 3_000_000
        got: list[list[Any]] = []
        while len(got) < len(sent):
            agent.flush()
            with contextlib.suppress(BlockingIOError):
                other.sendall(network.recv(5_000))
            got += launcher.receive()
        assert got == sent
        assert agent.num_waiting_bytes == 0


def test_signals_and_threads_may_send_in_the_middle_of_sending() -> None:
    """Ctrl-Z and a second Ctrl-C send from within a signal handler, a thread sends beats: no frame is spoilt."""
    with lines() as (agent, launcher, network, other):
        num_signals = 0

        def interrupt(*_: object) -> None:
            nonlocal num_signals
            num_signals += 1
            agent.put(["signal", 19, None])
            agent.flush()

        def beat() -> None:
            while not is_over.is_set():
                agent.put(["beat"])
                agent.flush()

        is_over, got = threading.Event(), []

        def carry() -> None:
            network.setblocking(True)
            network.settimeout(0.5)
            with contextlib.suppress(TimeoutError):
                while data := network.recv(1 << 16):
                    other.sendall(data)
                    got.extend(message[0] for message in launcher.receive())

        before = signal.signal(signal.SIGALRM, interrupt)
        threads = [threading.Thread(target=beat), threading.Thread(target=carry)]
        for thread in threads:
            thread.start()
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
        deadline, num_told = time.monotonic() + 30.0, 0
        try:
            while (num_signals < 100 or num_told < 1000) and time.monotonic() < deadline:
                agent.put(["tell", 0, b"x" * 100])
                agent.flush()
                num_told += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            is_over.set()
            threads[0].join()
        while agent.flush():
            time.sleep(0.001)
        threads[1].join()
        assert got.count("tell") == num_told >= 1000
        assert got.count("signal") == num_signals >= 100


# Handshakes.


@contextlib.contextmanager
def door() -> Iterator[tuple[socket.socket, Invitation]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(20)
        yield server, Invitation(host="127.0.0.1", port=server.getsockname()[1], token=TOKEN)


class Launcher(threading.Thread):
    """Greets one who comes, with the token that it knows."""

    def __init__(self, server: socket.socket, token: str) -> None:
        super().__init__()
        self.server, self.token = server, token
        self.line: Line | None = None
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        greeting = Greeting(self.server.accept()[0], self.token)
        deadline = time.monotonic() + 20
        try:
            while self.line is None and time.monotonic() < deadline:
                self.line = greeting.step()
                time.sleep(0.001)
        except (Refused, EOFError, OSError) as error:
            self.error = error
            greeting.socket.close()


@contextlib.contextmanager
def greeted() -> Iterator[tuple[Line, Line]]:
    with door() as (server, invitation):
        launcher = Launcher(server, TOKEN)
        agent = call_launcher(invitation)
        launcher.join(20)
        assert launcher.line is not None
        yield agent, launcher.line
        agent.close()
        launcher.line.close()


def wait_for_messages(line: Line) -> list[list[Any]]:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if messages := line.receive():
            return messages
        time.sleep(0.001)
    raise AssertionError("nothing came")


def test_both_sides_speak_once_they_have_met() -> None:
    with greeted() as (agent, launcher):
        agent.put(["hello", {}])
        launcher.put(["start", 1])
        assert not agent.flush()
        assert not launcher.flush()
        assert wait_for_messages(launcher) == [["hello", {}]]
        assert wait_for_messages(agent) == [["start", 1]]
        assert agent.address == launcher.peer_address == "127.0.0.1"


def test_an_agent_with_another_token_is_refused_and_told_nothing() -> None:
    with door() as (server, invitation):
        launcher = Launcher(server, "another token")
        with pytest.raises(Refused, match="token"):
            call_launcher(invitation)
        launcher.join(20)
        assert isinstance(launcher.error, Refused)
        assert "token" in str(launcher.error)


def fake_launcher(server: socket.socket, *answers: bytes) -> threading.Thread:
    """Says what it was told to say, one thing after each that it hears."""

    def run() -> None:
        connection = server.accept()[0]
        with connection:
            for number, answer in enumerate(answers):
                if number:
                    connection.recv(1 << 16)
                connection.sendall(answer)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_an_agent_does_not_serve_a_launcher_without_the_token() -> None:
    with door() as (server, invitation):
        thread = fake_launcher(server, _HELLO + os.urandom(32), os.urandom(32))
        with pytest.raises(Refused, match="does not know the token"):
            call_launcher(invitation)
        thread.join(20)


@pytest.mark.parametrize(
    "hello", [b"shoal-agent-9\n" + bytes(32), b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(64), bytes(64)]
)
def test_an_agent_knows_that_it_has_called_somebody_else(hello: bytes) -> None:
    with door() as (server, invitation):
        thread = fake_launcher(server, hello)
        with pytest.raises(Refused, match="no launcher of this version"):
            call_launcher(invitation)
        thread.join(20)


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n", b"shoal-agent-9\n" + bytes(64), b"\x00"])
def test_a_launcher_refuses_what_is_no_agent_at_the_first_wrong_byte(said: bytes) -> None:
    with door() as (server, _), socket.create_connection(server.getsockname()) as stranger:
        greeting = Greeting(server.accept()[0], TOKEN)
        assert greeting.step() is None
        stranger.sendall(said)
        with pytest.raises(Refused, match="version"):
            step_until_heard(greeting)
        greeting.socket.close()


def step_until_heard(greeting: Greeting) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        assert greeting.step() is None
        time.sleep(0.001)


def test_a_launcher_does_not_believe_its_own_words_sent_back() -> None:
    with door() as (server, _), socket.create_connection(server.getsockname()) as stranger:
        greeting = Greeting(server.accept()[0], TOKEN)
        hello = stranger.recv(1 << 16)
        stranger.sendall(hello + bytes(32))
        with pytest.raises(Refused, match="token"):
            step_until_heard(greeting)
        greeting.socket.close()


def test_an_agent_does_not_wait_for_a_launcher_that_dawdles() -> None:
    """A byte now and then does not keep it for longer than the whole may take."""
    with door() as (server, invitation):

        def dawdle() -> None:
            with contextlib.suppress(OSError), server.accept()[0] as connection:
                for byte in _HELLO + bytes(32):
                    connection.sendall(bytes([byte]))
                    time.sleep(0.1)

        thread = threading.Thread(target=dawdle)
        thread.start()
        with pytest.raises(OSError, match="timed out"):
            call_launcher(invitation, timeout_seconds=0.5)
        thread.join(20)


def test_nobody_listens_there() -> None:
    with door() as (_, invitation):
        pass
    with pytest.raises(OSError, match="refused"):
        call_launcher(replace(invitation))


def test_every_run_has_a_token_of_its_own() -> None:
    first, second = (Invitation.new("h", 1) for _ in range(2))
    assert first.token != second.token
    assert len(first.token) == 64
