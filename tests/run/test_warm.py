"""Attempts whose processes are forked from one that has imported torch: nobody can tell, nothing depends on it."""

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from served import serving
from test_keeper import HOG, STORY, TRAINING, home, jobs_of, wait_for_end, wait_for_steps, wait_until
from test_keeper import orders as orders_of_one

from shoal.engine.machine import available_cores
from shoal.service.attempts import Orders, look, start, stop
from shoal.service.processes import marked
from shoal.service.warming import Warm
from shoal.testing import rigs

__all__ = ["home"]

SEEN = """
    import helper, gc, json, os, sys, threading, torch
    torch.manual_seed(3)
    facts = {
        "argv": sys.argv, "file": __file__, "name": __name__, "path": sys.path, "cwd": os.getcwd(),
        "helper": helper.__file__, "main": threading.current_thread() is threading.main_thread(),
        "env": {name: value for name, value in os.environ.items() if not name.endswith(("_FD", "_PID", "_PORT"))},
        "fds": len(os.listdir("/proc/self/fd")), "threads": torch.get_num_threads(),
        "policy": os.sched_getscheduler(0), "nice": os.getpriority(os.PRIO_PROCESS, 0), "stdin": sys.stdin.read(),
        "group": os.getpgid(0) == os.getsid(0) == os.getpid(), "umask": os.umask(0o22), "safe": sys.flags.safe_path,
        "modules": sorted({"worker", "spare", "warm", "keeper"} & set(sys.modules)), "gc": gc.isenabled(),
        "sum": torch.rand(1000, 1000).matmul(torch.rand(1000, 1000)).sum().item(),
    }
    kept = open(f"seen-{os.environ['RANK']}", "w")  # never closed: the end of Python writes it
    json.dump(facts, kept)
"""
DRAWN = """
    import json, os, random, uuid, numpy, torch, multiprocessing
    drawn = [random.random(), numpy.random.random(), torch.rand(()).item(), str(uuid.uuid4()),
             multiprocessing.current_process().authkey.hex()]
    with open(f"drawn-{os.environ['SHOAL_ATTEMPT'].rsplit('/')[-1]}-{os.environ['RANK']}", "w") as file:
        json.dump(drawn, file)
"""
LASTING = """
    import os, time
    open(f"up-{os.environ['RANK']}", "w").close()
    time.sleep(60)
"""


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    with contextlib.closing(Warm(lambda: True, quiet_seconds=0.0)) as warm:
        yield warm


def orders(home: Path, script: str, *args: str, **more: Any) -> Orders:
    """Two workers each: as the first of them, so that the warm process suits all."""
    return orders_of_one(home, script, *args, **{"min_workers": 2, "max_workers": 2, "num_workers": 2, **more})


def begin(warm: Warm, home: Path, asked: Orders) -> None:
    """Start an attempt from the warm process. The first call only has that made."""
    if not warm.pid:
        warm.fork(home / "nothing", asked)
    assert warm.wait(60)
    start(jobs_of(home), asked, lambda folder, orders: forked(warm, folder, orders))


def forked(warm: Warm, folder: Path, asked: Orders) -> bool:
    assert warm.fork(folder, asked)
    return True


def seen(home: Path, rank: int) -> dict[str, Any]:
    return dict(json.loads((home / f"seen-{rank}").read_text()))


def test_a_script_cannot_tell(home: Path, warm: Warm) -> None:
    (home / "helper.py").write_text("")
    start(jobs_of(home), orders(home, SEEN, "--lr", "0.1", token=1))
    assert wait_for_end(home, token=1).cause == "finished"
    plain = [seen(home, rank) for rank in range(2)]
    begin(warm, home, orders(home, SEEN, "--lr", "0.1", token=2))
    assert wait_for_end(home, token=2).cause == "finished"
    for rank, before in enumerate(plain):
        after = seen(home, rank)
        for facts in (before, after):
            for name in ("SHOAL_ATTEMPT", "SHOAL_RESUME", "TORCHELASTIC_RESTART_COUNT", "SHOAL_GENERATION"):
                facts["env"].pop(name)
        assert after == before


def test_each_process_draws_numbers_of_its_own(home: Path, warm: Warm) -> None:
    for token in (1, 2):
        begin(warm, home, orders(home, DRAWN, token=token))
        assert wait_for_end(home, token=token).cause == "finished"
    drawn = [json.loads((home / f"drawn-{token}-{rank}").read_text()) for token in (1, 2) for rank in (0, 1)]
    for values in zip(*drawn, strict=True):
        assert len(set(values)) == 4, values


def test_each_is_the_child_of_whom_it_would_be_and_is_found_by_its_mark(home: Path, warm: Warm) -> None:
    begin(warm, home, orders(home, LASTING))
    wait_until(lambda: (home / "up-0").exists() and (home / "up-1").exists())
    keeper = psutil.Process(json.loads((home / "jobs/7/1/claimed.json").read_text())["pid"])
    wait_until(lambda: look(jobs_of(home), "7", 1).pid)
    launcher = psutil.Process(look(jobs_of(home), "7", 1).pid)
    assert launcher.parent() == keeper
    workers = [each for each in launcher.children() if each.environ().get("RANK")]
    assert {each.environ()["RANK"] for each in workers} == {"0", "1"}
    assert {keeper.pid, launcher.pid, *(each.pid for each in workers)} <= set(marked([home / "jobs/7/1"]))
    assert warm.pid not in {each.pid for each in keeper.parents()}
    assert not any("lock" in file.path for each in workers for file in each.open_files())
    keeper.kill()
    wait_until(lambda: look(jobs_of(home), "7", 1).cause == "lost")
    wait_until(lambda: not marked([home / "jobs/7/1"]))


def test_variables_that_a_script_sets_before_torch_count(home: Path, warm: Warm) -> None:
    script = "import os\nos.environ['OMP_NUM_THREADS'] = '2'\nimport torch\n"
    script += "open('n', 'w').write(str(torch.get_num_threads()))\n"
    begin(warm, home, orders(home, script))
    assert wait_for_end(home).cause == "finished"
    assert (home / "n").read_text() == str(min(2, available_cores()))


@pytest.mark.slow
def test_a_file_beside_the_script_comes_first_as_ever(home: Path, warm: Warm) -> None:
    (home / "torch.py").write_text("mine = True\n")
    begin(warm, home, orders(home, "import torch\nopen('mine', 'w').write(torch.__file__)\n"))
    assert wait_for_end(home).cause == "finished"
    assert (home / "mine").read_text() == str(home / "torch.py")


@pytest.mark.slow
def test_a_job_with_variables_and_threads_of_its_own_is_forked_from_one_that_was_started_with_them(
    home: Path,
) -> None:
    asked = orders(home, SEEN, token=1, env={"LR": "1"})
    asked = replace(asked, argv=("--threads", "2", *asked.argv))
    (home / "helper.py").write_text("")
    start(jobs_of(home), asked)
    assert wait_for_end(home, token=1).cause == "finished"
    plain = seen(home, 0)
    assert (plain["threads"], plain["env"]["LR"]) == (2, "1")
    with contextlib.closing(Warm(lambda: True, quiet_seconds=0.0)) as warm:
        usual = orders(home, SEEN, token=2)
        for each in (usual, asked):
            warm.fork(home / "nothing", each)
            assert warm.wait(60)
        begin(warm, home, replace(asked, token=2))
        assert wait_for_end(home, token=2).cause == "finished"
        after = seen(home, 0)
        for name in ("SHOAL_ATTEMPT", "SHOAL_RESUME", "TORCHELASTIC_RESTART_COUNT", "SHOAL_GENERATION"):
            assert after["env"].pop(name) != plain["env"].pop(name) or name != "SHOAL_ATTEMPT"
        assert after == plain
        begin(warm, home, replace(usual, token=3))
        assert wait_for_end(home, token=3).cause == "finished"
        assert "LR" not in seen(home, 0)["env"]
        assert not warm.fork(home / "nothing", replace(usual, env={"LR": "2"})), "both places are taken for a minute"


@pytest.mark.slow
def test_what_goes_wrong_is_told_as_ever(home: Path, warm: Warm) -> None:
    begin(warm, home, orders(home, "raise ValueError('no such shape')\n"))
    told = wait_for_end(home)
    assert (told.cause, told.exit_code) == ("failed", 1)
    assert "no such shape" in told.message
    trace = (home / "home/runs/job-7/logs/0.log").read_text()
    assert not any(name in trace for name in ("warm.py", "spare.py", "worker.py", "keeper.py"))
    begin(warm, home, orders(home, "import sys\nsys.exit(3)\n", job="8"))
    assert wait_for_end(home, job="8").exit_code == 3
    begin(warm, home, orders(home, "", job="9", cwd=str(home / "gone")))
    assert "cannot be started" in wait_for_end(home, job="9").message


@pytest.mark.slow
@rigs.needs("memory cgroups")
def test_memory_is_held(home: Path, warm: Warm) -> None:
    begin(warm, home, orders(home, HOG % 900, memory_bytes=256 << 20))
    told = wait_for_end(home)
    assert (told.cause, "memory" in told.limits) == ("out_of_memory", True)


@pytest.mark.slow
def test_one_that_was_killed_is_not_missed(home: Path) -> None:
    with contextlib.closing(Warm(lambda: True, quiet_seconds=0.0)) as warm:
        begin(warm, home, orders(home, STORY, job="6"))
        os.kill(warm.pid or 0, signal.SIGKILL)
        start(jobs_of(home), orders(home, STORY), warm.fork)
        assert wait_for_end(home).cause == wait_for_end(home, job="6").cause == "finished"


@pytest.mark.slow
def test_it_ends_with_the_service_and_its_jobs_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    (tmp_path / "job.py").write_text("import os, time\nwhile not os.path.exists('go'): time.sleep(0.05)\n")
    with serving(tmp_path) as daemon, daemon.client() as client:
        client.submit("job.py", dir=str(tmp_path))

        def warm() -> list[psutil.Process]:
            assert daemon.process is not None
            children = psutil.Process(daemon.process.pid).children()
            return [child for child in children if any("warm.py" in part for part in child.cmdline())]

        wait_until(warm, 120)
        (process,) = warm()
        (job,) = client.submit("job.py", dir=str(tmp_path))
        wait_until(lambda: client.job(job)["state"] == "running")
        daemon.kill()
        wait_until(lambda: not process.is_running())
        daemon.start()
        (tmp_path / "go").touch()
        assert client.wait(job, 60)["state"] == "finished"
        assert daemon.stop() == 0, daemon.log


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_that_is_preempted_again_and_again_comes_to_the_same(home: Path, warm: Warm) -> None:
    start(jobs_of(home), orders(home, TRAINING, "90", "still", job="still"))
    assert wait_for_end(home, job="still").cause == "finished"
    token = 1
    begin(warm, home, orders(home, TRAINING, "90", "7", token=token))
    for steps in (10, 25, 45, 60):
        wait_for_steps(home, steps, token)
        stop(jobs_of(home), "7", token, "preempt")
        assert wait_for_end(home, token=token).cause == "preempted"
        token += 1
        begin(warm, home, orders(home, TRAINING, "90", "7", token=token, is_resumed=True))
    assert wait_for_end(home, token=token).cause == "finished"
    assert (home / "digest-7").read_text() == (home / "digest-still").read_text()
    rows = (home / "home/runs/job-7/metrics-0.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == list(range(90)), "each step once"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_whatever_is_killed_nothing_runs_twice(home: Path) -> None:
    """Warm process, keeper, launcher, worker or several are killed at random moments."""

    def orders(home: Path, script: str, **more: Any) -> Orders:
        return orders_of_one(home, script, **more)

    script = STORY + "import time\ntime.sleep(0.3)\n" + STORY.split("\n")[1].replace("'ran'", "'end'")
    dice, num_forked = random.Random(2), 0
    with contextlib.closing(Warm(lambda: True, quiet_seconds=0.0)) as warm:
        warm.fork(home / "nothing", orders(home, script))
        assert warm.wait(60)
        for token in range(1, 41):
            asked = orders(home, script, token=token)
            pid = warm.pid
            start(jobs_of(home), asked, warm.fork)
            num_forked += pid is not None and psutil.pid_exists(pid)
            time.sleep(dice.uniform(0.0, 1.0))
            victims = [pid for pid in marked([home / "jobs" / "7" / str(token)]) if dice.random() < 0.6]
            if token in (20, 30) and warm.pid:
                victims.append(warm.pid)
            for victim in victims:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
    assert num_forked >= 10
    wait_until(lambda: not marked([home / "jobs" / "7" / str(token) for token in range(1, 41)]))
    current = 0
    for line in (home / "story").read_text().splitlines():
        word, _, folder = line.partition(" ")
        token = int(Path(folder).name)
        assert token > current if word == "ran" else token == current, f"{line} after attempt {current} began"
        current = token
    assert current > 0
