"""Processes of this machine and their groups, as the kernel knows them."""

import os
import subprocess
import sys
from collections.abc import Sequence

from shoal.engine.guard import signal_group

_GUARD_FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "guard.py")


def start_guard(groups: Sequence[int]) -> subprocess.Popen[bytes]:
    """A process that ends these process groups if this process dies first. Its input takes changes to the list."""
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", _GUARD_FILE, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        bufsize=0,
    )
    assert guard.stdin is not None
    guard.stdin.write("".join(f"+{group}\n" for group in groups).encode())
    return guard


def is_group_alive(group: int) -> bool:
    """Whether a process group has a member that is not a zombie: in a container nobody may reap orphans."""
    if not signal_group(group, 0):
        return False
    try:
        pids = [name for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return True
    return any(_state_in_group(pid, group) not in ("", "Z", "X") for pid in pids)


def _state_in_group(pid: str, group: int) -> str:
    """The state of a process as one letter, or nothing where it is not in the group."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name before the last parenthesis may contain anything.
            state, _, process_group, *_ = file.read().rpartition(b")")[2].split()
    except (OSError, ValueError):
        return ""
    return state.decode() if int(process_group) == group else ""


def open_pid_fd(pid: int) -> int:
    """A descriptor that becomes readable when a process ends; -1 where an old kernel or a sandbox has none."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return -1
