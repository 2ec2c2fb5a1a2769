"""Stacks from outside, by py-spy: with the frames of C and C++, and of processes that cannot answer any more.

Who starts workers looks into them, on each machine the one that is there. That takes seconds, and a thread does it;
what was seen is found in a file of the run folder by whoever asked, who has a word for it.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from queue import Empty, SimpleQueue

DUMP_SECONDS = 20.0
AT_ONCE = 8
"""Each reads the symbols of torch first, which takes most of the time and a part of the memory."""
MAX_CHARS = 500_000


def find_py_spy() -> str | None:
    """The program, beside our interpreter or anywhere on the PATH."""
    beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
    return beside if os.access(beside, os.X_OK) else shutil.which("py-spy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What was seen of one worker: `text`, or `why` nothing was. `has_program`: py-spy is there, where it runs."""

    rank: int
    text: str = ""
    why: str = ""
    has_program: bool = True


def look_into_all(pids: Mapping[int, int], tell: Callable[[Look], None]) -> None:
    """Look into processes of this machine, some at the same time. Returns at once; threads of its own call `tell`."""
    program, left = find_py_spy(), SimpleQueue[tuple[int, int]]()
    for pair in pids.items():
        left.put(pair)
    for _ in range(min(len(pids), AT_ONCE)):
        threading.Thread(target=_look_into_each, args=(program, left, tell), name="shoal-look", daemon=True).start()


def _look_into_each(program: str | None, left: "SimpleQueue[tuple[int, int]]", tell: Callable[[Look], None]) -> None:
    with contextlib.suppress(Empty):
        while True:
            rank, pid = left.get_nowait()
            if program is None:
                why = f"py-spy is not installed on {socket.gethostname()}: run `pip install 'shoal[py-spy]'` there"
                tell(Look(rank=rank, why=why, has_program=False))
            else:
                text, why = look_into(program, pid)
                tell(Look(rank=rank, text=text[:MAX_CHARS], why=why))


def write_look(run_dir: str, word: str, look: Look) -> None:
    """Leave it where `read_look` finds it. On a full disk it is lost."""
    path = _path(run_dir, look.rank)
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(f"{path}.new", "w", encoding="utf-8", errors="replace") as file:
            json.dump({"id": word, "look": asdict(look)}, file)
        os.replace(f"{path}.new", path)
    except OSError:
        return


def read_look(run_dir: str, word: str, rank: int) -> Look | None:
    """What was seen of a rank when that was asked for with this word; None where it is not there yet."""
    try:
        with open(_path(run_dir, rank), encoding="utf-8", errors="replace") as file:
            told = json.load(file)
        return Look(**told["look"]) if told["id"] == word else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _path(run_dir: str, rank: int) -> str:
    return os.path.join(run_dir, "stacks", f"{rank}.native.json")


def look_into(program: str, pid: int) -> tuple[str, str]:
    """What a process is doing, as text; or nothing, and why.

    It stands still for some milliseconds meanwhile. One that is stopped is looked at as it is, without native frames.
    """
    text, why = _dump(program, pid, "--native")
    if not text:
        text, other = _dump(program, pid, "--nonblocking")
        why = "" if text else why or other
    return text, why


def _dump(program: str, pid: int, how: str) -> tuple[str, str]:
    command = [program, "dump", how, "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DUMP_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return "", f"py-spy did not come back within {DUMP_SECONDS:.0f} s"
    except OSError as error:
        return "", f"py-spy cannot be run: {error.strerror or error}"
    if done.returncode == 0 and "Thread" in done.stdout:
        return done.stdout.strip(), ""
    said = next((line for line in (done.stderr + done.stdout).splitlines() if line.startswith("Error")), "it failed")
    if "ermission" in done.stderr:
        said = "it may not look into other processes: run it as root, or set kernel.yama.ptrace_scope to 0"
    return "", f"py-spy: {said}"
