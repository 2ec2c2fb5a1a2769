"""Elastic runs with real processes: the launcher replaces, tells, resizes and ends them. Their members are toys."""

import json
import os
import re
import signal
import subprocess
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import IN_TIME, Box, box

from shoal.engine.requests import ask
from shoal.observe import journal
from shoal.spec.event import Event

__all__ = ["box"]

TOY = Path(__file__).parent / "toy_member.py"


class Run:
    """An elastic run of toys, and what can be seen of it from outside."""

    def __init__(self, box: Box, size: str, *, spares: str = "0", before: str = "") -> None:
        self.box = box
        box.write("toy.py", textwrap.dedent(before) + TOY.read_text())
        self.launcher = box.start("run", "-n", size, "-o", f"engine.spares={spares}", "--name", "r", "toy.py")

    @property
    def folder(self) -> Path:
        return self.box.home / "runs" / "r"

    def events(self, kind: str) -> list[Event]:
        return [event for event in journal.read(str(self.folder / "journal.jsonl")) if event.kind == kind]

    def members(self) -> list[str]:
        worlds = self.events("world")
        return list(worlds[-1].data["members"]) if worlds else []

    def wait_for_members(self, *ids: str) -> None:
        self.box.wait_for(lambda: sorted(self.members()) == sorted(ids))
        # All have met when each has printed what was gathered.
        generation = self.events("world")[-1].data["generation"]
        for member in ids:
            log = self.folder / "logs" / f"{member.partition('.')[0]}.log"
            self.box.wait_for(lambda log=log: re.search(rf"world {generation}:.*\ngathered", log.read_text()))
        time.sleep(0.1)  # a beat from there

    def pid(self, rank: int) -> int:
        return int([event.data["pid"] for event in self.events("worker_started") if event.rank == rank][-1])

    def finish(self) -> tuple[str, str]:
        (self.box.folder / "finish").touch()
        return self.launcher.communicate(timeout=IN_TIME)

    def end(self) -> None:
        if self.launcher.poll() is None:
            self.launcher.kill()
            self.launcher.communicate()
            self.box.wait_for_peace()

    def facts(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "run.json").read_text()))


@pytest.fixture
def run(box: Box) -> Iterator[Run]:
    """Three of at least two."""
    run = Run(box, "2:3")
    try:
        run.wait_for_members("0.0", "1.0", "2.0")
        yield run
    finally:
        run.end()


def test_all_meet_and_end_well(run: Run) -> None:
    shown, told = run.finish()
    assert run.launcher.returncode == 0
    assert told == ""
    assert "[0-2] gathered [0, 1, 2]" in shown
    assert (run.facts()["status"], run.facts()["num_workers"]) == ("finished", 3)
    assert {event.data["code"] for event in run.events("worker_exited")} == {0}


def test_a_killed_worker_is_replaced_and_the_others_go_on(run: Run) -> None:
    others = [run.pid(0), run.pid(2)]
    os.kill(run.pid(1), signal.SIGKILL)
    run.wait_for_members("0.0", "2.0", "1.1")
    assert [run.pid(0), run.pid(2)] == others
    _, told = run.finish()
    assert run.launcher.returncode == 0
    assert told.splitlines() == [
        "shoal: lost rank 1 (killed by SIGKILL); going on with 2 workers",
        "shoal: rank 1 is back; 3 workers",
    ]
    worlds = [event.data["members"] for event in run.events("world")]
    assert worlds == [["0.0", "1.0", "2.0"], ["0.0", "2.0"], ["0.0", "2.0", "1.1"]]
    assert [event.rank for event in run.events("worker_lost")] == [1]
    assert [event.rank for event in run.events("worker_joined")] == [1]
    started = [event.data.get("incarnation", 0) for event in run.events("worker_started") if event.rank == 1]
    assert started == [0, 1]
    # One log for both of them.
    log = (run.folder / "logs" / "1.log").read_text()
    assert re.findall(r"world (\d+)", log) == ["0", "2"]


def test_many_losses_leave_nothing_behind(run: Run) -> None:
    descriptors = Path("/proc", str(run.launcher.pid), "fd")
    before = len(list(descriptors.iterdir()))
    for number in range(12):
        ask(str(run.folder), {"verb": "kill", "rank": number % 3, "signal": "KILL"})
        run.box.wait_for(lambda number=number: len(run.events("worker_joined")) > number)
        time.sleep(0.1)  # steps are made
    run.box.wait_for(lambda: len(list(descriptors.iterdir())) == before)
    run.finish()
    assert run.launcher.returncode == 0
    assert len(run.events("worker_lost")) == 12


def test_with_too_few_left_they_wait(box: Box) -> None:
    run = Run(box, "3:3")
    try:
        run.wait_for_members("0.0", "1.0", "2.0")
        os.kill(run.pid(0), signal.SIGKILL)
        run.wait_for_members("1.0", "2.0", "0.1")
        _, told = run.finish()
        assert told.splitlines() == [
            "shoal: lost rank 0 (killed by SIGKILL)",
            "shoal: 2 left and 3 needed; waiting for replacements",
            "shoal: rank 0 is back; 3 workers",
        ]
        assert [event.data["present"] for event in run.events("waiting_for_workers")] == [2]
    finally:
        run.end()


def test_survivors_know_soon(run: Run) -> None:
    """Before anybody is there to take the place of the dead."""
    os.kill(run.pid(2), signal.SIGKILL)
    killed = time.time()
    run.wait_for_members("0.0", "1.0", "2.1")
    second = run.events("world")[1]
    assert second.data["members"] == ["0.0", "1.0"]
    assert second.time - killed < 5.0
    (joined,) = run.events("worker_joined")
    assert second.time < joined.time


def test_a_frozen_worker_is_killed_and_replaced(run: Run) -> None:
    frozen = run.pid(0)
    time.sleep(1.0)  # the usual must be known before the unusual is
    os.kill(frozen, signal.SIGSTOP)
    run.box.wait_for(lambda: run.events("worker_frozen"))
    run.wait_for_members("1.0", "2.0", "0.1")
    _, told = run.finish()
    assert run.launcher.returncode == 0
    lines = [line for line in told.splitlines() if line.startswith("shoal: ")]
    assert re.match(r"shoal: rank 0 is frozen: no sign of life for \d+\.\d s", lines[0])
    assert "shoal: lost rank 0 (it is frozen); going on with 2 workers" in lines
    assert lines[-1] == "shoal: rank 0 is back; 3 workers"


def test_a_retryable_error_is_a_loss_like_any_other(run: Run) -> None:
    (run.box.folder / "retry-1").touch()
    run.wait_for_members("0.0", "2.0", "1.1")
    _, told = run.finish()
    assert run.launcher.returncode == 0
    assert "shoal: lost rank 1 (the server went away); going on with 2 workers" in told
    (error,) = run.events("error")
    assert error.data["is_retryable"] is True


def test_a_mistake_of_the_user_ends_the_run(run: Run) -> None:
    (run.box.folder / "raise-1").touch()
    _, told = run.launcher.communicate(timeout=IN_TIME)
    assert run.launcher.returncode == 1
    lines = told.splitlines()
    assert lines[0] == "error: ValueError: a mistake of the user"
    assert lines[1].startswith("   at: rank 1, toy.py:")
    assert lines[2] == " also: ranks 0, 2 stopped by shoal, because of this"
    assert run.facts()["status"] == "failed"


def test_a_loss_long_before_does_not_hide_the_mistake(run: Run) -> None:
    os.kill(run.pid(0), signal.SIGKILL)
    run.wait_for_members("1.0", "2.0", "0.1")
    (run.box.folder / "raise-2").touch()
    _, told = run.launcher.communicate(timeout=IN_TIME)
    assert run.launcher.returncode == 1
    assert "error: ValueError: a mistake of the user\n   at: rank 2" in told
    assert "SIGKILL." not in told


@pytest.mark.slow
def test_workers_that_die_again_and_again_end_the_run(box: Box) -> None:
    box.write("die.py", "import os, time\ntime.sleep(0.05)\nos.kill(os.getpid(), 9)")
    done = box.run("run", "-n", "1:1", "-o", "engine.spares=0", "die.py")
    assert done.returncode == 4
    assert "error: Workers were lost " in done.stderr
    assert "The worker was killed by SIGKILL." in done.stderr
    assert "   do: " in done.stderr
    assert box.facts()["status"] == "failed"


def test_a_worker_that_cannot_be_started_is_tried_again(run: Run) -> None:
    log = run.folder / "logs" / "1.log"
    log.unlink()
    log.mkdir()
    os.kill(run.pid(1), signal.SIGKILL)
    run.box.wait_for(lambda: len(run.events("worker_lost")) >= 2)
    assert run.members() == ["0.0", "2.0"]
    log.rmdir()
    run.box.wait_for(lambda: len(run.members()) == 3)
    _, told = run.finish()
    assert run.launcher.returncode == 0
    assert f"shoal: lost rank 1 (cannot be started: Is a directory: {log}); going on with 2 workers" in told
    assert told.endswith("shoal: rank 1 is back; 3 workers\n")


def test_a_replacement_ends_with_a_killed_launcher_too(box: Box) -> None:
    """Neither a signal nor the end of a pipe moves it."""
    source = """
        import os, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(f"up{os.environ['RANK']}.{os.environ['SHOAL_INCARNATION']}", "w").close()
        time.sleep(60)
    """
    box.write("stubborn.py", source)
    launcher = box.start("run", "-n", "1:2", "--name", "r", "stubborn.py")
    box.wait_for_files("up0.0", "up1.0")
    assert box.run("kill", "r", "--rank", "1").returncode == 0
    box.wait_for_files("up1.1")
    # Written down once the guard has heard of it.
    box.wait_for(lambda: [event["kind"] for event in box.events()].count("worker_started") == 3)
    launcher.kill()
    launcher.communicate()
    box.wait_for_peace()


def test_ctrl_c_ends_all_and_tells_them(run: Run) -> None:
    run.launcher.send_signal(signal.SIGINT)
    run.launcher.communicate(timeout=IN_TIME)
    assert run.launcher.returncode == 130
    assert run.facts()["status"] == "stopped"
    notes = [path.read_text() for path in run.box.folder.glob("note-*")]
    assert set(notes) <= {"stop SIGINT\n", ""}, "one may be ended before it has written it down"


def test_members_of_a_killed_launcher_may_save_before_they_end(box: Box) -> None:
    (box.folder / "grace").touch()
    run = Run(box, "2:3")
    run.wait_for_members("0.0", "1.0", "2.0")
    run.launcher.kill()
    run.launcher.communicate()
    box.wait_for_peace()
    for rank in range(3):
        assert (box.folder / f"note-{rank}.0").read_text().endswith("saved\n")


def test_members_see_that_the_launcher_is_gone(box: Box) -> None:
    """The pipe on which they are told ends; here they ignore the signal that says the same."""
    box.write("sitecustomize.py", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    box.env["PYTHONPATH"] = str(box.folder)
    run = Run(box, "2:2")
    run.wait_for_members("0.0", "1.0")
    run.launcher.kill()
    run.launcher.communicate()
    box.wait_for_peace()
    assert (box.folder / "note-0.0").read_text() == (box.folder / "note-1.0").read_text() == "orphaned\n"


def test_pausing_the_launcher_evicts_nobody(run: Run) -> None:
    run.launcher.send_signal(signal.SIGTSTP)
    time.sleep(2.0)
    run.launcher.send_signal(signal.SIGCONT)
    time.sleep(0.7)
    assert run.members() == ["0.0", "1.0", "2.0"]
    _, told = run.finish()
    assert (run.launcher.returncode, told) == (0, "")


# Resizing and killing by name.


def test_resize_down_and_up(run: Run) -> None:
    done = run.box.run("resize", "r", "-n", "2")
    assert done.stdout == "r: 3 -> 2 workers; those with the highest numbers leave after the step they are in\n"
    run.wait_for_members("0.0", "1.0")
    run.box.wait_for(lambda: any(event.rank == 2 for event in run.events("worker_exited")))
    run.box.wait_for(lambda: run.facts()["num_workers"] == 2)
    assert run.box.run("ps").stdout.splitlines()[1].split()[:5] == ["r", "running", "2", "of", "2:3"]
    grown = run.box.run("resize", "r", "-n", "3", "--json")
    assert json.loads(grown.stdout) == {"run": "r", "num_workers": 3, "before": 2}
    run.wait_for_members("0.0", "1.0", "2.1")
    _, told = run.finish()
    assert run.launcher.returncode == 0
    assert told == "shoal: rank 2 is back; 3 workers\n"
    assert [event.data["num_workers"] for event in run.events("resized")] == [2, 3]


def test_kill_by_name(run: Run) -> None:
    pid = run.pid(1)
    done = run.box.run("kill", "r", "--rank", "1")
    assert done.stdout == f"r: SIGKILL sent to rank 1, process {pid}\n"
    run.wait_for_members("0.0", "2.0", "1.1")
    (event,) = run.events("worker_signaled")
    assert (event.rank, event.data["signal"]) == (1, "SIGKILL")
    facts = json.loads(run.box.run("kill", "last", "--rank", "0", "--signal", "stop", "--json").stdout)
    assert facts == {"run": "r", "rank": 0, "pid": run.pid(0), "signal": "SIGSTOP"}
    run.wait_for_members("2.0", "1.1", "0.1")


def test_what_cannot_be_asked(run: Run) -> None:
    def told(*args: str) -> list[str]:
        done = run.box.run(*args)
        assert (done.returncode, done.stdout) == (2, "")
        return done.stderr.splitlines()

    assert told("resize", "r", "-n", "9") == [
        "error: This run cannot have 9 workers.",
        "  why: it was started with `-n 2:3`",
        "   do: ask for 2 to 3",
    ]
    assert told("kill", "r", "--rank", "7")[:2] == [
        "error: There is no rank 7 that runs.",
        "  why: these are: 0, 1, 2",
    ]
    assert told("kill", "r", "--rank", "1", "--signal", "HUP")[0] == "error: There is no signal 'HUP' here."
    assert told("kill", "nothing", "--rank", "1")[0] == "error: No run is called 'nothing'."
    assert told("resize", "r", "-n", "0")[0] == "error: -n is 0."
    assert told("kill", "r", "--rank", "x")[0] == "error: --rank 'x' is not a number."
    run.finish()
    assert told("kill", "r", "--rank", "1")[:2] == [
        "error: Run r has ended: finished.",
        "  why: nobody is there to ask",
    ]


def test_a_run_with_a_fixed_number_is_not_resized_but_can_lose_a_worker(box: Box) -> None:
    box.write("wait.py", "import os, time; open(f\"up{os.environ['RANK']}\", 'w').close(); time.sleep(60)")
    launcher = box.start("run", "-n", "2", "--name", "fixed", "wait.py")
    box.wait_for_files("up0", "up1")
    done = box.run("resize", "fixed", "-n", "1")
    assert done.stderr.startswith("error: This run is not elastic.\n  why: it was started with a fixed number")
    assert box.run("kill", "fixed", "--rank", "1").returncode == 0
    _, told = launcher.communicate(timeout=IN_TIME)
    assert launcher.returncode == 137
    assert "error: The worker was killed by SIGKILL.\n   at: rank 1" in told


def test_a_script_that_is_not_elastic_fails_for_the_right_reason(box: Box) -> None:
    """It loses its peer, and says so; the peer was killed."""
    source = """
        import os, time
        open(f"up{os.environ['RANK']}", "w").close()
        while not os.path.exists("gone"):
            time.sleep(0.01)
        if os.environ["RANK"] == "0":
            raise RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:4711")
        time.sleep(60)
    """
    box.write("plain.py", source)
    launcher = box.start("run", "-n", "1:2", "-o", "engine.spares=0", "--name", "plain", "plain.py")
    box.wait_for_files("up0", "up1")
    assert box.run("kill", "plain", "--rank", "1").returncode == 0
    (box.folder / "gone").touch()
    _, told = launcher.communicate(timeout=IN_TIME)
    assert "error: The worker was killed by SIGKILL.\n   at: rank 1" in told
    assert "also: rank 0 (plain.py:7)" in told


@pytest.mark.parametrize("size", ["2:", ":3", "2:x", "2:auto", "1:2:3", "-1:2", "1.5:2", "4:2", "0:2", "٢:٣"])
def test_a_range_that_makes_no_sense(box: Box, size: str) -> None:
    box.write("toy.py", "")
    done = box.run("run", f"-n={size}" if size.startswith("-") else f"-n{size}", "toy.py")
    assert done.returncode == 2
    assert done.stderr.startswith("error: -n ")
    assert "   do: " in done.stderr


def test_a_resumed_run_has_the_range_it_had(run: Run) -> None:
    run.finish()
    again = run.box.start("run", "--resume", "r", "-o", "engine.spares=0")
    again.communicate(timeout=IN_TIME)
    assert again.returncode == 0
    assert (run.facts()["min_workers"], run.facts()["max_workers"]) == (2, 3)


def test_output_of_a_run_is_that_of_its_workers(run: Run) -> None:
    assert isinstance(run.launcher, subprocess.Popen)
    shown, _ = run.finish()
    assert all(re.match(r"\[[\d,-]+\] (world|gathered) ", line) for line in shown.splitlines())
