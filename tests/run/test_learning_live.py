"""A real service that learns from its jobs: how long they are, how fast they are on any number of workers."""

import json
import os
import time
from pathlib import Path

import pytest
from served import serving

from shoal.service.client import Client

TRAIN = """
import sys, time
import torch
import shoal

torch.manual_seed(0)
points, labels = torch.randn(4096, 8), torch.randn(4096, 1)
model = torch.nn.Linear(8, 1)
per_sample, per_step, steps = float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])

def loss(model, batch):
    time.sleep(per_step + per_sample * len(batch[0]))
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

optimizer = torch.optim.SGD(model.parameters(), 0.01)
shoal.Trainer(model, loss, optimizer, (points, labels), batch_size=64).fit(steps=steps)
"""


def wait_for(what: str, check, seconds: float):
    until = time.monotonic() + seconds
    while not (found := check()):
        assert time.monotonic() < until, f"{what}: not within {seconds} s"
        time.sleep(0.2)
    return found


def settings(home: Path, policy: str, cores: int) -> None:
    node = os.uname().nodename
    text = f'policy = "{policy}"\nround = "3s"\nlearn = "1s"\n[nodes."{node}"]\ncores = {cores}\n'
    (home / "service.toml").write_text(text)


def script(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    return folder


def run_once(client: Client, folder: Path, *args: str) -> None:
    (job,) = client.submit_all([{"args": list(args), "dir": str(folder)}])
    assert client.wait(job, 120)["state"] == "finished"


@pytest.mark.slow
def test_the_job_that_scales_gets_the_workers_and_what_was_learned_stays(home: Path):
    folder = script(home / "work", "train.py", TRAIN)
    settings(home, "goodput", 1)
    row = {"dir": str(folder), "workers": "1:4", "cores": 0.2}
    with serving(home) as daemon, daemon.client() as client:
        jobs = client.submit_all(
            [
                {**row, "args": ["train.py", "0.004", "0", "100000"], "name": "scales"},
                {**row, "args": ["train.py", "0", "0.25", "100000"], "name": "flat"},
            ]
        )

        def sizes() -> tuple[int, ...]:
            return tuple(sum(client.job(job)["nodes"].values()) for job in jobs)

        wait_for("the one that scales has the workers", lambda: sizes() == (4, 1), 400)
        told = client.job(jobs[0])
        assert {made["workers"] for made in told["predictions"]} >= {1, 2}
        assert told["accuracy"]["num_made"] == len(told["predictions"])
        assert told["left_told_by"] == "its own steps"
        assert told["pause_seconds"] > 0
        assert client.queue()["problems"] == {}
        # Killed, it takes them up again, and what is known of them comes back.
        daemon.kill()
        daemon.start()
        wait_for("they are adopted", lambda: all(client.job(job)["is_seen"] for job in jobs), 60)
        wait_for("their speed is known again", lambda: client.job(jobs[0])["predictions"], 60)
        client.change("cancel", list(jobs))
        for job in jobs:
            client.wait(job, 120)
        history = home / "history.jsonl"
        wait_for("they are remembered", lambda: history.exists() and len(history.read_text().splitlines()) == 2, 60)
        past = {each["name"]: each for each in map(json.loads, history.read_text().splitlines())}
        assert past["job-1"]["traits"]["sizes"] == {"batch_size": 64.0, "parameters": 9.0}
        assert past["job-1"]["work_seconds"] is None, "it did not finish: nobody knows how long it is"
        # One like it is known before its first step.
        (again,) = client.submit_all([{**row, "args": ["train.py", "0", "0.25", "100000"], "workers": "1:3"}])
        wait_for("it runs", lambda: client.job(again)["state"] == "running", 60)
        assert "nothing is learned" not in daemon.log
        client.change("cancel", [again])
        client.wait(again, 120)


@pytest.mark.slow
def test_short_jobs_go_first_without_being_told_and_starts_are_foretold(home: Path):
    folder = script(home / "work", "sleep.py", "import sys, time\ntime.sleep(float(sys.argv[1]))\n")
    script(folder, "block.py", "import os, time\nwhile not os.path.exists('go'): time.sleep(0.05)\n")
    settings(home, "sjf", 1)
    with serving(home) as daemon, daemon.client() as client:
        (held,) = client.submit_all([{"args": ["block.py"], "dir": str(folder)}])
        (behind,) = client.submit_all([{"args": ["other.py"], "dir": str(folder)}], held=False)
        wait_for("it is told why", lambda: "nothing like job 1" in client.job(behind)["why"], 30)
        assert client.job(behind)["eta_seconds"] is None
        client.change("cancel", [behind])
        (folder / "go").touch()
        assert client.wait(held, 60)["state"] == "finished", daemon.log
        run_once(client, folder, "sleep.py", "8")
        run_once(client, folder, "sleep.py", "0.1")
        (folder / "go").unlink()
        (held,) = client.submit_all([{"args": ["block.py"], "dir": str(folder)}])
        wait_for("it runs", lambda: client.job(held)["state"] == "running", 60)
        (long,) = client.submit_all([{"args": ["sleep.py", "8"], "dir": str(folder)}])
        (short,) = client.submit_all([{"args": ["sleep.py", "0.1"], "dir": str(folder)}])
        wait_for("its start is foretold", lambda: client.job(short)["eta_seconds"] is not None, 30)
        assert f"job {held} is expected to end first" in client.job(short)["why"]
        assert client.job(short)["position"] < client.job(long)["position"]
        assert client.job(short)["left_seconds"] < client.job(long)["left_seconds"]
        assert client.job(long)["left_told_by"] == "1 job like it"
        (folder / "go").touch()
        assert client.wait(short, 60)["state"] == "finished"
        assert client.job(long)["state"] != "finished"
        assert client.wait(long, 60)["state"] == "finished"
