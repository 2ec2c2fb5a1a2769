"""Clients that submit while the service is killed again and again, and an account of what became of every job."""

import contextlib
import json
import random
import sqlite3
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from served import Daemon

from shoal.service import audit
from shoal.service.client import Client


@dataclass(slots=True)
class Account:
    """What clients were told: the name of each job they submitted, and its number."""

    told: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def storm(daemon: Daemon, *, num_jobs: int, num_clients: int, num_kills: int, seed: int) -> Account:
    """Submit so many jobs from so many clients, and kill the service so often meanwhile, also while it starts."""
    account, left = Account(), iter(range(num_jobs))
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
                    account.told[f"job {at}"] = _submit(client, at, is_again=chance.random() < 0.1)
                except Exception as error:
                    account.problems.append(f"{at}: {error!r}")

    clients = [threading.Thread(target=submit, args=(number,)) for number in range(num_clients)]
    for client in clients:
        client.start()
    _kill_often(daemon, account, num_jobs, num_kills, random.Random(seed))
    for client in clients:
        client.join()
    return account


def _submit(client: Client, at: int, *, is_again: bool) -> int:
    """One job, by its own key; sometimes the same request is sent again after it was answered."""
    row = {"args": ["train.py"], "dir": "/", "name": f"job {at}"}
    (job,) = client.submit_all([row], held=True, key=f"key-{at}")
    if is_again:
        again = client.submit_all([row], held=True, key=f"key-{at}")
        assert again == [job], f"{at} was {job} and then {again}"
    return job


def _kill_often(daemon: Daemon, account: Account, num_jobs: int, num_kills: int, chance: random.Random) -> None:
    """Kill after some more answers, or a moment after the start; and start it again."""
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
    daemon.wait_up()


def check_account(folder: str, account: Account, num_jobs: int) -> None:
    """None lost, none double, and the log of it is whole."""
    assert account.problems == []
    assert len(account.told) == num_jobs
    with contextlib.closing(sqlite3.connect(Path(folder, "service.db"))) as connection:
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
