"""A process that outlives a killed launcher just long enough to end its workers.

Run as `python -I -S guard.py LAUNCHER_PID [SECONDS [LEASE]]` with a pipe as stdin, on which the launcher writes
`+PGID` and `-PGID` lines for the process groups of its workers. When the pipe ends or the launcher is gone, the
groups that are left are told to end, and killed 1.2 s later, or after so many seconds. With a lease so are those of a
launcher that has written nothing, not even an empty line, for so long: it is stopped, and nobody can reach its
workers. Imports nothing of shoal: it starts in 10 ms and holds nothing but the pipe, and descriptors whose other end
shall not be told that the launcher is gone before its workers are.
"""

import os
import select
import sys
import time

TERM_SECONDS = 1.2
CLEANUP_SECONDS = 0.2
LOOK_SECONDS = 0.25
# Plain numbers, because importing `signal` would triple the time to start.
SIGKILL, SIGTERM, SIGCONT = 9, 15, 18


def watch(fd: int, launcher: int, lease: float) -> set[int]:
    """Wait until the launcher has died, or was silent for too long; returns the process groups it left behind."""
    groups: set[int] = set()
    rest, num_silent = b"", 0
    while True:
        # A process that the launcher forked may hold the other end of the pipe open; hence the look at the parent.
        # It may have died before we began: what it wrote is there. Looks are counted, not seconds: when all of this
        # machine stands still, nobody is silent.
        is_alone = os.getppid() != launcher or num_silent * LOOK_SECONDS >= lease
        if not select.select([fd], [], [], 0.0 if is_alone else LOOK_SECONDS)[0]:
            if is_alone:
                break
            num_silent += 1
            continue
        data, num_silent = os.read(fd, 4096), 0
        if not data:
            break
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"+"):
                groups.add(int(line[1:]))
            elif line:
                groups.discard(int(line[1:]))
    return groups


def end(groups: set[int], term_seconds: float = TERM_SECONDS) -> None:
    """Tell process groups to end; kill their leaders after a while, and everyone else a moment later.

    Leaders first, because helpers in their groups (multiprocessing's resource tracker) remove shared memory once
    the leader is gone.
    """
    if term_seconds > 0:
        for group in groups:
            signal_group(group, SIGTERM)
            signal_group(group, SIGCONT)
        wait(groups, term_seconds)
    for group in groups:
        kill(group)
    wait(groups, CLEANUP_SECONDS)
    for group in groups:
        signal_group(group, SIGKILL)


def wait(groups: set[int], seconds: float) -> None:
    """Wait until all groups are gone."""
    deadline = time.monotonic() + seconds
    while any(is_group_alive(group) for group in groups) and time.monotonic() < deadline:
        time.sleep(0.02)


def is_group_alive(group: int) -> bool:
    """Whether a process group has a member that is not a zombie: where nobody reaps orphans, dead ones stay."""
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


def kill(pid: int) -> None:
    try:
        os.kill(pid, SIGKILL)
    except OSError:
        return


def signal_group(group: int, number: int) -> bool:
    """Send a signal to a process group; False where it has no members."""
    try:
        os.killpg(group, number)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    grace, lease = [*map(float, sys.argv[2:]), *(TERM_SECONDS, float("inf"))[len(sys.argv) - 2 :]]
    end(watch(0, int(sys.argv[1]), lease), grace)
