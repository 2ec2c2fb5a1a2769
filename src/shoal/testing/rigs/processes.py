"""Processes that are frozen, or whose system calls fail."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from shoal.testing.rigs.machine import require

_STOP_SECONDS = 5.0


@contextmanager
def freeze(pid: int) -> Iterator[None]:
    """Stop a process with all its threads (SIGSTOP) while the block lasts, from before it begins."""
    os.kill(pid, signal.SIGSTOP)
    try:
        _await_stop(pid)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):  # it may have been killed meanwhile
            os.kill(pid, signal.SIGCONT)


@contextmanager
def stopped(pids: Sequence[int]) -> Iterator[None]:
    """Freeze several processes."""
    with ExitStack() as stack:
        for pid in pids:
            stack.enter_context(freeze(pid))
        yield


def _await_stop(pid: int) -> None:
    """The signal takes a moment to arrive. A process deep in the kernel (on a failing disk) may never stop."""
    deadline = time.monotonic() + _STOP_SECONDS
    while time.monotonic() < deadline:
        with open(f"/proc/{pid}/stat", "rb") as file:
            if file.read().rpartition(b")")[2].split()[0] in (b"T", b"t", b"Z"):
                return
        time.sleep(0.001)
    raise TimeoutError(f"process {pid} did not stop within {_STOP_SECONDS:g} s")


def failing_syscalls(command: Sequence[str], *injections: str, paths: Sequence[str] = ()) -> list[str]:
    """The command, run so that system calls of it fail.

    An injection is what strace takes: `write:error=ENOSPC:when=3+` lets every write fail from the third on (of each
    thread), `fsync:signal=KILL:when=2` kills the process in its second fsync. With `paths`, only calls on these files
    count. Exit code and output are those of the command. Costs some 50 µs for each call that is looked at.
    """
    require("rigs.failing_syscalls", "strace")
    names = ",".join(dict.fromkeys(injection.partition(":")[0] for injection in injections))
    injected = [part for injection in injections for part in ("-e", f"inject={injection}")]
    chosen = [part for path in paths for part in ("-P", path)]
    return ["strace", "-f", "-qqq", "-o", "/dev/null", "-e", f"trace={names}", *injected, *chosen, "--", *command]
