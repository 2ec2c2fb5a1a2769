"""The launcher's side of a spare: a process that becomes the next worker that is needed."""

import json
import os
import socket
import subprocess
from collections.abc import Sequence

from shoal.engine.engine import CONTROL_FD, WORLD_FD
from shoal.engine.machine import available_memory_bytes
from shoal.spec.job import WorkerSpec

_SPARE_FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "spare.py")
NEEDED_BYTES = 1 << 30
"""Memory that must be free before some is given to a process that may never be used."""


class Spare:
    """A process that imports torch and waits. It is used once, or closed.

    Made for workers like `spec`: the same interpreter, environment and folder, as far as they matter before the
    script begins. It holds nothing of the run: no log, no pipe.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self._env = dict(spec.env)
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self.process = subprocess.Popen(
                    [spec.command[0], _SPARE_FILE, str(theirs.fileno()), spec.command[1]],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=self._env,
                    cwd=spec.working_dir,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
            except BaseException:
                ours.close()
                raise
        ours.setblocking(False)
        self._channel = ours
        self._head = spec.command[:2]
        self._is_ready = False

    @property
    def is_ready(self) -> bool:
        """Whether it has imported everything and lives."""
        if not self._is_ready:
            try:
                self._is_ready = self._channel.recv(1) == b"!"
            except OSError:
                return False
        return self._is_ready and self.process.poll() is None

    def fits(self, spec: WorkerSpec) -> bool:
        return self.is_ready and spec.command[:2] == self._head and spec.command[2:4] == (CONTROL_FD, WORLD_FD)

    def become(self, spec: WorkerSpec, fds: Sequence[int]) -> subprocess.Popen[bytes] | None:
        """Make it the worker of `spec`, given input, output, control and World descriptors; None if it is gone."""
        changed = {name: value for name, value in spec.env.items() if self._env.get(name) != value}
        removed = [name for name in self._env if name not in spec.env]
        order = {"args": spec.command[4:], "changed": changed, "removed": removed, "working_dir": spec.working_dir}
        line = json.dumps(order).encode() + b"\n"
        self._channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * len(line))
        try:
            is_sent = socket.send_fds(self._channel, [line], list(fds)) == len(line)
        except OSError:
            is_sent = False
        if not is_sent:
            self.close()
            return None
        self._channel.close()
        return self.process

    def close(self) -> None:
        self._channel.close()
        self.process.kill()
        self.process.wait()


def has_room() -> bool:
    """Whether there is memory for a process that may never be used."""
    available = available_memory_bytes()
    return available is None or available >= NEEDED_BYTES
