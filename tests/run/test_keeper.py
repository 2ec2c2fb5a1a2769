"""Attempts at jobs: made once, never two at a time, found again by whoever looks, ended for named reasons."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shoal.observe.runs import is_held
from shoal.service.attempts import Orders, Seen, look, resize, start, stop
from shoal.service.orders import Size
from shoal.service.processes import marked
from shoal.spec.errors import UserError
from shoal.testing import rigs

STORY = "import os\nwith open('story', 'a') as file: print('ran', os.environ['SHOAL_ATTEMPT'], file=file)\n"
WAITING = STORY + "import time\ntime.sleep(60)\n"
HOG = (
    STORY
    + "block = bytearray(%d << 20)\nfor at in range(0, len(block), 4096): block[at] = 1\nimport time\ntime.sleep(60)"
)
UNEVEN = """
import os, time
block = bytearray((200 if os.environ["RANK"] == "0" else 20) << 20)
for at in range(0, len(block), 4096): block[at] = 1
time.sleep(60)
"""
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
    trainer.fit(steps=int(sys.argv[1]))
    with open("digest-" + sys.argv[2], "w") as file:
        file.write(trainer.digest())
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """SHOAL_HOME and a folder of jobs; nothing of them is left in the end."""
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    (tmp_path / "jobs").mkdir()
    yield tmp_path
    folders = [each for each in (tmp_path / "jobs").glob("*/*") if each.is_dir()]
    for each in folders:
        stop(jobs_of(tmp_path), each.parent.name, int(each.name), "cancel")
    wait_until(lambda: not any(is_held(str(each)) for each in folders) and not marked(folders))


def jobs_of(home: Path) -> str:
    return str(home / "jobs")


def orders(home: Path, script: str, *args: str, job: str = "7", token: int = 1, **more: object) -> Orders:
    path = home / f"{job}.py"
    path.write_text(textwrap.dedent(script))
    usual = {"cwd": str(home), "run_name": f"job-{job}", "argv": (str(path), *args), "grace_seconds": 10.0}
    return Orders(job=job, token=token, **{**usual, **more})  # type: ignore[arg-type]


def wait_until(is_so: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)


def wait_for_end(home: Path, job: str = "7", token: int = 1) -> Seen:
    wait_until(lambda: look(jobs_of(home), job, token).state == "ended")
    return look(jobs_of(home), job, token)


def story(home: Path) -> list[str]:
    return (home / "story").read_text().split() if (home / "story").exists() else []


def wait_for_steps(home: Path, num_steps: int, token: int = 1) -> None:
    wait_until(lambda: (look(jobs_of(home), "7", token).step or 0) >= num_steps)


def test_an_attempt_is_made_once_and_a_lower_token_never(home: Path) -> None:
    assert look(jobs_of(home), "7", 2).state == "absent"
    for _ in range(4):
        start(jobs_of(home), orders(home, STORY, token=2))
    seen = wait_for_end(home, token=2)
    assert (seen.cause, seen.exit_code) == ("finished", 0)
    assert Path(seen.run_dir).name == "job-7"
    start(jobs_of(home), orders(home, STORY, token=2))
    start(jobs_of(home), orders(home, STORY, token=1))
    wait_until(lambda: not marked([home / "jobs" / "7" / "1", home / "jobs" / "7" / "2"]))
    assert story(home) == ["ran", str(home / "jobs" / "7" / "2")]
    assert look(jobs_of(home), "7", 1).state == "absent"


def test_a_killed_keeper_takes_its_job_along_and_the_next_attempt_runs(home: Path) -> None:
    start(jobs_of(home), orders(home, WAITING))
    wait_until(lambda: story(home))
    os.kill(json.loads((home / "jobs/7/1/claimed.json").read_text())["pid"], signal.SIGKILL)
    start(jobs_of(home), orders(home, STORY, token=2))
    assert wait_for_end(home, token=2).cause == "finished"
    lost = look(jobs_of(home), "7", 1)
    assert (lost.state, lost.cause, lost.is_alive) == ("ended", "lost", False)
    assert not marked([home / "jobs" / "7" / "1"])
    assert story(home)[1::2] == [str(home / "jobs" / "7" / token) for token in "12"]


def test_stopped_before_it_began_it_never_runs(home: Path) -> None:
    start(jobs_of(home), orders(home, WAITING))
    stop(jobs_of(home), "7", 1, "cancel")
    seen = wait_for_end(home)
    assert seen.cause == "cancelled"
    assert story(home) == []


@pytest.mark.slow
def test_more_time_than_it_asked_for(home: Path) -> None:
    start(jobs_of(home), orders(home, WAITING, time_limit_seconds=1.5))
    assert wait_for_end(home).cause == "time_limit"


@pytest.mark.slow
def test_what_went_wrong_is_told(home: Path) -> None:
    start(jobs_of(home), orders(home, "raise ValueError('no such shape')\n"))
    seen = wait_for_end(home)
    assert (seen.cause, seen.exit_code) == ("failed", 1)
    assert "no such shape" in seen.message


@pytest.mark.slow
def test_one_that_does_not_end_is_killed_after_its_grace(home: Path) -> None:
    start(
        jobs_of(home), orders(home, "import signal\nsignal.signal(15, signal.SIG_IGN)\n" + WAITING, grace_seconds=0.5)
    )
    wait_until(lambda: story(home))
    stop(jobs_of(home), "7", 1, "preempt")
    seen = wait_for_end(home)
    assert seen.cause == "preempted"
    assert "killed" in seen.message


@rigs.needs("memory cgroups")
def test_who_takes_too_much_is_named_and_a_neighbour_goes_on(home: Path) -> None:
    start(jobs_of(home), orders(home, WAITING, job="good", memory_bytes=1 << 30))
    start(jobs_of(home), orders(home, HOG % 900, job="hog", memory_bytes=256 << 20))
    seen = wait_for_end(home, job="hog")
    assert seen.cause == "out_of_memory"
    assert "Job hog" in seen.message
    assert "0.25 GiB" in seen.message
    assert "memory" in seen.limits
    assert look(jobs_of(home), "good", 1).is_alive


def test_what_the_largest_worker_used_is_told_beside_what_all_used(home: Path) -> None:
    start(jobs_of(home), orders(home, UNEVEN, num_workers=2, min_workers=2, max_workers=2))
    wait_until(lambda: look(jobs_of(home), "7", 1).peak_memory_bytes > 230 << 20)
    seen = look(jobs_of(home), "7", 1)
    assert 200 << 20 < seen.worker_peak_bytes < seen.peak_memory_bytes - (20 << 20)
    stop(jobs_of(home), "7", 1, "cancel")


@pytest.mark.slow
def test_without_control_groups_memory_is_watched(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keeper is started by hand, and told that it may make no groups."""
    monkeypatch.setattr("shoal.service.attempts._have_kept", lambda folder: None)
    start(jobs_of(home), orders(home, HOG % 600, memory_bytes=256 << 20))
    code = (
        "import sys; from pathlib import Path; from shoal.service import cage, keeper; "
        "cage.find_parent = lambda controller: None; sys.exit(keeper.main(Path(sys.argv[1])))"
    )
    subprocess.run([sys.executable, "-c", code, str(home / "jobs" / "7" / "1")], check=True, timeout=60)
    seen = look(jobs_of(home), "7", 1)
    assert (seen.cause, seen.limits) == ("out_of_memory", ("watchdog",))
    assert "rank 0 had" in seen.message


@pytest.mark.slow
def test_a_preempted_job_goes_on_where_it_was_and_comes_to_the_same(home: Path) -> None:
    start(jobs_of(home), orders(home, TRAINING, "60", "still", job="still"))
    assert wait_for_end(home, job="still").cause == "finished"
    start(jobs_of(home), orders(home, TRAINING, "60", "7"))
    wait_for_steps(home, 5)
    stop(jobs_of(home), "7", 1, "preempt")
    assert wait_for_end(home).cause == "preempted"
    start(jobs_of(home), orders(home, TRAINING, "60", "7", token=2, is_resumed=True))
    assert wait_for_end(home, token=2).cause == "finished"
    assert (home / "digest-7").read_text() == (home / "digest-still").read_text()
    rows = (home / "home/runs/job-7/metrics-0.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == list(range(60)), "each step once"


@pytest.mark.slow
def test_a_preempted_job_saves_a_step_that_takes_longer_than_a_moment(home: Path) -> None:
    """A step of 3 s, 0.4 s a shard: workers have the grace of the job, not the 2 s that a terminal gives."""
    start(jobs_of(home), orders(home, TRAINING.replace("0.02", "0.4"), "90", "7", grace_seconds=20.0))
    wait_for_steps(home, 1)
    stop(jobs_of(home), "7", 1, "preempt")
    seen = wait_for_end(home)
    assert (seen.cause, seen.message) == ("preempted", "")
    assert list((home / "home/runs/job-7/checkpoints").glob("step-*"))


@pytest.mark.slow
def test_an_elastic_job_begins_with_what_it_was_given_and_changes_its_size(home: Path) -> None:
    size = {"min_workers": 1, "max_workers": 2, "num_workers": 1, "memory_bytes": 1 << 30}
    says = "import os\n    open('gpus-' + os.environ['RANK'], 'w').write(os.environ['CUDA_VISIBLE_DEVICES'])\n    "
    script = TRAINING.replace("import sys", says + "import sys")
    start(jobs_of(home), orders(home, script, "5000", "7", devices={os.uname().nodename: (3,)}, **size))
    wait_for_steps(home, 3)
    assert look(jobs_of(home), "7", 1).num_workers == 1
    for num_workers, gpus in ((2, (3, 5)), (1, (3,))):
        resize(jobs_of(home), "7", 1, Size(num_workers=num_workers, gpus=gpus))
        wait_until(lambda wanted=num_workers: look(jobs_of(home), "7", 1).num_workers == wanted)  # type: ignore[misc]
    assert [(home / f"gpus-{rank}").read_text() for rank in range(2)] == ["3", "3,5"]
    stop(jobs_of(home), "7", 1, "preempt")
    assert wait_for_end(home).cause == "preempted"


@rigs.needs("root", "mount", "mounting")
@pytest.mark.slow
def test_a_full_disk_hides_nothing(home: Path) -> None:
    """What became of an attempt is told though the job has filled the disk; where there is no room, none begins."""
    with rigs.small_disk(4) as disk:
        jobs = str(disk.path / "jobs")
        start(jobs, orders(home, f"open({str(disk.path / 'big')!r}, 'wb').write(bytes(8 << 20))\n"))
        wait_until(lambda: look(jobs, "7", 1).state == "ended")
        assert look(jobs, "7", 1).cause == "failed"
        assert look(jobs, "7", 1).exit_code == 1
        with pytest.raises(UserError, match="cannot be started"):
            start(jobs, orders(home, STORY, token=2))
        assert look(jobs, "7", 2).state == "absent"
        (disk.path / "big").unlink()
        start(jobs, orders(home, STORY, token=2, is_resumed=True))
        wait_until(lambda: look(jobs, "7", 2).state == "ended" and not look(jobs, "7", 2).is_alive)
        assert look(jobs, "7", 2).cause == "finished"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_whatever_is_killed_nothing_runs_twice(home: Path) -> None:
    """Keeper, launcher, worker or several are killed at random moments; each attempt says when it begins and ends."""
    script = STORY + "import time\ntime.sleep(0.3)\n" + STORY.split("\n")[1].replace("'ran'", "'end'")
    dice = random.Random(1)
    for token in range(1, 41):
        start(jobs_of(home), orders(home, script, token=token))
        time.sleep(dice.uniform(0.0, 1.5))
        for pid in marked([home / "jobs" / "7" / str(token)]):
            if dice.random() < 0.6:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not marked([home / "jobs" / "7" / str(token) for token in range(1, 41)]))
    lines = (home / "story").read_text().splitlines()
    current = 0
    for line in lines:
        word, _, folder = line.partition(" ")
        token = int(Path(folder).name)
        assert token > current if word == "ran" else token == current, f"{line} after attempt {current} began"
        current = token
    assert current > 0
