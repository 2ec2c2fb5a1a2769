"""`shoal top` on real terminals: tmux, whose screen can be read, and a pty that can only print."""

import contextlib
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from observed import python

from shoal.testing import rigs

LIVE = """
run = folder.claim(sys.argv[1], {"command": ["shoal", "run", "-n", "2", "train.py"], "num_workers": 2}, time.time())
with open(os.path.join(run.path, "logs", "0.log"), "w") as log:
    log.write("\\x1b[2Jprinted by rank 0\\n")
book = journal.Journal(os.path.join(run.path, "journal.jsonl"))
book.write(Event(kind="worker_lost", time=time.time(), rank=1, data={"reason": "\\x1b[2Jkilled"}))
writers = [metrics.MetricsWriter(run.path, rank) for rank in range(2)]
print("up", flush=True)
step = 0
while True:
    for writer in writers:
        writer.write(make_step(step))
    step += 1
    time.sleep(0.05)
"""


class Tmux:
    """A terminal of its own, with `shoal top` on it."""

    def __init__(self, home: Path, columns: int, rows: int, *args: str, **env: str) -> None:
        self._socket = f"shoal-{os.getpid()}-{time.monotonic_ns()}"
        variables = {"SHOAL_HOME": str(home), "LC_ALL": "C.UTF-8", **env}
        command = ["env", *(f"{name}={value}" for name, value in variables.items())]
        command += [sys.executable, "-m", "shoal", "top", *args]
        self._code = home / f"code-{time.monotonic_ns()}"
        command = ["sh", "-c", f'trap : INT; "$@"; echo $? > {self._code}', "sh", *command]
        size = ("-x", str(columns), "-y", str(rows))
        self.run("-f", "/dev/null", "new-session", "-d", *size, *command)
        self.run("set-option", "-g", "remain-on-exit", "on")

    def run(self, *args: str) -> str:
        done = subprocess.run(
            ["tmux", "-L", self._socket, *args], capture_output=True, text=True, timeout=20, check=True
        )
        return done.stdout

    def screen(self, *options: str) -> str:
        return self.run("capture-pane", "-p", *options)

    def wait_for(self, pattern: str, *options: str, seconds: float = 30.0) -> str:
        deadline = time.monotonic() + seconds
        while not re.search(pattern, shown := self.screen(*options), re.MULTILINE):
            assert time.monotonic() < deadline, f"no {pattern!r} in:\n{shown}"
            time.sleep(0.05)
        return shown

    def press(self, *keys: str) -> None:
        self.run("send-keys", *keys)

    def wait_for_end(self, seconds: float = 20.0) -> str:
        """The exit code."""
        deadline = time.monotonic() + seconds
        while not (self._code.exists() and (said := self._code.read_text().strip())):
            assert time.monotonic() < deadline, self.screen()
            time.sleep(0.05)
        return said

    def close(self) -> None:
        with contextlib.suppress(subprocess.SubprocessError):
            self.run("kill-server")


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A run that goes on, and two that are over, one with a hostile name."""
    for name, status in (("old", "finished"), ("<b>\x1b[31m\u202e", "failed")):
        (tmp_path / "runs" / name).mkdir(parents=True)
        facts = {"name": "x", "status": status, "created": 5, "ended": 65, "exit_code": 1, "command": "shoal run"}
        (tmp_path / "runs" / name / "run.json").write_text(json.dumps(facts))
    with python(LIVE, tmp_path / "runs" / "live", stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield tmp_path


@contextlib.contextmanager
def terminal(*args: object, **env: str) -> Iterator[Tmux]:
    made = Tmux(*args, **env)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.close()


@pytest.mark.skipif(shutil.which("tmux") is None, reason=f"{rigs.machine.LACKS} tmux")
class TestTerminal:
    def test_runs_are_shown_opened_and_left(self, home: Path) -> None:
        with terminal(home, 80, 24) as screen:
            shown = screen.wait_for(r"^live +running +2 +\d+ ")
            lines = shown.rstrip("\n").split("\n")
            assert len(lines) == 24
            assert "1 running with 2 workers, 2 ended" in lines[0]
            assert "failed" in shown
            assert "<b>" in shown
            assert lines[-1].split()[:2] == ["q", "quit"]
            before = re.search(r"^live +running +2 +(\d+) ", shown, re.MULTILINE)
            assert before is not None
            screen.wait_for(rf"^live +running +2 +(?!{before[1]} )\d+ ")
            screen.press("Enter")
            shown = screen.wait_for(r"^ +1 +\d+ .*%")
            assert "worker_lost" in shown
            assert "reason killed" in shown
            screen.press("l")
            screen.wait_for(r"^\[0\] printed by rank 0")
            screen.run("resize-window", "-x", "60", "-y", "12")
            screen.wait_for(r"\A(.*\n){11} q +quit")
            screen.press("Escape")
            screen.wait_for(r"^RUN +STATUS")
            screen.press("?")
            screen.wait_for("select a run")
            screen.press("x", "p")
            screen.wait_for("PAUSED")
            screen.press("q")
            assert screen.wait_for_end() == "0"

    def test_colours_unless_nobody_wants_them(self, home: Path) -> None:
        with terminal(home, 200, 50) as screen:
            shown = screen.wait_for("failed", "-e")
            assert "\x1b[31m" in shown, "a run that failed is red"
            assert "COMMAND" in shown
        with terminal(home, 200, 50, NO_COLOR="1") as screen:
            shown = screen.wait_for("failed", "-e")
            assert "\x1b[31m" not in shown

    def test_ctrl_c_ends_it(self, home: Path) -> None:
        with terminal(home, 80, 24, "live") as screen:
            screen.wait_for(r"^ +1 +\d+ .*%")
            screen.press("C-c")
            assert screen.wait_for_end() == "0"
            assert "Traceback" not in screen.screen()


def test_a_terminal_that_can_only_print_gets_lines(home: Path) -> None:
    master, slave = pty.openpty()
    env = {**os.environ, "SHOAL_HOME": str(home), "TERM": "dumb"}
    command = [sys.executable, "-m", "shoal", "top"]
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True)
    os.close(slave)
    try:
        text, deadline = "", time.monotonic() + 30
        while "live" not in text:
            assert time.monotonic() < deadline, text
            if select.select([master], [], [], 0.1)[0]:
                text += os.read(master, 65536).decode()
        assert re.match(r"--- \d\d:\d\d:\d\d\r\nRUN +STATUS", text)
        assert "\x1b" not in text
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
    finally:
        process.kill()
        process.wait()
        os.close(master)
