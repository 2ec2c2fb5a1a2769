"""Processes that are frozen, or whose system calls fail."""

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from shoal.testing.rigs import leftovers
from shoal.testing.rigs.machine import RigMissing, require

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


class FailingCalls:
    """System calls that fail. Made by `failing_syscalls`; `command` is what to run, if that was given a command."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self.command = list(command)
        self._log = log

    def times(self) -> list[float]:
        """When calls were made to fail so far, by the wall clock, in seconds as `time.time()` counts them."""
        text = self._log.read_text(errors="replace") if self._log.exists() else ""
        return [float(at) for at in re.findall(r"^(?:\d+ +)?(\d+\.\d+) .*\(INJECTED\)", text, re.MULTILINE)]


@contextmanager
def failing_syscalls(
    target: Sequence[str] | int, *injections: str, paths: Sequence[str] = ()
) -> Iterator[FailingCalls]:
    """A command of which system calls fail, or a process that runs (its number) and whose calls fail in the block.

    An injection is what strace takes: `write:error=ENOSPC:when=3+` lets every write fail from the third on (of each
    thread), `fsync:signal=KILL:when=2` kills the process in its second fsync. With `paths`, only calls on these files
    count. The command is run by the caller, as `.command`; exit code and output are its own. Costs some 50 µs for
    each call that is looked at, and in a process that ran before, for each call.
    """
    require("rigs.failing_syscalls", "strace")
    names = ",".join(dict.fromkeys(injection.partition(":")[0] for injection in injections))
    injected = [part for injection in injections for part in ("-e", f"inject={injection}")]
    chosen = [part for path in paths for part in ("-P", path)]
    with leftovers.rig_folder() as folder:
        log = folder / "calls"
        strace = ["strace", "-f", "-ttt", "-o", str(log), "-e", f"trace={names}", *injected, *chosen]
        if isinstance(target, int):
            with _tracing([*strace, "-p", str(target)], folder / "said"):
                yield FailingCalls((), log)
        else:
            yield FailingCalls([*strace, "-qqq", "--", *target], log)


@contextmanager
def _tracing(command: Sequence[str], said: Path) -> Iterator[None]:
    """Run a tracer of a process from before the block begins; then let go of the process."""
    with open(said, "w") as output:
        tracer = subprocess.Popen(command, stderr=output)
    try:
        _await_attached(tracer, said)
        yield
    finally:
        tracer.terminate()
        tracer.wait(_STOP_SECONDS)


def _await_attached(tracer: "subprocess.Popen[bytes]", said: Path) -> None:
    deadline = time.monotonic() + _STOP_SECONDS
    while "attached" not in said.read_text():
        if tracer.poll() is not None or time.monotonic() > deadline:
            why = said.read_text().strip() or f"strace said nothing within {_STOP_SECONDS:g} s"
            raise RigMissing("rigs.failing_syscalls is not possible here.", why=why, hint="allow tracing (ptrace)")
        time.sleep(0.001)
