"""The service on the first of three machines: jobs are where it put them, whatever becomes of machines and sizes."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from machines import NEEDS_HOSTS, Machines, machines, wait_until

from shoal.testing.rigs import leftovers

pytestmark = [*NEEDS_HOSTS, pytest.mark.slow]
__all__ = ["machines"]

JOBS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "elastic_jobs.py")


class Team:
    """A service on host 0 of a cluster, and what is known of its jobs."""

    def __init__(self, machines: Machines, folder: Path) -> None:
        self.machines, self.hurry = machines, folder / "hurry"
        machines.shoal(0, "up")
        wait_until(lambda: len(self.nodes()) == 3)
        self.cores = max(node["cores"] for node in self.nodes().values())

    def submit(self, workers: str, *more: str) -> str:
        """A job with one worker on each machine; its steps are slow until there is a hurry."""
        env = ("--env", "ELASTIC_PAUSE=1.5", "--env", f"ELASTIC_HURRY={self.hurry}")
        options = ("-n", workers, "--cores", f"{self.cores:g}", *env, "-o", "transport=tcp", *more)
        command = [sys.executable, "-m", "shoal", "submit", *options, "--json", JOBS, "long"]
        done = self.machines.hosts.run(
            0, command, env=self.machines.env(0), capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        return str(json.loads(done.stdout)["jobs"][0])

    def nodes(self) -> dict[str, dict[str, Any]]:
        return {node["node"]: node for node in self.machines.shoal(0, "nodes")["nodes"]}

    def job(self, number: str) -> dict[str, Any]:
        return self.machines.shoal(0, "queue", number)

    def is_over(self, number: str) -> bool:
        return self.job(number)["state"] in ("finished", "failed", "cancelled")

    def output(self, number: str) -> str:
        """What the launchers of a job have said."""
        home = Path(self.machines.env(0)["SHOAL_HOME"])
        return "".join(path.read_text() for path in sorted(home.glob(f"service/jobs/{number}/*/output.log")))

    def places(self, number: str) -> dict[str, int]:
        """On which machines its workers are in truth, by the networks that their processes have."""
        run = Path(self.machines.env(0)["SHOAL_HOME"], "runs", f"job-{number}")
        networks = {
            os.stat(leftovers.NAMESPACES / name).st_ino: ("first", "host1", "host2")[host]
            for host, name in enumerate(self.machines.hosts.names)
        }
        journal = run / "journal.jsonl"
        lines = journal.read_text().splitlines() if journal.exists() else []
        events = [json.loads(line) for line in lines]
        worlds = [event["data"]["members"] for event in events if event["kind"] == "world"]
        started = {
            f"{event['rank']}.{event['data'].get('incarnation', 0)}": event["data"]["pid"]
            for event in events
            if event["kind"] == "worker_started"
        }
        found: Counter[str] = Counter()
        for member in worlds[-1] if worlds else started:  # who is of a fixed size has no World
            try:
                found[networks[os.stat(f"/proc/{started[member]}/ns/net").st_ino]] += 1
            except FileNotFoundError:
                found["nowhere"] += 1
        return dict(found)

    def wait_for(self, number: str, allocation: dict[str, int]) -> None:
        """Until the queue says so, and it is so."""

        def is_so() -> bool:
            job = self.job(number)
            assert not self.is_over(number), self.output(number)
            return job["nodes"] == allocation and self.places(number) == allocation

        wait_until(is_so, 150)


@pytest.fixture
def team(machines: Machines, tmp_path: Path) -> Iterator[Team]:
    machines.join_all(machines.up(), (1, 2))
    try:
        team = Team(machines, tmp_path)
        yield team
        for number in [str(row["job"]) for row in machines.shoal(0, "queue")["jobs"]]:
            machines.shoal(0, "cancel", number)
            wait_until(lambda number=number: team.is_over(number))
    finally:
        machines.shoal(0, "down")  # of the service; the cluster is next


def test_jobs_are_where_the_queue_put_them(team: Team) -> None:
    """A machine that is drained gets none, though Ray has room there; sizes change on the machines that were chosen;
    a machine that is lost is replaced by another; and the result is that of one process.
    """
    clean = subprocess.run([sys.executable, JOBS, "long"], capture_output=True, text=True, timeout=100, check=True)
    team.machines.shoal(0, "drain", "host1", "--why", "test")
    number = team.submit("1:3", "--memory", "1G")
    team.wait_for(number, {"first": 1, "host2": 1})
    team.machines.shoal(0, "drain", "host1", "--undo")
    team.wait_for(number, {"first": 1, "host1": 1, "host2": 1})
    team.machines.shoal(0, "resize", number, "-n", "1:2")
    wait_until(lambda: len(team.job(number)["nodes"]) == 2)
    kept = team.job(number)["nodes"]
    team.wait_for(number, kept)
    (free,) = {"first", "host1", "host2"} - set(kept)
    lost = next(name for name in ("host2", "host1") if name in kept)
    team.machines.kill(int(lost[-1]))
    (left,) = set(kept) - {lost}
    team.wait_for(number, {left: 1, free: 1})
    team.hurry.touch()
    wait_until(lambda: team.is_over(number), 120)
    assert team.job(number)["state"] == "finished"
    log = Path(team.machines.env(0)["SHOAL_HOME"], "runs", f"job-{number}", "logs")
    ending = clean.stdout.split("ended ", 1)[1].splitlines()[0]
    assert ending in "".join(path.read_text() for path in log.iterdir())


def test_a_job_of_fixed_size_goes_on_elsewhere_when_its_machine_is_lost(team: Team) -> None:
    """It cannot go on without a worker, so it is put back: it says why, and goes on where it had saved."""
    clean = subprocess.run([sys.executable, JOBS, "long"], capture_output=True, text=True, timeout=100, check=True)
    number = team.submit("2", "-o", "checkpoint_every=1")
    wait_until(lambda: sum(team.places(number).values()) == 2 and (team.job(number)["step"] or 0) >= 3)
    before = team.job(number)["nodes"]
    lost = next(name for name in ("host2", "host1") if name in before)
    team.machines.kill(int(lost[-1]))
    others = dict.fromkeys({"first", "host1", "host2"} - {lost}, 1)
    address = team.machines.hosts.address(int(lost[-1]))
    wait_until(lambda: f"lost with its machine, {address}." in team.job(number)["change"], 90)
    team.wait_for(number, others)
    assert team.job(number)["num_preempted"] == 0, "it was started on the machine that is gone"
    team.hurry.touch()
    wait_until(lambda: team.is_over(number), 120)
    assert team.job(number)["state"] == "finished"
    run = Path(team.machines.env(0)["SHOAL_HOME"], "runs", f"job-{number}")
    events = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    resumed = [event for event in events if event["kind"] == "resumed"]
    assert resumed
    assert resumed[-1]["step"] >= 2, "it began anew"
    ending = clean.stdout.split("ended ", 1)[1].splitlines()[0]
    assert ending in "".join(path.read_text() for path in (run / "logs").iterdir())
