"""A worker of an elastic run that the kernel kills for its memory: it leaves the World, and the others go on."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from launching import Box, box

from shoal.testing import rigs

__all__ = ["box"]

JOBS = Path(__file__).with_name("elastic_jobs.py")
GREEDY = f"""
    import os, runpy, threading, time

    def want():
        while not os.path.exists("want"):
            time.sleep(0.01)
        return b"x" * (1 << 30)

    if os.environ["RANK"] == "1" and os.environ.get("SHOAL_INCARNATION", "0") == "0":
        threading.Thread(target=want, daemon=True).start()
    runpy.run_path({str(JOBS)!r}, run_name="__main__")
"""
LIMIT_BYTES = 128 << 20
"""Of what the worker takes from then on."""


def num_steps(box: Box) -> int:
    """Steps that worker 1 has taken."""
    return sum(len(path.read_text().splitlines()) for path in box.home.glob("runs/greedy/metrics-1.jsonl"))


def ends_in(text: str) -> list[str]:
    return re.findall(r"^ended (.*)$", text, re.MULTILINE)


@pytest.mark.slow
@rigs.needs("root", "memory cgroups")
def test_a_worker_that_is_killed_for_memory(box: Box) -> None:
    clean = subprocess.run(
        [sys.executable, str(JOBS), "short"], capture_output=True, text=True, timeout=100, check=True
    )
    script = box.write("greedy.py", GREEDY)
    with rigs.memory_limit(LIMIT_BYTES) as group:
        env = {**box.env, "ELASTIC_PAUSE": "0.1"}
        process = box.start("run", "-n", "2:3", "--name", "greedy", str(script), "short", env=env)
        box.wait_for(lambda: num_steps(box) >= 5, 60)
        started = [event for event in box.events() if event["kind"] == "worker_started" and event["rank"] == 1]
        group.add(started[0]["data"]["pid"])
        Path(box.folder, "want").touch()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert {end for rank in range(3) for end in ends_in(box.log(rank))} == set(ends_in(clean.stdout))
    (lost,) = [event for event in box.events() if event["kind"] == "worker_lost"]
    assert (lost["rank"], lost["data"]["id"], lost["data"]["code"]) == (1, "1.0", -9)
    worlds = [event["data"]["members"] for event in box.events() if event["kind"] == "world"]
    assert worlds[-1] != worlds[0]
    assert all("1.0" not in members for members in worlds if members != worlds[0])
    assert not [event for event in box.events() if event["kind"] == "resumed"], "nobody went back to a checkpoint"
