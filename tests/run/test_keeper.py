"""Attempts of jobs: made once, never two at a time, found again by whoever looks, ended for named reasons."""

import os
import random
import signal
import subprocess
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shoal.service import attempts
from shoal.service.attempts import Orders, Seen, look, resize, start, stop
from shoal.service.isolate import left_behind
from shoal.spec.errors import UserError

QUICK = "print('hello from the job', flush=True)\n"
WAITING = "import time\nprint('up', flush=True)\ntime.sleep(60)\n"
TRAINING = """
    import sys, time
    import torch
    import shoal

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    data = torch.arange(64 * 4.0).reshape(64, 4) / 256

    def loss(model, batch):
        time.sleep(0.02)
        return (model(batch) ** 2).mean()

    trainer = shoal.Trainer(model, loss, torch.optim.SGD(model.parameters(), 0.1), data, batch_size=8, exact=True)
    trainer.fit(epochs=int(sys.argv[1]))
    print("digest", [round(float(value), 9) for value in model.weight.detach().flatten()], flush=True)
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """SHOAL_HOME and a folder of jobs; nothing of them is left in the end."""
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    (tmp_path / "jobs").mkdir()
    yield tmp_path
    for job in (tmp_path / "jobs").iterdir():
        for token in [name.name for name in job.iterdir() if name.name.isdigit()]:
            stop(str(tmp_path / "jobs"), job.name, int(token), "cancel")
    wait_until(lambda: not any(attempts.is_locked(str(job / "lock")) for job in (tmp_path / "jobs").iterdir()))


def orders(home: Path, script: str, *args: str, job: str = "7", token: int = 1, **more: object) -> Orders:
    path = home / f"{job}.py"
    path.write_text(textwrap.dedent(script))
    usual = {"cwd": str(home), "run_name": f"job-{job}", "argv": (str(path), *args), "grace_seconds": 10.0}
    return Orders(job=job, token=token, **{**usual, **more})  # type: ignore[arg-type]


def jobs_of(home: Path) -> str:
    return str(home / "jobs")


def wait_until(is_so: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)


def wait_for(home: Path, state: str, job: str = "7", token: int = 1) -> Seen:
    wait_until(lambda: look(jobs_of(home), job, token).state == state)
    return look(jobs_of(home), job, token)


def output(home: Path, job: str = "7", token: int = 1) -> str:
    return (home / "jobs" / job / str(token) / "output.log").read_text()


def test_an_attempt_is_made_once_and_what_became_of_it_stays_known(home: Path) -> None:
    assert look(jobs_of(home), "7", 1).state == "absent"
    for _ in range(4):
        start(jobs_of(home), orders(home, QUICK))
    seen = wait_for(home, "ended")
    assert (seen.cause, seen.exit_code, seen.is_alive) == ("finished", 0, False)
    start(jobs_of(home), orders(home, QUICK))
    wait_until(lambda: not left_behind_keepers(home))
    assert output(home).count("hello from the job") == 1
    assert Path(seen.run_dir or "").name == "job-7"


def test_an_older_attempt_never_runs_after_a_newer_one(home: Path) -> None:
    start(jobs_of(home), orders(home, QUICK, token=2))
    wait_for(home, "ended", token=2)
    start(jobs_of(home), orders(home, QUICK, token=1))
    wait_until(lambda: not left_behind_keepers(home))
    assert "hello" not in output(home, token=1)
    assert look(jobs_of(home), "7", 1).state == "starting"


def left_behind_keepers(home: Path) -> bool:
    found = subprocess.run(["pgrep", "-f", f"shoal.service.keeper {home}"], capture_output=True, check=False)
    return found.returncode == 0


@pytest.mark.parametrize(("why", "cause"), [("cancel", "cancelled"), ("preempt", "preempted")])
def test_stopped_for_a_reason(home: Path, why: str, cause: str) -> None:
    start(jobs_of(home), orders(home, WAITING))
    wait_until(lambda: "up" in output(home))
    assert look(jobs_of(home), "7", 1).is_alive
    stop(jobs_of(home), "7", 1, why)
    assert wait_for(home, "ended").cause == cause
    assert not left_behind(f"SHOAL_ATTEMPT={home}/jobs/7/1")


def test_more_time_than_it_asked_for(home: Path) -> None:
    start(jobs_of(home), orders(home, WAITING, time_limit_seconds=1.0))
    assert wait_for(home, "ended").cause == "time_limit"


def test_a_failure_is_a_failure(home: Path) -> None:
    start(jobs_of(home), orders(home, "raise SystemExit(3)\n"))
    seen = wait_for(home, "ended")
    assert (seen.cause, seen.exit_code) == ("failed", 3)


def test_who_takes_too_much_is_named_and_a_neighbour_goes_on(home: Path) -> None:
    hog = "import time\nblock = bytearray(900 << 20)\nfor at in range(0, len(block), 4096): block[at] = 1\ntime.sleep(60)"
    start(jobs_of(home), orders(home, WAITING, job="good", memory_bytes=1 << 30))
    start(jobs_of(home), orders(home, hog, job="hog", memory_bytes=256 << 20))
    seen = wait_for(home, "ended", job="hog")
    assert seen.cause == "oom"
    assert "0.25 GiB" in seen.message
    assert "--memory" in seen.message
    assert look(jobs_of(home), "good", 1).state in ("starting", "running")


def test_a_keeper_that_is_killed_takes_its_job_with_it_before_the_next_attempt_begins(home: Path) -> None:
    start(jobs_of(home), orders(home, WAITING))
    wait_until(lambda: "up" in output(home))
    keeper = int(
        subprocess.run(["pgrep", "-f", "shoal.service.keeper"], capture_output=True, text=True).stdout.split()[0]
    )
    os.kill(keeper, signal.SIGKILL)
    start(jobs_of(home), orders(home, QUICK, token=2))
    assert wait_for(home, "ended", token=2).cause == "finished"
    assert look(jobs_of(home), "7", 1).cause == "lost"
    assert not left_behind(f"SHOAL_ATTEMPT={home}/jobs/7/1")


def test_ids_never_become_paths(home: Path) -> None:
    for bad in ("../7", "a/b", "", ".", "..", "x" * 65, "a\0b", "-rf"):
        with pytest.raises(UserError, match="cannot be the id"):
            look(jobs_of(home), bad, 1)


def test_a_preempted_job_goes_on_where_it_was_and_comes_to_the_same(home: Path) -> None:
    start(jobs_of(home), orders(home, TRAINING, "6", job="still"))
    start(jobs_of(home), orders(home, TRAINING, "6", job="7"))
    wait_until(lambda: (look(jobs_of(home), "7", 1).step or 0) >= 5)
    stop(jobs_of(home), "7", 1, "preempt")
    assert wait_for(home, "ended").cause in ("preempted", "finished")
    start(jobs_of(home), orders(home, TRAINING, "6", token=2, is_resumed=True))
    assert wait_for(home, "ended", token=2).cause == "finished"
    assert wait_for(home, "ended", job="still").cause == "finished"
    digests = [line for name, token in (("still", 1), ("7", 2)) for line in output(home, name, token).splitlines()]
    found = [line.partition("digest ")[2] for line in digests if "digest " in line]
    assert len(found) == 2
    assert found[0] == found[1]


def test_an_elastic_job_begins_with_what_it_was_given_and_changes_its_size(home: Path) -> None:
    size = {"min_workers": 1, "max_workers": 2, "num_workers": 1}
    start(jobs_of(home), orders(home, TRAINING, "200", **size))
    wait_until(lambda: (look(jobs_of(home), "7", 1).step or 0) >= 3)
    assert look(jobs_of(home), "7", 1).num_workers == 1
    resize(jobs_of(home), "7", 1, 2)
    wait_until(lambda: look(jobs_of(home), "7", 1).num_workers == 2)
    stop(jobs_of(home), "7", 1, "preempt")
    assert wait_for(home, "ended").cause == "preempted"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_whatever_is_killed_nothing_runs_twice(home: Path) -> None:
    """Keeper, launcher or both are killed at random moments; each attempt writes when it begins and when it ends."""
    script = f"""
        import os, time
        with open({str(home / "story")!r}, "a") as file:
            for word in ("begin", "end"):
                print(word, os.environ["SHOAL_ATTEMPT"], file=file, flush=True)
                time.sleep(0.3)
    """
    dice = random.Random(1)
    for token in range(1, 101):
        start(jobs_of(home), orders(home, script, token=token))
        time.sleep(dice.uniform(0.0, 0.8))
        for pid in left_behind(f"SHOAL_ATTEMPT={home}/jobs/7/{token}") + keepers_of(home):
            if dice.random() < 0.7:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
    wait_until(lambda: not left_behind_keepers(home))
    story = (home / "story").read_text().splitlines()
    current = ""
    for line in story:
        word, _, attempt = line.partition(" ")
        number = int(attempt.rpartition("/")[2])
        assert word == "begin" or attempt == current, f"{attempt} goes on after {current} began"
        assert number >= int(current.rpartition("/")[2] or 0), "an older attempt ran later"
        current = attempt


def keepers_of(home: Path) -> list[int]:
    found = subprocess.run(
        ["pgrep", "-f", f"shoal.service.keeper {home}"], capture_output=True, text=True, check=False
    )
    return [int(pid) for pid in found.stdout.split() if int(pid) != os.getpid()]
