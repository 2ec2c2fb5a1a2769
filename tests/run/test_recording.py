"""A run that is asked, while it trains, to record more: a profile of one rank, spans of all, native stacks."""

import gzip
import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from launching import IN_TIME, Box

from shoal.engine.native import find_py_spy
from shoal.testing.rigs.machine import LACKS
from tests.tracing import check_trace

JOB = Path(__file__).parent / "recorded_job.py"
WAITING = """\
import os, time
open("up", "w").close()
while not os.path.exists("end"):
    time.sleep(0.02)
"""


def end(box: Box, launcher: subprocess.Popen[str]) -> None:
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=60)
    box.wait_for_peace()


@pytest.fixture(scope="module", params=["2", "1:2"])
def box(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    """A run of two workers that takes steps; all of a fixed size, and an elastic one."""
    box = Box(tmp_path_factory.mktemp("recording"))
    (box.folder / JOB.name).write_text(JOB.read_text())
    more = ("-o", "engine.spares=0", "--name", "r", "--quiet")
    launcher = box.start("run", "-n", request.param, *more, JOB.name)
    folder = box.home / "runs" / "r"
    box.wait_for(lambda: all((folder / f"metrics-{rank}.jsonl").exists() for rank in range(2)), 60)
    yield box
    end(box, launcher)
    assert launcher.returncode == 130


def test_one_rank_is_profiled_without_a_restart(box: Box) -> None:
    done = box.run("profile", "r", "--rank", "1", "--steps", "4", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["rank"], told["num_steps"], told["what"]) == (1, 4, "profile")
    names = {row["name"]: row["num_calls"] for row in told["operators"]}
    assert names["aten::addmm"] > 0
    assert names["aten::addmm"] % 4 == 0, "four whole steps"
    with gzip.open(told["path"]) as file:
        events = json.load(file)["traceEvents"]
    assert any(event.get("name") == "aten::addmm" for event in events)
    again = box.run("profile", "r", "--rank", "0", "--steps", "1")
    assert again.returncode == 0, again.stderr
    assert "OPERATOR" in again.stdout
    assert "aten::" in again.stdout
    assert "rank-0-step-" in again.stdout
    assert [event["kind"] for event in box.events()].count("recorded") >= 2


def test_who_is_not_there_is_said(box: Box) -> None:
    done = box.run("profile", "r", "--rank", "7")
    assert done.returncode == 2
    assert "Rank 7 has recorded no step so far." in done.stderr


def test_a_run_that_is_over_and_scripts_without_steps(tmp_path: Path) -> None:
    box = Box(tmp_path)
    box.write(
        "plain.py", "import os, time\nopen('up', 'w').close()\nwhile not os.path.exists('end'): time.sleep(0.02)\n"
    )
    launcher = box.start("run", "--name", "p", "plain.py")
    box.wait_for_files("up")
    done = box.run("profile", "p")
    assert "This run has recorded no step so far." in done.stderr
    (box.folder / "end").touch()
    launcher.communicate(timeout=IN_TIME)
    done = box.run("profile", "p")
    assert "nobody is there to ask" in done.stderr
    box.wait_for_peace()


def test_what_happens_inside_of_steps_is_recorded_when_asked(box: Box) -> None:
    path = box.folder / "trace.json"
    done = box.run("trace", "r", "--record", "3", "-o", str(path), "--json")
    assert done.returncode == 0, done.stderr
    events = json.loads(path.read_text())["traceEvents"]
    check_trace(events)
    inside = {(event["pid"], event["name"]) for event in events if event["ph"] == "X" and event["tid"] == 2}
    for rank in range(2):
        assert {(2 + rank, "forward"), (2 + rank, "backward"), (2 + rank, "update")} <= inside
    first, last = json.loads(done.stdout)["steps"]
    assert last - first >= 3
    steps = {event["args"]["step"] for event in events if event["ph"] == "X" and event["tid"] == 2}
    assert steps <= set(range(first, last))
    assert box.run("trace", "r", "--rank", "1").returncode == 2


@pytest.mark.skipif(find_py_spy() is None, reason="py-spy is not installed")
def test_native_frames_and_those_who_cannot_answer(box: Box) -> None:
    done = box.run("stacks", "r", "--native", "--json")
    assert done.returncode == 0, done.stderr
    for stack in json.loads(done.stdout)["stacks"]:
        if "may not look into" in stack["native"]:
            pytest.skip(f"{LACKS} leave to trace processes")
        assert "recorded_job.py" in stack["native"]
        assert "_PyEval" in stack["native"] or ".so" in stack["native"] or "libc" in stack["native"]
    (rank_1,) = [stack["pid"] for stack in json.loads(done.stdout)["stacks"] if stack["rank"] == 1]
    assert box.run("kill", "r", "--rank", "1", "--signal", "STOP").returncode == 0
    try:
        box.wait_for(lambda: psutil.Process(rank_1).status() == psutil.STATUS_STOPPED)
        told = box.run("stacks", "r", "--rank", "1").stdout
    finally:
        box.run("kill", "r", "--rank", "1", "--signal", "CONT")
    assert "the process is stopped" in told
    assert "recorded_job.py" in told, "py-spy has seen where"


def test_a_rank_that_dies_meanwhile_is_told(box: Box) -> None:
    if not json.loads((box.home / "runs" / "r" / "run.json").read_text()).get("min_workers"):
        return  # it would be the end of the run
    asked = box.start("profile", "r", "--rank", "1", "--steps", "9000")
    recording = [event for event in box.events() if event["kind"] == "recording"]
    box.wait_for(lambda: len([event for event in box.events() if event["kind"] == "recording"]) > len(recording), 60)
    assert box.run("kill", "r", "--rank", "1").returncode == 0
    _, told = asked.communicate(timeout=60)
    assert asked.returncode == 2
    assert "Rank 1 was not profiled." in told
    assert "signal 9" in told
    box.wait_for(lambda: sum(event["kind"] == "world" for event in box.events()) >= 2)
    path = box.folder / "all.json.gz"
    assert box.run("trace", "r", "-o", str(path)).returncode == 0
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    check_trace(events)
    names = {event["name"] for event in events}
    assert {"World 0: 2 workers", "World 1: 1 workers", "worker_lost", "save a checkpoint", "recording"} <= names
    assert {"loss", "samples_per_second", "workers"} <= {event["name"] for event in events if event["ph"] == "C"}
