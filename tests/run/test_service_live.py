"""What the service promises those who share a machine, with real jobs: who goes first, who waits, who gives back."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from served import serving
from test_service import job_script, wait_for

from shoal.service.client import Client

NODE = os.uname().nodename
LASTING = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.05)\n"
TRAINING = """
import os, sys, time
import torch
import shoal

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
data = torch.arange(64 * 4.0).reshape(64, 4) / 256

def loss(model, batch):
    time.sleep(0.02)
    return (model(batch) ** 2).mean()

trainer = shoal.Trainer(model, loss, torch.optim.SGD(model.parameters(), 0.1), data, batch_size=8, exact=True)
trainer.fit(steps=int(sys.argv[2]))
with open(sys.argv[1], "w") as file:
    file.write(trainer.digest())
"""


@contextmanager
def sharing(home: Path, settings: str, cores: int = 2, partition: str = "default") -> Iterator[Client]:
    write_settings(home, settings, cores, partition)
    with serving(home) as daemon, daemon.client() as client:
        yield client
        for state in ("running", "starting", "stopping", "waiting"):
            if jobs := [row["job"] for row in client.queue(state=state)["jobs"]]:
                client.cancel(*jobs)
        wait_for("all have ended", lambda: client.nodes()["nodes"][0]["jobs"] == [], 120)
        assert daemon.stop() == 0, daemon.log


def write_settings(home: Path, settings: str, cores: int = 2, partition: str = "default") -> None:
    text = f'{settings}\n[nodes."{NODE}"]\ncores = {cores}\npartition = "{partition}"\n'
    (home / "service.new").write_text(text)
    (home / "service.new").replace(home / "service.toml")


def wait_for_state(client: Client, job: int, *states: str) -> dict[str, Any]:
    return dict(wait_for(f"job {job} is {states}", lambda: of_state(client, job, states), 120))


def of_state(client: Client, job: int, states: tuple[str, ...]) -> dict[str, Any] | None:
    told = client.job(job)
    return told if told["state"] in states else None


def steps_of(home: Path, job: int) -> list[int]:
    rows = (home / f"runs/job-{job}/metrics-0.jsonl").read_text().splitlines()
    return [json.loads(row)["step"] for row in rows]


def test_a_cap_holds_though_there_is_room_and_who_waits_is_told_why(home: Path) -> None:
    folder = job_script(home / "work", LASTING)
    with sharing(home, "[partitions.default]\nmax_workers_per_user = 1") as client:
        first, second = (client.submit("job.py", f"go-{number}", dir=str(folder))[0] for number in range(2))
        wait_for_state(client, first, "running")
        waits = wait_for("why", lambda: (told := client.job(second))["position"] and told)
        assert (waits["state"], client.nodes()["nodes"][0]["free_cores"]) == ("waiting", 1)
        assert "1" in waits["why"], waits["why"]
        (folder / "go-0").touch()
        wait_for_state(client, second, "running")
        assert client.job(first)["state"] == "finished"
        (folder / "go-1").touch()
        assert client.wait(second, 120)["state"] == "finished"


def test_nothing_new_starts_on_a_node_that_is_drained(home: Path) -> None:
    folder = job_script(home / "work", LASTING)
    with sharing(home, "") as client:
        (first,) = client.submit("job.py", "go", dir=str(folder))
        wait_for_state(client, first, "running")
        client.drain(NODE, "a new disk")
        (second,) = client.submit("job.py", "go", dir=str(folder))
        wait_for("why", lambda: "drain" in client.job(second)["why"])
        assert client.job(first)["state"] == "running"
        (folder / "go").touch()
        assert client.wait(first, 120)["state"] == "finished"
        assert client.job(second)["state"] == "waiting"
        client.drain(NODE, is_draining=False)
        assert client.wait(second, 120)["state"] == "finished"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_serving_goes_before_batch_and_no_sample_is_lost_or_used_twice(home: Path) -> None:
    folder = job_script(home / "train", TRAINING)
    other = job_script(home / "serve", LASTING)
    with sharing(home, "", cores=1) as client:
        (still,) = client.submit("job.py", "still", "60", dir=str(folder))
        assert client.wait(still, 240)["state"] == "finished"
        batch = {"dir": str(folder), "class": "batch"}
        (batch_job,) = client.submit_all([{**batch, "args": ["job.py", "stopped", "60"]}])
        wait_for("it trains", lambda: (client.job(batch_job)["step"] or 0) >= 5, 120)
        (serving_job,) = client.submit_all([{"args": ["job.py", "go"], "dir": str(other), "class": "serving"}])
        wait_for_state(client, serving_job, "running")
        stopped = client.job(batch_job)
        assert (stopped["state"], stopped["num_stops"]) == ("waiting", 1)
        (other / "go").touch()
        assert client.wait(serving_job, 120)["state"] == "finished"
        assert client.wait(batch_job, 240)["state"] == "finished"
        assert client.job(batch_job)["attempts"] == 2
        assert steps_of(home, batch_job) == list(range(60)), "each step once"
        assert (folder / "stopped").read_text() == (folder / "still").read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_a_partition_lends_comes_back_when_its_own_need_it(home: Path) -> None:
    """The node is given to another partition while a job runs, which from then on borrows it."""
    folder = job_script(home / "work", LASTING)
    with sharing(home, "", cores=1) as client:
        (guest,) = client.submit("job.py", "go-guest", dir=str(folder))
        wait_for_state(client, guest, "running")
        write_settings(home, "[partitions.lab]\nlends = true", 1, "lab")
        wait_for("the new partition", lambda: client.nodes()["nodes"][0]["partition"] == "lab")
        assert client.job(guest)["state"] == "running"
        (own,) = client.submit("job.py", "go-own", dir=str(folder), partition="lab")
        wait_for_state(client, own, "running")
        assert (client.job(guest)["state"], client.job(guest)["num_stops"]) == ("waiting", 1)
        (folder / "go-own").touch()
        assert client.wait(own, 120)["state"] == "finished"
        wait_for_state(client, guest, "running")
        (folder / "go-guest").touch()
        assert client.wait(guest, 120)["state"] == "finished"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_elastic_job_grows_into_room_and_gives_it_back(home: Path) -> None:
    folder = job_script(home / "train", TRAINING)
    other = job_script(home / "other", LASTING)
    with sharing(home, "") as client:
        (fixed,) = client.submit("job.py", "go-1", dir=str(other))
        wait_for_state(client, fixed, "running")
        (elastic,) = client.submit("job.py", "digest", "100000", dir=str(folder), workers="1:2")
        wait_for("it trains", lambda: (client.job(elastic)["step"] or 0) >= 3, 120)
        assert client.job(elastic)["workers"] == 1
        (other / "go-1").touch()
        assert client.wait(fixed, 120)["state"] == "finished"
        wait_for("it has grown", lambda: client.job(elastic)["workers"] == 2, 240)
        (urgent,) = client.submit_all([{"args": ["job.py", "go-2"], "dir": str(other), "class": "serving"}])
        wait_for_state(client, urgent, "running")
        told = client.job(elastic)
        assert (told["workers"], told["state"], told["attempts"]) == (1, "running", 1)
        (other / "go-2").touch()
        assert client.wait(urgent, 120)["state"] == "finished"
        steps = steps_of(home, elastic)
        assert steps == list(range(len(steps))), "each step once"
