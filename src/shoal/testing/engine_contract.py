"""What every engine promises, as tests. Subclass it and give it a fixture `engine`.

    class TestLocalEngine(EngineContract):
        @pytest.fixture
        def engine(self):
            engine = LocalEngine()
            yield engine
            engine.stop(0.0)

The tests start small shell programs, so the machines of the engine need `/bin/sh` and see `tmp_path`.
"""

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from shoal.engine.engine import WORLD_FD, Engine
from shoal.spec.errors import UserError
from shoal.spec.job import WorkerExit, WorkerSpec

TIMEOUT_SECONDS = 20.0


def shell(tmp_path: Path, rank: int, program: str, **env: str) -> WorkerSpec:
    """A worker that runs a shell program, which reads what it is told from `/dev/fd/$1`."""
    return WorkerSpec(
        rank=rank,
        command=("/bin/sh", "-c", program, "sh", WORLD_FD),
        env={"PATH": os.defpath, "RANK": str(rank), **env},
        working_dir=str(tmp_path),
        log_path=str(tmp_path / f"{rank}.log"),
    )


def wait_for_exits(engine: Engine, count: int) -> list[WorkerExit]:
    """Poll until that many workers have ended, in the order of their ranks."""
    exits: list[WorkerExit] = []
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while len(exits) < count and time.monotonic() < deadline:
        exits.extend(engine.poll(0.1))
    assert len(exits) == count
    return sorted(exits, key=lambda end: end.rank)


def wait_for_file(path: Path) -> str:
    """What a worker wrote into a file, once it has written a whole line."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        if path.exists() and (text := path.read_text()).endswith("\n"):
            return text
        time.sleep(0.005)
    raise AssertionError(f"{path} was not written")


def codes(exits: Sequence[WorkerExit]) -> list[int]:
    return [end.code for end in exits]


class EngineContract:
    """Run by pytest in a subclass."""

    def test_every_exit_is_reported_once(self, engine: Engine, tmp_path: Path) -> None:
        engine.start([shell(tmp_path, 0, "exit 0"), shell(tmp_path, 1, "exit 3")])
        exits = wait_for_exits(engine, 2)
        assert [end.rank for end in exits] == [0, 1]
        assert codes(exits) == [0, 3]
        assert all(abs(end.time - time.time()) < TIMEOUT_SECONDS for end in exits)
        assert list(engine.poll()) == []

    def test_a_death_by_signal_is_its_number_below_zero(self, engine: Engine, tmp_path: Path) -> None:
        engine.start([shell(tmp_path, 0, "kill -KILL $$"), shell(tmp_path, 1, "kill -SEGV $$")])
        assert codes(wait_for_exits(engine, 2)) == [-signal.SIGKILL, -signal.SIGSEGV]

    def test_a_worker_gets_its_environment_and_folder(self, engine: Engine, tmp_path: Path) -> None:
        engine.start([shell(tmp_path, 0, 'echo "$GREETING $RANK $HOME."; pwd', GREETING="hello there")])
        wait_for_exits(engine, 1)
        assert (tmp_path / "0.log").read_text() == f"hello there 0 .\n{tmp_path.resolve()}\n"

    def test_the_log_has_both_streams_and_the_last_words(self, engine: Engine, tmp_path: Path) -> None:
        engine.start([shell(tmp_path, 0, "echo out; echo err >&2; printf 'no newline'")])
        wait_for_exits(engine, 1)
        assert (tmp_path / "0.log").read_text() == "out\nerr\nno newline"

    def test_a_log_that_is_there_already_is_kept(self, engine: Engine, tmp_path: Path) -> None:
        (tmp_path / "0.log").write_text("before\n")
        engine.start([shell(tmp_path, 0, "echo after")])
        wait_for_exits(engine, 1)
        assert (tmp_path / "0.log").read_text() == "before\nafter\n"

    def test_poll_without_a_timeout_returns_at_once(self, engine: Engine, tmp_path: Path) -> None:
        engine.start([shell(tmp_path, 0, "sleep 30")])
        started = time.monotonic()
        assert list(engine.poll()) == []
        assert time.monotonic() - started < 10.0

    def test_stop_ends_everyone_and_poll_says_how(self, engine: Engine, tmp_path: Path) -> None:
        engine.start([shell(tmp_path, rank, f"echo up > up{rank}; exec sleep 30") for rank in range(2)])
        for rank in range(2):
            wait_for_file(tmp_path / f"up{rank}")
        started = time.monotonic()
        engine.stop(60.0)
        assert time.monotonic() - started < 10.0
        assert codes(wait_for_exits(engine, 2)) == [-signal.SIGTERM, -signal.SIGTERM]

    def test_a_worker_may_use_its_grace(self, engine: Engine, tmp_path: Path) -> None:
        program = "trap 'echo saved; exit 7' TERM; echo up > up; while :; do sleep 0.02; done"
        engine.start([shell(tmp_path, 0, program)])
        wait_for_file(tmp_path / "up")
        engine.stop(30.0)
        assert codes(wait_for_exits(engine, 1)) == [7]
        assert "saved" in (tmp_path / "0.log").read_text()

    def test_a_worker_that_does_not_end_is_killed(self, engine: Engine, tmp_path: Path) -> None:
        program = "trap '' TERM; echo up > up; while :; do sleep 0.02; done"
        engine.start([shell(tmp_path, 0, program)])
        wait_for_file(tmp_path / "up")
        started = time.monotonic()
        engine.stop(0.3)
        assert time.monotonic() - started < 10.0
        assert codes(wait_for_exits(engine, 1)) == [-signal.SIGKILL]

    def test_what_a_worker_started_ends_too(self, engine: Engine, tmp_path: Path) -> None:
        # The child writes as long as it lives.
        child = "trap '' TERM; while :; do echo alive >> beats; sleep 0.02; done"
        engine.start([shell(tmp_path, 0, f"({child}) & wait")])
        wait_for_file(tmp_path / "beats")
        engine.stop(0.1)
        before = (tmp_path / "beats").stat().st_size
        time.sleep(0.1)
        assert (tmp_path / "beats").stat().st_size == before

    def test_stop_may_be_called_any_time(self, engine: Engine, tmp_path: Path) -> None:
        engine.stop(0.0)
        engine.start([shell(tmp_path, 0, "sleep 30")])
        engine.stop(0.0)
        engine.stop(0.0)
        assert len(wait_for_exits(engine, 1)) == 1

    def test_a_command_that_is_not_there_is_the_users_mistake(self, engine: Engine, tmp_path: Path) -> None:
        missing = WorkerSpec(
            rank=1,
            command=(str(tmp_path / "nothing"),),
            env={},
            working_dir=str(tmp_path),
            log_path=str(tmp_path / "1.log"),
        )
        with pytest.raises(UserError) as caught:
            engine.start([shell(tmp_path, 0, "sleep 30"), missing])
        assert "Worker 1" in caught.value.message
        assert str(tmp_path / "nothing") in caught.value.why

    def test_more_workers_may_be_started_while_it_runs(self, engine: Engine, tmp_path: Path) -> None:
        engine.start([shell(tmp_path, 0, "while [ ! -e go ]; do sleep 0.02; done")])
        engine.start([shell(tmp_path, 1, "exit 3"), shell(tmp_path, 2, "exit 4")])
        assert [(end.rank, end.code) for end in wait_for_exits(engine, 2)] == [(1, 3), (2, 4)]
        (tmp_path / "go").touch()
        assert codes(wait_for_exits(engine, 1)) == [0]

    def test_a_worker_that_ended_may_be_replaced(self, engine: Engine, tmp_path: Path) -> None:
        engine.start([shell(tmp_path, 0, "echo first; exit 1"), shell(tmp_path, 1, "sleep 30")])
        assert codes(wait_for_exits(engine, 1)) == [1]
        engine.start([shell(tmp_path, 0, "echo second; exit 2")])
        assert codes(wait_for_exits(engine, 1)) == [2]
        assert (tmp_path / "0.log").read_text() == "first\nsecond\n"

    def test_one_that_cannot_be_started_does_not_harm_those_that_run(self, engine: Engine, tmp_path: Path) -> None:
        engine.start([shell(tmp_path, 0, "while [ ! -e go ]; do sleep 0.02; done; exit 5")])
        missing = WorkerSpec(
            rank=1, command=(str(tmp_path / "nothing"),), env={}, working_dir=".", log_path=str(tmp_path / "1.log")
        )
        with pytest.raises(UserError):
            engine.start([missing])
        (tmp_path / "go").touch()
        assert codes(wait_for_exits(engine, 1)) == [5]

    def test_one_worker_is_killed_and_the_others_live(self, engine: Engine, tmp_path: Path) -> None:
        child = "trap '' TERM; while :; do echo alive >> beats$RANK; sleep 0.02; done"
        engine.start([shell(tmp_path, rank, f"({child}) & wait") for rank in range(2)])
        for rank in range(2):
            wait_for_file(tmp_path / f"beats{rank}")
        assert engine.kill(1)
        assert [(end.rank, end.code) for end in wait_for_exits(engine, 1)] == [(1, -signal.SIGKILL)]
        assert not engine.kill(1)
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline:
            engine.poll(0.05)
        lives, ended = [(tmp_path / f"beats{rank}").stat().st_size for rank in range(2)]
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while (tmp_path / "beats0").stat().st_size < lives + 20:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert (tmp_path / "beats1").stat().st_size == ended, "what the worker started lives on"

    def test_a_stopped_worker_can_be_killed(self, engine: Engine, tmp_path: Path) -> None:
        engine.start([shell(tmp_path, 0, "echo $$ > pid; sleep 30")])
        os.kill(int(wait_for_file(tmp_path / "pid")), signal.SIGSTOP)
        engine.kill(0)
        assert codes(wait_for_exits(engine, 1)) == [-signal.SIGKILL]

    def test_a_worker_is_told_lines_in_order(self, engine: Engine, tmp_path: Path) -> None:
        engine.start([shell(tmp_path, 0, "exec 4</dev/fd/$1; read a <&4; read b <&4; echo $b $a")])
        assert engine.tell(0, b"one")
        assert engine.tell(0, b"two")
        wait_for_exits(engine, 1)
        assert (tmp_path / "0.log").read_text() == "two one\n"
        assert not engine.tell(0, b"three")
        assert not engine.tell(7, b"nobody")

    def test_a_long_line_arrives_whole(self, engine: Engine, tmp_path: Path) -> None:
        engine.start([shell(tmp_path, 0, "sleep 0.2; head -n 1 /dev/fd/$1 | wc -c")])
        assert engine.tell(0, b"x" * 1_000_000)
        wait_for_exits(engine, 1)
        assert int((tmp_path / "0.log").read_text()) == 1_000_001

    def test_a_worker_that_never_reads_blocks_nobody(self, engine: Engine, tmp_path: Path) -> None:
        engine.start([shell(tmp_path, 0, "sleep 30"), shell(tmp_path, 1, "head -n 1 /dev/fd/$1")])
        started = time.monotonic()
        told = 0
        while engine.tell(0, b"x" * 100_000) and told < 10_000:
            told += 1
        assert told < 10_000, "what is not read is kept without a bound"
        assert engine.tell(1, b"hello")
        wait_for_exits(engine, 1)
        assert time.monotonic() - started < 20.0
        assert (tmp_path / "1.log").read_text() == "hello\n"
