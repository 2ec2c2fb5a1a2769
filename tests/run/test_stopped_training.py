"""However a run is stopped, its workers save and end; resumed, it ends as one that was never stopped."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from launching import Box, box

__all__ = ["box"]

JOB = Path(__file__).parent / "stopped_job.py"
STEPS = 40


@pytest.fixture(scope="module")
def clean() -> dict[int, str]:
    """Digests after so many steps in one process, undisturbed."""
    digests = {}
    for steps in (STEPS, 6):
        done = subprocess.run(
            [sys.executable, str(JOB), str(steps), "0"], capture_output=True, text=True, timeout=60, check=True
        )
        digests[steps] = digest_in(done.stdout)
    return digests


def digest_in(text: str) -> str:
    (digest,) = set(re.findall(r"digest (\w+)", text))
    return str(digest)


class Run:
    """A run of the job that can be stopped."""

    def __init__(self, box: Box, size: str, steps: int = STEPS, pause: float = 0.05, **more: str) -> None:
        self.box, self.folder = box, box.home / "runs" / "r"
        shutil.copy(JOB, box.folder)
        box.env |= more
        self.launcher = box.start("run", "-n", size, "--name", "r", JOB.name, str(steps), str(pause))

    def events(self, kind: str) -> list[dict[str, Any]]:
        journal = self.folder / "journal.jsonl"
        lines = journal.read_text().splitlines() if journal.exists() else []
        return [event for event in map(json.loads, lines) if event["kind"] == kind]

    def num_steps(self) -> int:
        return max((len(file.read_text().splitlines()) for file in self.folder.glob("metrics-*.jsonl")), default=0)

    def stop(self, number: int) -> float:
        """Stop the launcher by a signal; returns after how long all was over."""
        began = time.monotonic()
        self.launcher.send_signal(number)
        self.box.wait_for_peace()
        return time.monotonic() - began

    def checkpoints(self) -> list[int]:
        names = os.listdir(self.folder / "checkpoints") if (self.folder / "checkpoints").exists() else []
        return sorted(int(found[1]) for name in names if (found := re.fullmatch(r"step-(\d+)(?:-g\d+)?", name)))

    def workers(self) -> tuple[int | None, int]:
        """The fewest, None where the run is not elastic, and the most."""
        facts = json.loads((self.folder / "run.json").read_text())
        return facts.get("min_workers"), facts["num_workers"]

    def resume(self, *args: str) -> str:
        """Go on to the end; returns the digest."""
        done = self.box.run("run", "--resume", "r", *args, timeout=60)
        assert done.returncode == 0, done.stderr
        return digest_in(done.stdout)


@pytest.mark.parametrize(
    ("size", "number"),
    [
        pytest.param("2", signal.SIGKILL, marks=pytest.mark.slow),
        ("1:2", signal.SIGKILL),
        pytest.param("1:2", signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_what_was_done_is_saved_and_gone_on_with(box: Box, clean: dict[int, str], size: str, number: int) -> None:
    run = Run(box, size)
    box.wait_for(lambda: run.num_steps() >= 5, 40)
    assert run.stop(number) < 12.0
    (saved,) = run.checkpoints()
    assert saved >= 5
    _, told = run.launcher.communicate()
    if number != signal.SIGKILL:
        assert f"shoal: saved at step {saved}; go on with `shoal run --resume r`" in told
    assert run.resume() == clean[STEPS]
    assert run.events("resumed")[-1]["step"] == saved
    assert run.workers() == (int(size[0]) if ":" in size else None, 2), "as many as before, and as few"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "workers"), [("1:2", "3", (None, 3)), ("2", "1", (None, 1)), ("2", "1:3", (1, 3))]
)
def test_after_a_killed_launcher_another_number_of_workers_goes_on(
    box: Box, clean: dict[int, str], before: str, after: str, workers: tuple[int | None, int]
) -> None:
    run = Run(box, before)
    box.wait_for(lambda: run.num_steps() >= 5, 40)
    run.stop(signal.SIGKILL)
    run.launcher.communicate()
    (saved,) = run.checkpoints()
    assert run.resume("-n", after) == clean[STEPS]
    assert run.events("resumed")[-1]["step"] == saved
    assert run.workers() == workers


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_with_long_steps_an_older_checkpoint_is_used(box: Box, clean: dict[int, str], number: int) -> None:
    run = Run(box, "1:2", steps=6, pause=1.6)
    box.wait_for(lambda: 2 in run.checkpoints() and run.num_steps() >= 3, 40)
    assert run.stop(number) < 3.5
    run.launcher.communicate()
    assert run.checkpoints()[-1] in (2, 3, 4)
    assert run.resume("stopped_job.py", "6", "0") == clean[6]


@pytest.mark.slow
def test_the_launcher_killed_while_a_checkpoint_is_written(box: Box, clean: dict[int, str]) -> None:
    faults = [{"kind": "kill_launcher", "rank": 0, "step": 4, "at": "saving", "incarnation": 0}]
    run = Run(box, "1:2", steps=6, pause=1.2, SHOAL_FAULTS=json.dumps(faults))
    assert run.launcher.wait(40) == -signal.SIGKILL
    box.wait_for_peace()
    run.launcher.communicate()
    assert run.events("fault")
    del box.env["SHOAL_FAULTS"]
    assert run.resume("stopped_job.py", "6", "0") == clean[6]


@pytest.mark.slow
def test_the_launcher_killed_in_the_middle_of_a_recovery(box: Box, clean: dict[int, str]) -> None:
    run = Run(box, "1:3")
    box.wait_for(lambda: run.num_steps() >= 5, 40)
    victim = next(event["data"]["pid"] for event in run.events("worker_started") if event["rank"] == 1)
    psutil.Process(victim).kill()
    box.wait_for(lambda: run.events("worker_lost"), 5)
    assert run.stop(signal.SIGKILL) < 2.5
    run.launcher.communicate()
    assert run.resume() == clean[STEPS]
