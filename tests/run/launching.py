"""What the tests of launching share: a place for scripts and runs, and an eye on processes that stay behind."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

SHOAL = (sys.executable, "-m", "shoal")
# Runs end within 3 s of a signal, on a machine with nothing else to do. What they are in lasts for a minute.
IN_TIME = 20.0


class Box:
    """A folder with scripts and a SHOAL_HOME of its own. Every process started here carries a mark."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.mark = uuid.uuid4().hex
        self.env = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "MKL_"))}
        self.env |= {"SHOAL_HOME": str(self.home), "BOX_MARK": self.mark, "BOX": str(folder)}

    def write(self, name: str, source: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
        return path

    def run(self, *args: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run `shoal ARGS` to its end."""
        return self.execute(*SHOAL, *args, **options)

    def execute(self, *command: str, timeout: float = 100, **options: Any) -> subprocess.CompletedProcess[str]:
        options = {"cwd": self.folder, "env": self.env, "capture_output": True, "text": True, **options}
        if "input" not in options:
            options["stdin"] = options.get("stdin", subprocess.DEVNULL)
        return subprocess.run(command, timeout=timeout, check=False, **options)

    def start(self, *args: str, **options: Any) -> subprocess.Popen[str]:
        """Start `shoal ARGS` and go on."""
        options = {"cwd": self.folder, "env": self.env, "text": True, **options}
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        return subprocess.Popen([*SHOAL, *args], **options)

    def pids(self) -> list[int]:
        """Processes that carry the mark and live."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("BOX_MARK") == self.mark:
                    found.append(process.pid)
        return found

    def wait_for(self, condition: Callable[[], Any], seconds: float = 30.0) -> Any:
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            assert time.monotonic() < deadline, "it did not happen"
            time.sleep(0.01)
        return value

    def wait_for_files(self, *names: str) -> None:
        self.wait_for(lambda: all((self.folder / name).exists() for name in names))

    def wait_for_peace(self) -> None:
        """Wait until no marked process is left: 2 s are promised, which a busy machine may take longer for."""
        self.wait_for(lambda: not self.pids(), IN_TIME)

    def only_run(self) -> Path:
        (folder,) = (self.home / "runs").iterdir()
        return folder

    def facts(self) -> dict[str, Any]:
        return dict(json.loads((self.only_run() / "run.json").read_text()))

    def log(self, rank: int) -> str:
        return (self.only_run() / "logs" / f"{rank}.log").read_text(errors="replace")

    def events(self) -> list[dict[str, Any]]:
        lines = (self.only_run() / "journal.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def num_members(self, name: str) -> int:
        """How many are in the newest World of the run of that name; 0 before the first."""
        if not (self.home / "runs" / name / "journal.jsonl").exists():
            return 0
        worlds = [event for event in self.events() if event["kind"] == "world"]
        return len(worlds[-1]["data"]["members"]) if worlds else 0


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    """A Box that must be left without a process."""
    for number in (signal.SIGINT, signal.SIGHUP):
        # Tests that run in the background inherit these as ignored, and launchers would honour that.
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    box = Box(tmp_path)
    yield box
    left = box.pids()
    # The guard of a launcher that was killed ends a moment after its workers.
    deadline = time.monotonic() + IN_TIME
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left = box.pids()
    for pid in left:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    assert not left, "processes stayed behind"


def small_cluster(box: Box) -> None:
    """Executors of Spark's `local-cluster` keep their files under SPARK_HOME: give it one of its own."""
    import pyspark

    home = box.folder / "spark"
    home.mkdir()
    for part in Path(pyspark.__file__).parent.iterdir():
        if part.name != "work":
            (home / part.name).symlink_to(part)
    box.env["SPARK_HOME"] = str(home)


MPIRUN = """\
#!/bin/sh
while [ "$1" != "-n" ]; do shift; done
exec "$3" -c "{first}; raise SystemExit(agent.main())"
"""


LEASE = 2.0
"""Seconds, instead of ten: agents of some tests are told so, and launchers in the process of the tests."""
AGENT = f"from shoal.engine import agent; agent.LEASE_SECONDS = {LEASE}"


def mpirun_without_mpi(box: Box, first: str) -> None:
    """Let runs of this box find a `mpirun` that starts its agent here. `first` is what that does first."""
    mpirun = box.write("bin/mpirun", MPIRUN.format(first=first))
    mpirun.chmod(0o755)
    box.env["PATH"] = f"{mpirun.parent}:{os.environ['PATH']}"
