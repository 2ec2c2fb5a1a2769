"""Clients that submit while the service is killed again and again, and an account of what became of every job.

Most jobs are held, so that none gets in the way of many. One in twenty runs: it writes down that it did. The first of
these runs from beginning to end, and is taken up again after every kill.
"""

import contextlib
import json
import random
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from served import Daemon

from shoal.service import audit
from shoal.service.client import Client

RUNS_EVERY = 20
CORES = 0.1
"""What each asks for: little, so that many run at a time."""
SCRIPT = """
import fcntl, os, sys, time
with open("story", "a") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    file.write(f"{sys.argv[1]} {os.path.basename(os.environ['SHOAL_ATTEMPT'])} {os.getpid()}\\n")
while sys.argv[1] == "0" and not os.path.exists("go"):
    time.sleep(0.1)
"""


@dataclass(slots=True)
class Account:
    """What clients were told: the name of each job they submitted, and its number.

    `adopted_seconds`: after each start, how long until the service answers and has seen the job that runs throughout.
    """

    told: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    adopted_seconds: list[float] = field(default_factory=list)


def runs(at: int) -> bool:
    return at % RUNS_EVERY == 0


def storm(daemon: Daemon, *, num_jobs: int, num_clients: int, num_kills: int, seed: int) -> Account:
    """Submit so many jobs from so many clients, and kill the service so often meanwhile, also while it starts.

    Returns when all that were to run have ended.
    """
    account, left = Account(), iter(range(1, num_jobs))
    folder = _work_folder(daemon)
    folder.mkdir()
    (folder / "job.py").write_text(SCRIPT)
    lock = threading.Lock()

    def submit(number: int) -> None:
        chance = random.Random(seed * 1000 + number)
        with daemon.client(patience_seconds=120.0) as client:
            while True:
                with lock:
                    at = next(left, None)
                if at is None:
                    return
                try:
                    account.told[f"job {at}"] = _submit(client, folder, at, is_again=chance.random() < 0.1)
                except Exception as error:
                    account.problems.append(f"{at}: {error!r}")

    with daemon.client(patience_seconds=120.0) as client:
        first = account.told["job 0"] = _submit(client, folder, 0, is_again=True)
        _wait_until_seen(client, first)
        clients = [threading.Thread(target=submit, args=(number,)) for number in range(num_clients)]
        for thread in clients:
            thread.start()
        _kill_often(daemon, account, first, num_jobs, num_kills, random.Random(seed))
        for thread in clients:
            thread.join()
        (folder / "go").touch()
        for at in range(0, num_jobs, RUNS_EVERY):
            client.wait(account.told.get(f"job {at}", first), 1200.0)
        (node,) = client.nodes()["nodes"]
        if (node["free_cores"], node["free_memory_bytes"]) != (node["cores"], node["memory_bytes"]):
            account.problems.append(f"not all is free in the end: {node}")
    return account


def _work_folder(daemon: Daemon) -> Path:
    return daemon.home / "work"


def _submit(client: Client, folder: Path, at: int, *, is_again: bool) -> int:
    """One job, by its own key; sometimes the same request is sent again after it was answered."""
    row = {"args": ["job.py", str(at)], "dir": str(folder), "name": f"job {at}", "cores": CORES}
    is_held = not runs(at)
    (job,) = client.submit_all([row], held=is_held, key=f"key-{at}")
    if is_again:
        again = client.submit_all([row], held=is_held, key=f"key-{at}")
        assert again == [job], f"{at} was {job} and then {again}"
    return job


def _kill_often(
    daemon: Daemon, account: Account, first: int, num_jobs: int, num_kills: int, chance: random.Random
) -> None:
    """Kill after some more answers, or a moment after the start; and start it again."""
    with daemon.client(patience_seconds=120.0) as client:
        for kill in range(num_kills):
            if chance.random() < 0.15:
                time.sleep(chance.random() * 0.8)
            else:
                # So that the last kill still finds jobs to submit.
                enough = (kill + chance.random()) / num_kills * num_jobs * 0.95
                while len(account.told) < enough and not account.problems:
                    time.sleep(0.002)
                time.sleep(chance.random() * 0.02)
            daemon.kill()
            daemon.start()
            if kill % 10 == 0 or kill == num_kills - 1:
                began = time.monotonic()
                _wait_until_seen(client, first)
                account.adopted_seconds.append(time.monotonic() - began)
    daemon.wait_up()


def _wait_until_seen(client: Client, job: int) -> None:
    until = time.monotonic() + 120.0
    while not ((told := client.job(job))["is_seen"] and told["state"] == "running"):
        assert time.monotonic() < until, told
        time.sleep(0.01)


def check_account(daemon: Daemon, account: Account, num_jobs: int) -> None:
    """None lost, none double, each that was to run has run once, and the log of it is whole."""
    assert account.problems == []
    assert len(account.told) == num_jobs
    with contextlib.closing(sqlite3.connect(Path(daemon.folder, "service.db"))) as connection:
        rows = connection.execute("SELECT number, asked FROM jobs").fetchall()
        kept = {json.loads(asked)["name"]: number for number, asked in rows}
        times = Counter(json.loads(asked)["name"] for _, asked in rows)
        lost = [name for name, number in account.told.items() if kept.get(name) != number]
        double = [name for name, count in times.items() if count > 1]
        assert (lost, double, len(rows)) == ([], [], num_jobs)
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        verdict = audit.verify(audit.read(connection))
        assert verdict.is_sound
        assert sum(entry.action == "submit" for entry in audit.read(connection)) == num_jobs
    assert sorted(story_of(daemon)) == [(at, 1) for at in range(0, num_jobs, RUNS_EVERY)]


def story_of(daemon: Daemon) -> Sequence[tuple[int, int]]:
    """Which jobs have begun to run, and in which attempt, as they have written down themselves."""
    lines = (_work_folder(daemon) / "story").read_text().splitlines()
    return [(int(job), int(attempt)) for job, attempt, _ in map(str.split, lines)]
