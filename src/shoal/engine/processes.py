"""What watches processes of this machine: a descriptor from the kernel, and a guard."""

import os
import subprocess
import sys
from collections.abc import Sequence

_GUARD_FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "guard.py")


def start_guard(
    groups: Sequence[int],
    grace_seconds: float | None = None,
    lease_seconds: float | None = None,
    held_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """A process that ends these process groups if this process dies first. Its input takes changes to the list.

    It holds `held_fds` open as long as it lives.
    """
    times = [str(seconds) for seconds in (grace_seconds, lease_seconds) if seconds is not None]
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", _GUARD_FILE, str(os.getpid()), *times],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=held_fds,
        start_new_session=True,
        bufsize=0,
    )
    assert guard.stdin is not None
    guard.stdin.write("".join(f"+{group}\n" for group in groups).encode())
    return guard


def open_pid_fd(pid: int) -> int:
    """A descriptor that becomes readable when a process ends; -1 where an old kernel or a sandbox has none."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return -1
