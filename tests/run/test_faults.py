"""Faults in real processes: each does what it says, once, and the journal says so."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.observe.journal import read
from shoal.spec.errors import UserError
from shoal.testing import rigs
from shoal.testing.faults import Faults
from tests.run.launching import Box, box

__all__ = ["box"]

LOOP = """
import os, time
from shoal.engine.env import read_worker
from shoal.train.faulty import read_faults

facts = read_worker()
plan = read_faults(facts, facts.run_dir or os.environ.get("RUN_DIR"))
for step in range(6):
    for point in ("start", "forward", "backward", "posted", "summed", "updating", "updated"):
        started = time.perf_counter()
        if plan is not None:
            plan.reach(point, step)
        if time.perf_counter() - started > 0.1:
            print(f"late at {point} of {step} by {time.perf_counter() - started:.2f} s", flush=True)
    print("did", step, flush=True)
    time.sleep(float(os.environ.get("PAUSE", 0)))
print("ended", flush=True)
"""
"""A loop like the trainer's, without anything to train: it starts in a tenth of a second."""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "loop.py"
    path.write_text(LOOP)
    return str(path)


def test_without_faults_all_is_well(script):
    run = Faults().run(script, num_workers=2)
    assert (run.exit_code, run.status, run.strikes) == (0, "finished", ())
    assert "ended" in run.log(1)
    assert run.log(2) == ""
    assert len(run.of("worker_exited")) == 2


def test_a_kill_strikes_its_rank_in_its_step(script):
    run = Faults().kill(rank=1, step=3, at="updating").run(script, num_workers=2)
    (strike,) = run.strikes
    assert (strike.rank, strike.step, strike.data["kind"], strike.data["at"]) == (1, 3, "kill", "updating")
    assert run.status == "failed"
    assert {event.rank: event.data["code"] for event in run.of("worker_exited")}[1] == -signal.SIGKILL
    assert run.log(1).split()[-1] == "2"


def test_an_error_is_one_of_the_users(script):
    run = Faults().fail(rank=0, step=2, error="the cable came loose").run(script, num_workers=1)
    assert run.exit_code == 1
    (error,) = run.of("error")
    assert (error.data["type"], error.data["message"]) == ("FaultError", "the cable came loose")
    again = Faults().fail(rank=0, step=2, error="busy", retryable=True).run(script, num_workers=1)
    assert again.exit_code == 75


def test_slow_and_hung_for_a_while(script):
    run = (
        Faults()
        .slow(rank=0, step=1, seconds=0.2, steps=2)
        .hang(rank=0, step=4, seconds=0.3)
        .run(script, num_workers=1)
    )
    assert run.exit_code == 0
    late = [line.split()[4] for line in run.log(0).splitlines() if line.startswith("late")]
    assert {"1", "2", "4"} <= set(late)
    assert [strike.data["kind"] for strike in run.strikes] == ["slow", "hang"]


def test_frozen_for_a_while(script):
    run = Faults().freeze(rank=0, step=2, seconds=0.4, at="backward").run(script, num_workers=1)
    assert run.exit_code == 0
    assert "late at backward of 2 by" in run.log(0)


def test_a_frozen_process_stands_still_with_all_its_threads_and_can_be_killed(tmp_path, script):
    env = {**os.environ, **Faults().freeze(rank=0, step=1).env(), "RUN_DIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, script], env=env, stdout=subprocess.DEVNULL) as process:
        try:
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            assert process.poll() is None
        finally:
            process.kill()
    (event,) = read(str(tmp_path / "journal.jsonl"))
    assert (event.kind, event.data["kind"]) == ("fault", "freeze")


def test_a_resumed_run_does_not_meet_the_fault_again(box: Box):
    box.write("loop.py", LOOP)
    Faults().kill(rank=1, step=3).write(box.folder / "faults.json")
    told = ("--env", f"SHOAL_FAULTS=@{box.folder}/faults.json")
    assert box.run("run", "-n", "2", "--name", "first", *told, "loop.py").returncode != 0
    assert box.run("run", "-n", "2", "--resume", "first", *told, "loop.py").returncode == 0
    assert [event["kind"] for event in box.events()].count("fault") == 1


def test_the_launcher_is_killed_and_no_worker_stays(box: Box):
    box.write("loop.py", LOOP)
    env = {**box.env, **Faults().kill_launcher(step=2).env(), "PAUSE": "0.2"}
    done = box.run("run", "-n", "2", "loop.py", env=env)
    assert done.returncode == -signal.SIGKILL
    box.wait_for_peace()
    strikes = [event for event in box.events() if event["kind"] == "fault"]
    assert [(strike["rank"], strike["step"]) for strike in strikes] == [(0, 2)]


def test_a_job_that_cannot_start_is_told(tmp_path):
    with pytest.raises(UserError, match=r"none\.py"):
        Faults().run(str(tmp_path / "none.py"))


@rigs.needs("root", "mounting")
def test_a_disk_that_is_full_for_a_while(script):
    with rigs.small_disk(4) as disk:
        run_dir = str(disk.path / "run")
        faults = Faults().disk_full(after_step=2, seconds=0.5)
        run = faults.run(script, num_workers=1, run_dir=run_dir, env={"PAUSE": "0.3"})
        assert run.exit_code == 0
        assert run.strikes[0].data["kind"] == "disk_full"
        assert not list(disk.path.glob("shoal-rig-*"))
        forever = Faults().disk_full(after_step=2).run(script, num_workers=1, run_dir=str(disk.path / "other"))
        assert forever.strikes
        with pytest.raises(OSError, match="No space left"):
            (disk.path / "more").write_bytes(bytes(1 << 16))  # the run itself gives back a page or two at its end
        disk.free()
        (disk.path / "more").write_bytes(bytes(1 << 16))


@rigs.needs("root", "ip", "tc", "network namespaces")
def test_a_worker_that_is_cut_off_for_a_while(tmp_path, script):
    with rigs.hosts(2) as hosts:
        env = {**os.environ, **Faults().partition(rank=0, step=1, seconds=1.5).env()}
        env |= {"RUN_DIR": str(tmp_path), "PAUSE": "0.8"}
        process = hosts.start(1, [sys.executable, script], env=env, stdout=subprocess.DEVNULL)
        seen = []
        while process.poll() is None:
            link = json.loads(hosts.run(1, ["ip", "-json", "link", "show", "eth0"], capture_output=True).stdout)
            seen.append("UP" in link[0]["flags"])
            time.sleep(0.05)
        assert process.returncode == 0
        changes = [after for before, after in zip([None, *seen], seen, strict=False) if before != after]
        assert changes == [True, False, True]


def test_a_killed_process_has_no_time_to_tidy_up(tmp_path, script):
    env = {**os.environ, **Faults().kill(rank=0, step=0, at="posted").env(), "RUN_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == ""
    assert [event.step for event in read(str(tmp_path / "journal.jsonl"))] == [0]
