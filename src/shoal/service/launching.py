"""The launcher of an attempt: its command, and what it does before it is `shoal run`."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from shoal.engine.seeds import Seed
from shoal.service.orders import Orders

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LIBC = ctypes.CDLL(None)
_START = (sys.executable, "-P", "-m", "shoal")
Launcher = subprocess.Popen[bytes] | Seed


def command_of(orders: Orders, run_dir: Path, *, goes_on: bool) -> list[str]:
    """The launcher's command line. Pure."""
    is_elastic = orders.min_workers < orders.max_workers
    size = f"{orders.min_workers}:{orders.max_workers}" if is_elastic else str(orders.num_workers)
    start = ["-o", f"engine.start={orders.num_workers}"] if is_elastic else []
    # A little less than we wait, so that a launcher whose workers do not end in time can still say so.
    grace = ["-o", f"engine.grace={orders.grace_seconds * 0.9:.3f}"]
    place = ["--resume", str(run_dir)] if goes_on else ["--name", orders.run_name]
    # With -P nothing in the user's folder is taken for a part of Python.
    return [*_START, "run", "--quiet", "-n", size, *start, *grace, *place, *orders.argv]


def launch(
    command: list[str],
    orders: Orders,
    env: Mapping[str, str],
    output: Path,
    locks: tuple[int, ...],
    join: Callable[[int], None],
    seed: Seed | None = None,
) -> Launcher:
    """Start the launcher: within its limits, holding the locks, and told to end when we die.

    A seed becomes it where that is not gone, and can be where it is to be.
    """
    keeper = os.getpid()

    def enter() -> None:
        join(0)
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != keeper:  # we died before that
            os._exit(128 + signal.SIGTERM)

    try:
        written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:  # a full disk
        written = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    try:
        if seed is not None and seed.poll() is None and os.access(orders.cwd, os.X_OK):
            join(seed.pid)
            order = {"module": _START[-1], "args": command[len(_START) :], "env": dict(env), "cwd": orders.cwd}
            if seed.become(order | {"num_workers": orders.num_workers}, (written, *locks)):
                return seed
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=written,
            cwd=orders.cwd,
            env=env,
            pass_fds=locks,
            start_new_session=True,
            preexec_fn=enter,  # the keeper has one thread
        )
    finally:
        os.close(written)


def adopt_orphans() -> None:
    """Become the parent of processes whose own has ended, so that all of the job stay below us and are counted."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def bury_orphans(launcher: int) -> None:
    """Take note of orphans that have ended; the launcher's own end is left to be seen by who started it."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid == launcher:
            return
        os.waitpid(ended.si_pid, 0)
