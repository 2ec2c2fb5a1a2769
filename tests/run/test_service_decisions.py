"""Decisions of a real service take effect: memory that lies idle changes hands, and what happened is told."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from served import serving

IMPATIENT = """
import shoal.place.reclaim as reclaim
from shoal.place.rules import Rules
reclaim.LONG_SECONDS, reclaim.USUAL = 2.0, Rules(quantum_seconds=1.0, stop_costs=0.01)
"""
"""Nobody waits five minutes in a test."""

TRAINING = """
import time
import torch
import shoal

model = torch.nn.Linear(4, 1)
data = torch.arange(64 * 4.0).reshape(64, 4) / 256

def loss(model, batch):
    time.sleep(0.02)
    return (model(batch) ** 2).mean()

shoal.Trainer(model, loss, torch.optim.SGD(model.parameters(), 0.1), data, batch_size=8).fit(steps=100_000)
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def wait_for(what: str, check: Callable[[], Any], seconds: float = 120.0) -> Any:
    until = time.monotonic() + seconds
    while not (found := check()):
        assert time.monotonic() < until, f"{what}: not within {seconds} s"
        time.sleep(0.1)
    return found


@pytest.mark.slow
def test_memory_that_a_job_never_used_goes_to_one_that_waits_and_it_goes_on_with_less(home: Path):
    home.mkdir()
    (home / "train.py").write_text(TRAINING)
    (home / "other.py").write_text("import time\ntime.sleep(600)\n")
    (home / "service.toml").write_text(f'[nodes."{os.uname().nodename}"]\nmemory = "10G"\n')
    with serving(home, before=IMPATIENT) as daemon, daemon.client() as client:
        (giver,) = client.submit("train.py", dir=str(home), memory="8G", cores=0.1)
        wait_for("it trains", lambda: (client.job(giver)["step"] or 0) > 5)
        (waits,) = client.submit("other.py", dir=str(home), memory="4G", cores=0.1)
        wait_for("both run", lambda: {client.job(each)["state"] for each in (giver, waits)} == {"running"})
        told = client.job(giver)
        assert told["asked_memory_bytes"] == 8 << 30
        assert told["memory_bytes"] < 4 << 30, daemon.log
        assert (told["num_preempted"], told["attempts"]) == (1, 2)
        assert f"job {waits} waits for memory" in told["change"]
        step = told["step"]
        wait_for("it comes further", lambda: client.job(giver)["step"] > step)
        wait_for("what it cost is known", lambda: client.job(giver)["stop_seconds"])
        client.cancel(giver, waits)
        wait_for("all is over", lambda: not client.queue()["jobs"])
        (node,) = client.nodes()["nodes"]
        assert node["free_memory_bytes"] == node["memory_bytes"]
