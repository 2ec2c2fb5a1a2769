"""Two ranks on one core while another core is free: the scheduler's habit of waking a sleeper next to its waker.

Ranks that take turns look like one busy process to the scheduler, which may leave them together for seconds. A rank
that finds itself in such a place steps over to another core, once, and stays as free to move as before. On a busy
host it stays: apart, the two would wait for each other's turn among strangers; together they need not.
"""

import contextlib
import ctypes
import os
from collections.abc import Collection

_sched_getcpu = ctypes.CDLL(None).sched_getcpu


def current_core() -> int:
    """The core this thread runs on right now. About 0.4 µs."""
    return int(_sched_getcpu())


def is_any_idle() -> bool:
    """Whether the host has more cores than threads that want to run just now. About 10 µs."""
    with open("/proc/loadavg") as file:
        num_running = int(file.read().split()[3].partition("/")[0])
    return num_running <= (os.cpu_count() or 1)


def step_off(taken: Collection[int]) -> None:
    """Move this thread to a core that is not taken, if it may use one. About 30 µs; its set of cores is unchanged."""
    allowed = os.sched_getaffinity(0)
    free = allowed.difference(taken)
    if free and free != allowed:
        with contextlib.suppress(OSError):  # some sandboxes forbid it
            os.sched_setaffinity(0, free)
            os.sched_setaffinity(0, allowed)
