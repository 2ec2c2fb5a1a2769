"""The recorder: what the training loop says reaches folder, launcher and terminal, and never stops the loop."""

import contextlib
import io
import math
import os
import sys
import threading

import pytest
from observing import Clock, make_step, make_steps

from shoal.observe import journal, metrics
from shoal.observe.console import Console
from shoal.observe.control import ControlPipe
from shoal.observe.pace import Pace
from shoal.observe.recorder import PROGRESS_SECONDS, PoliteStream, Recorder, guard_streams, release_streams


@pytest.fixture
def pipe():
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    yield read_fd, write_fd
    os.close(read_fd)
    with contextlib.suppress(OSError):
        os.close(write_fd)


def received(read_fd):
    data = b""
    try:
        while chunk := os.read(read_fd, 1 << 16):
            data += chunk
    except BlockingIOError:
        pass
    return [journal.decode(line) for line in data.splitlines()]


class TestRecorder:
    def test_events_and_steps_reach_the_folder(self, tmp_path):
        with Recorder(str(tmp_path), 1, 2, generation=3) as recorder:
            recorder.event("checkpoint", step=5, path="x")
            for step in make_steps(4):
                recorder.step(step, num_steps=4)
        (found,) = journal.read(str(tmp_path / "journal.jsonl"))
        assert [found.kind, found.rank, found.step, found.generation, found.data] == [
            "checkpoint",
            1,
            5,
            3,
            {"path": "x"},
        ]
        assert metrics.read(str(tmp_path)) == {1: make_steps(4)}

    def test_progress_reaches_the_launcher_at_a_bounded_rate(self, pipe):
        read_fd, write_fd = pipe
        clock = Clock()
        recorder = Recorder(None, 0, 2, write_fd, clock=clock)
        for step in make_steps(500):
            clock.now += 0.01
            recorder.step(step, num_steps=501)
        recorder.close()
        sent = received(read_fd)
        assert 5 / PROGRESS_SECONDS - 2 <= len(sent) <= 5 / PROGRESS_SECONDS + 2
        last = sent[-1].data
        assert {one.kind for one in sent} == {"progress"}
        assert [last["step"], last["num_steps"], last["workers"], last["eta_seconds"]] == [501, 501, 2, 0]
        assert last["samples_per_second"] == pytest.approx(6400, rel=0.01)
        assert last["compute"] == pytest.approx(0.8)

    def test_other_ranks_send_less(self, pipe):
        read_fd, write_fd = pipe
        clock = Clock()
        recorder = Recorder(None, 1, 64, write_fd, clock=clock)
        for step in make_steps(500):
            clock.now += 0.01
            recorder.step(step)
        recorder.close()
        assert 4 <= len(received(read_fd)) <= 7

    def test_a_worker_that_becomes_the_lead_speaks_up_at_once(self, pipe):
        read_fd, write_fd = pipe
        clock = Clock()
        recorder = Recorder(None, 1, 2, write_fd, clock=clock)
        recorder.step(make_step(1))
        recorder.enter(1, 1, is_lead=True)
        clock.now += PROGRESS_SECONDS + 0.01
        recorder.step(make_step(2))
        first, second = received(read_fd)
        assert [first.data["is_lead"], first.generation, first.data["workers"]] == [False, 0, 2]
        assert [second.data["is_lead"], second.generation, second.data["workers"]] == [True, 1, 1]
        recorder.close()

    def test_the_last_step_of_a_world_is_told_where_none_follows(self, pipe):
        read_fd, write_fd = pipe
        recorder = Recorder(None, 0, 2, write_fd, clock=Clock())
        for step in make_steps(2):
            recorder.step(step)
        recorder.enter(1, 1, is_lead=True)
        recorder.close()
        assert [(event.data["step"], event.generation) for event in received(read_fd)] == [(2, 0), (3, 0)]

    def test_a_loss_that_is_not_a_number_reaches_the_launcher(self, pipe):
        read_fd, write_fd = pipe
        recorder = Recorder(None, 0, 1, write_fd)
        recorder.step(make_step(loss=math.nan))
        recorder.close()
        assert received(read_fd)[0].data["loss"] == "nan"

    def test_a_full_pipe_drops_progress_and_blocks_nobody(self, pipe):
        read_fd, write_fd = pipe
        clock = Clock()
        recorder = Recorder(None, 0, 1, write_fd, clock=clock)
        for step in make_steps(2000):
            clock.now += 1.0
            recorder.step(step)
        sent = received(read_fd)
        assert 0 < len(sent) < 2000
        assert None not in sent
        recorder.close()

    def test_an_error_waits_for_room_and_arrives_whole(self, pipe):
        read_fd, write_fd = pipe
        recorder = Recorder(None, 0, 1, write_fd)
        filler = os.write(write_fd, b"x" * (1 << 16))
        got = bytearray()

        def drain():
            while not got.endswith(b"}\n"):
                with contextlib.suppress(BlockingIOError):
                    got.extend(os.read(read_fd, 4096))

        reader = threading.Thread(target=drain)
        reader.start()
        recorder.event("error", step=3, type="ValueError", message="m", traceback="line\n" * 20_000)
        reader.join()
        found = journal.decode(bytes(got[filler:]))
        assert found.data["traceback"] == "line\n" * 20_000
        assert [found.kind, found.step] == ["error", 3]
        recorder.close()

    def test_a_launcher_that_is_gone_is_ignored(self):
        read_fd, write_fd = os.pipe()
        os.close(read_fd)
        recorder = Recorder(None, 0, 1, write_fd)
        recorder.event("error", message="x")
        recorder.step(make_step())
        recorder.close()

    def test_a_descriptor_that_is_not_open_is_ignored(self):
        recorder = Recorder(None, 0, 1, 987)
        recorder.step(make_step())
        recorder.event("error", message="x")
        recorder.close()

    def test_the_pipe_is_not_passed_on_to_children(self, pipe):
        os.set_inheritable(pipe[1], True)
        control = ControlPipe(pipe[1])
        assert not os.get_inheritable(pipe[1])
        control.close()

    def test_a_stuck_launcher_loses_an_error_only_after_patience(self, pipe, monkeypatch):
        monkeypatch.setattr("shoal.observe.control.PATIENCE_SECONDS", 0.05)
        os.write(pipe[1], b"x" * (1 << 16))
        control = ControlPipe(pipe[1])
        assert not control.send(journal.Event(kind="error", time=0.0, data={"message": "x" * 5000}))
        control.close()

    def test_a_full_disk_is_said_once_and_stops_nothing(self, tmp_path, capsys):
        recorder = Recorder(str(tmp_path / "missing"), 1, 2)
        for step in make_steps(3):
            recorder.step(step)
            recorder.event("x")
        recorder.close()
        said = capsys.readouterr().err
        assert said.count("cannot write") == 2  # the journal, and the metrics
        assert "shoal:" in said

    def test_without_launcher_rank_zero_shows_progress(self, capsys):
        recorder = Recorder(None, 0, 1)
        recorder.step(make_step(6), num_steps=7)
        recorder.close()
        assert capsys.readouterr().err.startswith("step 7/7  epoch 1  loss 0.5000")

    def test_other_ranks_without_launcher_are_silent(self, capsys):
        with Recorder(None, 1, 2) as recorder:
            recorder.step(make_step())
        assert capsys.readouterr() == ("", "")

    def test_closing_twice_and_using_it_afterwards_is_harmless(self, tmp_path):
        recorder = Recorder(str(tmp_path), 1, 2)
        recorder.close()
        recorder.close()
        recorder.step(make_step())
        recorder.event("late")
        recorder.close()


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_own_prints_step_around_the_progress_line(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    recorder = Recorder(None, 0, 1)
    assert isinstance(sys.stdout, PoliteStream)
    recorder.step(make_step(1), num_steps=9)
    print("hello")
    sys.stdout.writelines(["a", "b\n"])
    assert sys.stdout.isatty()
    recorder.close()
    assert sys.stdout is sys.stderr is screen
    text = screen.getvalue()
    assert "\r\x1b[Khello\nab\n" in text
    assert text.endswith("\n")


def test_streams_that_someone_else_replaced_are_left_alone(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Terminal())
    console = Console(Terminal(), is_tty=True)
    guard_streams(console)
    mine = io.StringIO()
    monkeypatch.setattr(sys, "stdout", mine)
    release_streams()
    assert sys.stdout is mine


class TestPace:
    def test_the_first_step_does_not_count(self):
        pace = Pace(0.0)
        pace.add(make_step(1, compute=100.0), 100.0)
        assert "compute" not in pace.summarize(100.0, 10, 1)
        pace.add(make_step(2), 100.02)
        data = pace.summarize(100.02, 10, 1)
        assert data["compute"] == pytest.approx(0.8)
        assert data["samples_per_second"] == pytest.approx(3200)
        assert data["eta_seconds"] == pytest.approx(0.14, abs=0.05)

    def test_old_steps_fade(self):
        pace, now = Pace(0.0), 0.0
        for step in range(2000):
            now += 0.1 if step < 1000 else 0.01
            pace.add(make_step(step), now)
            pace.summarize(now, None, 1)
        slow_then_fast = pace.summarize(now, None, 1)["samples_per_second"]
        assert 3500 < slow_then_fast < 6400

    def test_without_steps_or_time_there_is_nothing_to_say(self):
        pace = Pace(0.0)
        assert pace.summarize(1.0, 10, 1) == {}
        pace.add(make_step(1), 1.0)
        pace.add(make_step(2), 1.0)
        assert pace.summarize(1.0, None, 1)["samples_per_second"] is None
