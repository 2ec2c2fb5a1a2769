"""Whoever calls a launcher, and whatever they say: the run goes on, and answers those it should."""

import contextlib
import json
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from shoal.engine import requests
from shoal.engine.requests import MAX_CALLERS, RequestSocket, ask, socket_name
from shoal.spec.errors import UserError


def echo(request: Mapping[str, Any]) -> Mapping[str, Any]:
    if "refuse" in request:
        raise UserError("No.", why="because", hint="do not ask")
    return {"heard": dict(request)}


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Path]:
    """A thread that looks at its callers as a launcher does."""
    over = threading.Event()
    with RequestSocket(str(tmp_path)) as listener:
        assert listener.problem == ""

        def look() -> None:
            while not over.wait(0.005):
                listener.look(echo)

        thread = threading.Thread(target=look)
        thread.start()
        yield tmp_path
        over.set()
        thread.join()


def call(folder: Path) -> socket.socket:
    caller = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    caller.settimeout(20)
    caller.connect(socket_name(str(folder), (folder / "socket").read_text()))
    return caller


def test_an_answer(launcher: Path) -> None:
    assert ask(str(launcher), {"verb": "x", "n": 1}) == {"heard": {"verb": "x", "n": 1}}


def test_a_refusal_is_raised_as_it_was(launcher: Path) -> None:
    with pytest.raises(UserError) as caught:
        ask(str(launcher), {"refuse": 1})
    assert (caught.value.message, caught.value.why, caught.value.hint) == ("No.", "because", "do not ask")


def test_the_word_is_for_its_owner_only_and_does_not_stay(tmp_path: Path) -> None:
    (tmp_path / "socket").write_text("left by another")
    (tmp_path / "socket").chmod(0o644)
    with RequestSocket(str(tmp_path)):
        assert stat.S_IMODE((tmp_path / "socket").stat().st_mode) == 0o600
        assert (tmp_path / "socket").read_text() != "left by another"
    assert not (tmp_path / "socket").exists()


def test_a_copied_run_folder_leads_nowhere(launcher: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    copy = tmp_path_factory.mktemp("copy")
    (copy / "socket").write_text((launcher / "socket").read_text())
    with pytest.raises(UserError, match="cannot be asked"):
        ask(str(copy), {})


def test_other_users_are_not_answered(launcher: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "_user_of", lambda caller: os.geteuid() + 12345)
    with pytest.raises(UserError, match="cannot be asked"):
        ask(str(launcher), {})


@pytest.mark.parametrize(
    "said",
    [b"\n", b"{\n", b"[1]\n", b"null\n", b"\xff\xfe\n", b"[" * 2000 + b"\n", b'{"a": 1e999}\n', b"\0" * 100 + b"\n"],
)
def test_nonsense_is_answered_politely(launcher: Path, said: bytes) -> None:
    with call(launcher) as caller:
        caller.sendall(said)
        reply = json.loads(caller.makefile().readline())
    assert set(reply) <= {"error", "answer"}
    assert ask(str(launcher), {"still": "there"})


@pytest.mark.parametrize("said", [b"", b"no newline", b"x" * 100_000])
def test_who_sends_no_line_is_left(launcher: Path, said: bytes) -> None:
    with call(launcher) as caller, contextlib.suppress(OSError):
        caller.sendall(said)
        caller.shutdown(socket.SHUT_WR)
        assert caller.recv(10) == b""
    assert ask(str(launcher), {"still": "there"})


def test_silent_callers_do_not_keep_others_out(launcher: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "CALLER_SECONDS", 0.2)
    silent = [call(launcher) for _ in range(2 * MAX_CALLERS)]
    deadline = time.monotonic() + 20
    while True:
        try:
            assert ask(str(launcher), {"still": "there"})
            break
        except UserError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    for caller in silent:
        caller.close()


def test_who_does_not_wait_for_the_answer(launcher: Path) -> None:
    for _ in range(20):
        with call(launcher) as caller:
            caller.sendall(b"{}\n")
    assert ask(str(launcher), {"still": "there"})


def test_a_run_without_a_launcher(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be asked") as caught:
        ask(str(tmp_path), {})
    assert caught.value.hint


def test_a_launcher_that_is_paused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "ANSWER_SECONDS", 0.1)
    with RequestSocket(str(tmp_path)), pytest.raises(UserError) as caught:
        ask(str(tmp_path), {})
    assert "did not answer" in caught.value.why
    assert "fg" in caught.value.hint


def test_a_folder_that_takes_no_file(tmp_path: Path) -> None:
    with RequestSocket(str(tmp_path / "nothing")) as listener:
        assert "No such file" in listener.problem
        listener.look(echo)


def test_no_descriptor_is_left(tmp_path: Path) -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = count()
    with RequestSocket(str(tmp_path)) as listener:
        caller = call(tmp_path)
        listener.look(echo)
    caller.close()
    assert count() == before
