"""Starts a program that nobody waits for: `python -I -S detach.py OUTPUT PROGRAM ARGS`. Ends once it has started.

Its own child becomes the program, in a session of its own, with nothing of ours open. It imports nothing of shoal:
10 ms.
"""

import os
import sys


def detach(output: str, command: list[str]) -> None:
    if os.fork():
        os._exit(0)
    leave(output)
    os.execv(command[0], command)


def leave(output: str) -> None:
    """Keep nothing of whoever started this process: not its session, not its folder, not what it has open."""
    os.setsid()
    os.chdir("/")
    nothing = os.open(os.devnull, os.O_RDWR)
    try:
        written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    except OSError:  # a full disk
        written = nothing
    for fd, wanted in ((0, nothing), (1, written), (2, written)):
        os.dup2(wanted, fd)
    os.closerange(3, 65536)


if __name__ == "__main__":
    detach(sys.argv[1], sys.argv[2:])
