"""A worker that stands still, at any point of a step, is found in two seconds and replaced. Nothing is lost."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import Box, box

from shoal.observe import journal
from shoal.spec.event import Event
from shoal.testing import rigs
from shoal.testing.faults import Faults

__all__ = ["box"]

JOB = Path(__file__).parent / "stopped_job.py"
STEPS = 130


@pytest.fixture(scope="module")
def clean() -> str:
    done = subprocess.run(
        [sys.executable, str(JOB), str(STEPS), "0"], capture_output=True, text=True, timeout=60, check=True
    )
    return digest_in(done.stdout)


def digest_in(text: str) -> str:
    (digest,) = set(re.findall(r"digest (\w+)", text))
    return str(digest)


@pytest.mark.slow
def test_frozen_at_any_point_nothing_but_time_is_lost(clean: str) -> None:
    faults = Faults()
    for number, point in enumerate(("forward", "summed", "updating")):
        faults = faults.freeze(rank=number, step=20 + 30 * number, at=point, incarnation=None)
    run = faults.run(str(JOB), str(STEPS), "0.05", num_workers="1:3")
    assert run.exit_code == 0
    assert digest_in("".join(run.log(rank) for rank in range(3))) == clean
    found = run.of("worker_frozen")
    assert [event.rank for event in found] == [strike.rank for strike in run.strikes] == [0, 1, 2]
    for strike, event in zip(run.strikes, found, strict=True):
        assert event.time - strike.time < 3.0, "two seconds, and one for a busy machine"
        assert event.data["waited_seconds"] > 0.3, "what the others lost is written down"
        assert event.data["stack"] == ["(the process is stopped (SIGSTOP))"]


@pytest.mark.slow
@rigs.needs("freezer cgroups")
def test_frozen_by_the_kernel(clean: str, box: Box) -> None:
    """As containers are paused: no signal is seen, and none gets through."""
    (box.folder / JOB.name).write_text(JOB.read_text())
    launcher = box.start("run", "-n", "1:2", "--name", "r", JOB.name, str(STEPS), "0.05")
    folder = box.home / "runs" / "r"

    def events(kind: str) -> list[Event]:
        return [event for event in journal.read(str(folder / "journal.jsonl")) if event.kind == kind]

    metrics = folder / "metrics-0.jsonl"
    box.wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 20, 40)
    pid = next(event.data["pid"] for event in events("worker_started") if event.rank == 1)
    with rigs.freezer() as group:
        group.add(pid)
        group.freeze()
        began = time.time()
        (event,) = box.wait_for(lambda: events("worker_frozen"))
        assert event.time - began < 3.0, "two seconds, and one for a busy machine"
        group.thaw()
        shown, told = launcher.communicate(timeout=40)
    assert launcher.returncode == 0, told
    assert digest_in(shown) == clean
