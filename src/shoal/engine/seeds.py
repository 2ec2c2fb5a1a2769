"""Children that were forked beforehand, while nothing but the main thread ran, and wait to be told what to be.

They share the memory of whoever forked them until they change it. What is forked from a process that has imported
torch has it at once.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.engine import worker
from shoal.engine.engine import CONTROL_FD, WORLD_FD
from shoal.spec.job import WorkerSpec

_OF_THE_RUN = frozenset(
    [
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
        *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"),
    ]
)
"""Variables that are read when they are needed, not when a library is loaded."""
_OURS = ("SHOAL_", "TORCHELASTIC_")


def is_alike(loaded: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """Whether libraries that were loaded with these variables are as if they had been with those. Pure.

    Nobody knows what all of them read. So only what each run says of itself may differ.
    """
    differing = {name for name in {*loaded, *wanted} if loaded.get(name) != wanted.get(name)}
    return all(name in _OF_THE_RUN or name.startswith(_OURS) for name in differing)


class Seed:
    """A child that waits. It is used once, or closed; afterwards it is a process like one of `subprocess`."""

    def __init__(self, pid: int, channel: socket.socket, head: Sequence[str], loaded: Mapping[str, str]) -> None:
        """`head` is interpreter and file of the workers it can become, `loaded` the variables of its libraries."""
        self.pid = pid
        self.returncode: Any = None  # an exit code, once there is one: as of `subprocess.Popen`
        self.channel = channel
        self.head, self.loaded = tuple(head), loaded

    def fits(self, spec: WorkerSpec) -> bool:
        """Whether it can become this worker."""
        is_usual = spec.command[:2] == self.head and spec.command[2] == CONTROL_FD
        is_known = spec.command[3] in (WORLD_FD, "") and os.path.isdir(spec.working_dir)
        return is_usual and is_known and is_alike(self.loaded, spec.env) and self.poll() is None

    def become(self, order: Mapping[str, Any], fds: Sequence[int]) -> bool:
        """Tell it what to be; False, and it is gone, where that could not be told."""
        is_told = tell(self.channel, order, fds)
        if not is_told:
            self.close()
        self.channel.close()
        return is_told

    def close(self) -> None:
        self.channel.close()
        self.kill()
        self.wait()

    # --- as in subprocess.Popen

    def poll(self) -> Any:
        if self.returncode is None:
            self._take(os.WNOHANG)
        return self.returncode

    def wait(self, timeout: float | None = None) -> Any:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            self._take(0 if deadline is None else os.WNOHANG)
            if self.returncode is None and deadline is not None:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"process {self.pid} has not ended within {timeout} s")
                time.sleep(0.005)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _take(self, flags: int) -> None:
        try:
            pid, status = os.waitpid(self.pid, flags)
        except ChildProcessError:  # somebody else has taken note of its end
            self.returncode = 0
            return
        if pid:
            self.returncode = os.waitstatus_to_exitcode(status)


def sow(head: Sequence[str], loaded: Mapping[str, str], siblings: Sequence[Seed] = ()) -> Seed | socket.socket:
    """Fork one. In the parent returns the seed; in the child the end of the channel on which it is told.

    The child leads a session of its own, and is told by the kernel to end when this process does. It must be forked
    while this process has no thread but this one. `siblings` are those that were forked before.
    """
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        for channel in (ours, *(seed.channel for seed in siblings)):
            channel.close()
        os.setsid()
        worker.end_with_parent()
        theirs.sendall(b"\n")
        return theirs
    theirs.close()
    ours.recv(1)  # from here on it can be told to end, with all that it starts
    ours.setblocking(False)
    return Seed(pid, ours, head, loaded)


def tell(channel: socket.socket, order: Mapping[str, Any], fds: Sequence[int]) -> bool:
    """Send an order, a line of JSON with descriptors beside it; False where it did not arrive whole."""
    line = json.dumps(order).encode() + b"\n"
    channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * len(line))
    try:
        return socket.send_fds(channel, [line], list(fds)) == len(line)
    except OSError:
        return False


_ready: list[Seed] = []


def offer(seeds: Sequence[Seed]) -> None:
    """Have these ready for the engine that this process will open."""
    _ready.extend(seeds)


def take() -> list[Seed]:
    """What was offered; it belongs to the caller."""
    taken = list(_ready)
    _ready.clear()
    return taken


def freshen() -> None:
    """After a fork: draw anew what libraries have drawn when they were loaded. Python's `random` does so itself."""
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "multiprocessing.process" in sys.modules:
        sys.modules["multiprocessing.process"].current_process().authkey = os.urandom(32)
