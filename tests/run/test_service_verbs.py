"""The service as people use it: real commands, a real daemon, real jobs."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

import shoal
from shoal import cli

ROOT = Path(__file__).parents[2]


@pytest.fixture
def say(tmp_path, monkeypatch, capsys):
    """Run a command and give what it printed; with `code`, it must end with that."""
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hello.py").write_text("import os; print('hello', os.environ.get('SHOAL_ARRAY_INDEX'), flush=True)")
    (tmp_path / "long.py").write_text("import time; time.sleep(100)")

    def say(*argv, code=0):
        capsys.readouterr()
        assert cli.main([str(word) for word in argv]) == code, capsys.readouterr().err
        shown = capsys.readouterr()
        return json.loads(shown.out) if "--json" in argv else shown.out if code == 0 else shown.err

    command = [sys.executable, "-m", "shoal", "up", "--json"]
    up = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout)
    assert up["status"] == "started"
    assert up["address"].startswith("http://127.0.0.1:")
    yield say
    numbers = [job["job"] for job in say("queue", "--json")["jobs"]]
    if numbers:
        say("cancel", *numbers)
        wait_for(lambda: not say("queue", "--json")["jobs"])
    say("down")
    assert "No service is up" in say("queue", code=2)


def wait_for(claim, seconds=60.0):
    until = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < until
        time.sleep(0.1)


def test_from_up_to_done(say, tmp_path):
    assert "the service is up already" in say("up")
    done = say("submit", "--name", "first", "--memory", "1G", "--wait", "--json", "hello.py")
    assert [(job["name"], job["state"], job["exit_code"]) for job in done["jobs"]] == [("first", "finished", 0)]
    assert "hello None" in say("logs", "job-1")

    # Held jobs stay, and can be changed.
    jobs = say("submit", "--hold", "--array", 3, "--priority", 7, "--after", 1, "--json", "hello.py")["jobs"]
    assert jobs == [2, 3, 4]
    assert "held" in say("queue")
    told = say("queue", "--state", "held", "--json")
    assert (told["total"], told["counts"]["held"]) == (3, 3)
    assert "is not the number of a job" in say("cancel", "hello", code=2)
    assert say("queue", 3, "--json")["priority"] == 7
    assert "cancelled" in say("cancel", "3-4")
    assert "resized" in say("resize", "2", "-n", "2")
    assert "released" in say("release", 2)
    with shoal.Client() as client:
        assert client.wait(2, timeout_seconds=60)["state"] == "finished"
    assert say("queue", "--all", "--json")["total"] == 4

    # What can never be is said at once.
    assert "There is no partition 'gpuu'" in say("submit", "--partition", "gpuu", "hello.py", code=2)
    assert "ask for at most" in say("submit", "-n", 5000, "hello.py", code=2)
    assert "There is no script" in say("submit", "missing.py", code=2)
    assert "There is no job 99" in say("submit", "--after", 99, "hello.py", code=2)

    # Nodes, people, shares and the log.
    node = say("nodes", "--json")["nodes"][0]["node"]
    assert "gets no new jobs" in say("drain", node, "--why", "<b>dust</b>")
    assert "draining" in say("nodes")
    say("drain", node, "--undo")
    ben = say("people", "add", "ben", "--role", "viewer", "--max-jobs", 3, "--json")
    with shoal.Client(say("up", "--json")["address"], ben["token"]) as client:
        assert client.me()["role"] == "viewer"
        with pytest.raises(shoal.UserError):
            client.submit("hello.py")
        assert "/api/jobs" in client.ask("GET", "/api/openapi.json")["paths"]
    assert "ben" in say("people")
    say("people", "remove", "ben")
    assert say("share", "--json")["shares"][0]["worker_seconds"] > 0
    assert "sound" in say("audit", "verify")
    assert "drain" in say("audit")


@pytest.mark.slow
def test_the_example_runs(say):
    done = say("submit", "--wait", "--json", ROOT / "examples" / "job.toml")
    assert [(job["name"], job["state"]) for job in done["jobs"]] == [("train", "finished"), ("again", "finished")]


@pytest.mark.slow
def test_a_job_that_runs_goes_on_without_the_service_and_is_ended_by_its_successor(say):
    say("submit", "long.py")
    wait_for(lambda: say("queue", 1, "--json")["state"] == "running")
    assert "1 job still running" in say("down")
    assert "`shoal up`" in say("queue", code=2)
    subprocess.run([sys.executable, "-m", "shoal", "up"], check=True, capture_output=True, timeout=60)
    assert say("queue", 1, "--json")["state"] == "running"
    say("cancel", 1)
    wait_for(lambda: say("queue", 1, "--json")["state"] == "cancelled")
    assert "cancelled" in say("queue", "--all")
