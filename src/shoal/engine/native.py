"""Stacks from outside, by py-spy: with the frames of C and C++, and of processes that cannot answer any more."""

import os
import shutil
import subprocess
import sys

from shoal.spec.errors import UserError

DUMP_SECONDS = 20.0


def find_py_spy() -> str | None:
    """The program, beside our interpreter or anywhere on the PATH."""
    beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
    return beside if os.access(beside, os.X_OK) else shutil.which("py-spy")


def need_py_spy() -> str:
    found = find_py_spy()
    if found is None:
        raise UserError("py-spy is not installed.", hint="run `pip install 'shoal[py-spy]'`")
    return found


def is_here(pid: int, launcher: int | None) -> bool:
    """Whether a worker is a process of this machine: then its launcher is its parent."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The name in brackets may hold anything, brackets too.
            parent = int(file.read().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return False
    return parent == launcher


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
