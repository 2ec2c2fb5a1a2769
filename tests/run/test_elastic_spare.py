"""A process that has imported torch beforehand becomes the next worker, and nobody can tell. Torch is a stand-in."""

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from launching import IN_TIME, Box, box
from test_elastic_launcher import Run

__all__ = ["box"]

TORCH = """
    import os, sys, time
    is_spare = sys.argv[0].endswith("spare.py")
    while is_spare and os.path.exists(os.path.join(os.environ["BOX"], "hold")):
        time.sleep(0.01)
    open(os.path.join(os.environ["BOX"], f"torch-{'spare' if is_spare else 'cold'}-{os.getpid()}"), "w").close()
"""
SEEN = """
    import helper, torch, json, os, sys, threading
    facts = {
        "argv": sys.argv, "file": __file__, "name": __name__, "path": sys.path[0], "cwd": os.getcwd(),
        "torch": torch.__file__, "helper": helper.__file__,
        "main": threading.current_thread() is threading.main_thread(),
        "env": {name: value for name, value in os.environ.items() if not name.endswith(("_FD", "_PID"))},
        "fds": len(os.listdir("/proc/self/fd")), "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "policy": os.sched_getscheduler(0), "stdin": sys.stdin.read(),
        "modules": sorted({"toy", "worker", "spare"} & set(sys.modules)),
        "group": os.getpgid(0) == os.getsid(0) == os.getpid(),
    }
    with open(f"seen-{os.environ['RANK']}.{os.environ['SHOAL_INCARNATION']}", "w") as file:
        json.dump(facts, file)
"""


class SpareRun(Run):
    """A run that keeps a spare. `sources` are more files beside the script."""

    def __init__(self, box: Box, size: str = "2:2", **sources: str) -> None:
        box.write("lib/torch.py", TORCH)
        box.write("helper.py", "")
        box.env["PYTHONPATH"] = str(box.folder / "lib")
        for name, source in sources.items():
            box.write(f"{name}.py", source)
        super().__init__(box, size, spares="1", before=SEEN)

    def wait_for_spare(self) -> int:
        """Wait until a spare that has not been used is ready; returns its process."""
        used = {self.pid(rank) for rank in range(2)}

        def ready() -> int:
            pids = [int(path.name.split("-")[2]) for path in self.box.folder.glob("torch-spare-*")]
            return next((pid for pid in pids if pid not in used and psutil.pid_exists(pid)), 0)

        return int(self.box.wait_for(ready))

    def seen(self, member: str) -> dict[str, Any]:
        return dict(json.loads((self.box.folder / f"seen-{member}").read_text()))


@pytest.fixture
def run(box: Box) -> Any:
    run = SpareRun(box)
    try:
        run.wait_for_members("0.0", "1.0")
        yield run
    finally:
        run.end()


def test_the_spare_becomes_the_worker(run: SpareRun) -> None:
    spare = run.wait_for_spare()
    os.kill(run.pid(1), signal.SIGKILL)
    run.wait_for_members("0.0", "1.1")
    assert run.pid(1) == spare
    assert list(run.box.folder.glob(f"torch-cold-{spare}")) == []
    before, after = run.seen("1.0"), run.seen("1.1")
    assert before["env"].pop("SHOAL_INCARNATION") == "0"
    assert after["env"].pop("SHOAL_INCARNATION") == "1"
    assert after == before
    run.finish()
    assert run.launcher.returncode == 0


def test_another_spare_follows(run: SpareRun) -> None:
    for number in range(1, 3):
        spare = run.wait_for_spare()
        os.kill(run.pid(0), signal.SIGKILL)
        run.wait_for_members("1.0", f"0.{number}")
        assert run.pid(0) == spare
    run.finish()


def test_one_that_still_imports_is_used_as_well(box: Box) -> None:
    (box.folder / "hold").touch()
    run = SpareRun(box)
    try:
        run.wait_for_members("0.0", "1.0")
        children = psutil.Process(run.launcher.pid).children
        box.wait_for(lambda: any("spare.py" in " ".join(child.cmdline()) for child in children()))
        os.kill(run.pid(1), signal.SIGKILL)
        box.wait_for(lambda: len(run.events("worker_started")) == 3)
        (box.folder / "hold").unlink()
        run.wait_for_members("0.0", "1.1")
        assert (box.folder / f"torch-spare-{run.pid(1)}").exists()
        run.finish()
    finally:
        run.end()


def test_without_one_a_worker_is_started_as_ever(run: SpareRun) -> None:
    os.kill(run.pid(1), signal.SIGKILL)
    run.wait_for_members("0.0", "1.1")
    assert (run.box.folder / f"torch-cold-{run.pid(1)}").exists()
    run.finish()


def test_a_file_of_the_users_comes_first_as_ever(box: Box) -> None:
    """The script has a torch of its own, beside it."""
    run = SpareRun(box, torch="import sys; sys.modules[__name__].mine = True")
    try:
        run.wait_for_members("0.0", "1.0")
        spare = run.wait_for_spare()
        os.kill(run.pid(1), signal.SIGKILL)
        run.wait_for_members("0.0", "1.1")
        assert run.pid(1) == spare
        assert run.seen("1.1")["torch"] == run.seen("1.0")["torch"] == str(box.folder / "torch.py")
        run.finish()
    finally:
        run.end()


def test_an_error_is_told_as_ever(run: SpareRun) -> None:
    run.wait_for_spare()
    os.kill(run.pid(1), signal.SIGKILL)
    run.wait_for_members("0.0", "1.1")
    (run.box.folder / "raise-1").touch()
    _, told = run.launcher.communicate(timeout=IN_TIME)
    assert "error: ValueError: a mistake of the user\n   at: rank 1, toy.py:" in told
    trace = (run.folder / "logs" / "1.log").read_text()
    assert "spare.py" not in trace
    assert "worker.py" not in trace


def test_the_spare_holds_nothing_of_the_run(run: SpareRun) -> None:
    folder = Path("/proc", str(run.wait_for_spare()), "fd")

    def kinds() -> list[str]:
        with contextlib.suppress(FileNotFoundError):  # one that was closed meanwhile: it still imports
            return sorted(os.readlink(path).partition(":")[0] for path in folder.iterdir())
        return []

    run.box.wait_for(lambda: kinds() == ["/dev/null", "/dev/null", "/dev/null", "socket"])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_the_launcher(run: SpareRun, number: signal.Signals) -> None:
    run.wait_for_spare()
    run.launcher.send_signal(number)
    run.launcher.communicate(timeout=IN_TIME)
    run.box.wait_for_peace()


def test_a_spare_that_was_killed_is_not_missed(run: SpareRun) -> None:
    spare = psutil.Process(run.wait_for_spare())
    spare.kill()
    run.box.wait_for(lambda: spare.status() == psutil.STATUS_ZOMBIE)
    os.kill(run.pid(1), signal.SIGKILL)
    run.wait_for_members("0.0", "1.1")
    run.finish()
    assert run.launcher.returncode == 0
