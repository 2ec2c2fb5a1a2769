"""The launcher's side of a spare: a process that becomes the next worker that is needed."""

import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.engine.engine import CONTROL_FD, WORLD_FD
from shoal.engine.machine import available_memory_bytes
from shoal.engine.seeds import tell
from shoal.spec.errors import UserError
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

    def fits(self, spec: WorkerSpec) -> bool:
        """Whether it can become this worker. It need not have imported everything yet: it is ahead all the same."""
        is_alike = spec.command[:2] == self._head and spec.command[2:4] == (CONTROL_FD, WORLD_FD)
        return is_alike and self.process.poll() is None

    def become(self, spec: WorkerSpec, fds: Sequence[int]) -> subprocess.Popen[bytes] | None:
        """Make it the worker of `spec`, given input, output, control and World descriptors; None if it is gone."""
        is_sent = tell(self._channel, order_for(spec, self._env), fds)
        if not is_sent:
            self.close()
            return None
        self._channel.close()
        return self.process

    def close(self) -> None:
        self._channel.close()
        self.process.kill()
        self.process.wait()


def order_for(spec: WorkerSpec, env: Mapping[str, str]) -> dict[str, Any]:
    """What a process with these variables is told, to become a worker. Pure."""
    return {
        "args": spec.command[4:],
        "changed": {name: value for name, value in spec.env.items() if env.get(name) != value},
        "removed": [name for name in env if name not in spec.env],
        "working_dir": spec.working_dir,
    }


def wants_spare(options: Mapping[str, str]) -> bool:
    """Whether the user lets an elastic run keep a spare: the option `engine.spares`, 0 or 1."""
    value = options.get("engine.spares", "1")
    if value not in ("0", "1"):
        raise UserError(
            f"engine.spares is {value!r}.", why="a run keeps one spare process, or none", hint="use 0 or 1"
        )
    return value == "1"


def num_at_start(options: Mapping[str, str], min_workers: int | None, max_workers: int) -> int:
    """How many workers a run begins with: the option `engine.start` of an elastic one, else all of them."""
    text = options.get("engine.start")
    if text is None:
        return max_workers
    least = max_workers if min_workers is None else min_workers
    if not (text.isascii() and text.isdecimal() and least <= int(text) <= max_workers):
        raise UserError(
            f"engine.start is {text!r}.",
            why=f"this run can have {least} to {max_workers} workers" if least < max_workers else "it is not elastic",
            hint="give it a number in that range, with `-n MIN:MAX`",
        )
    return int(text)


def has_room() -> bool:
    """Whether there is memory for a process that may never be used."""
    available = available_memory_bytes()
    return available is None or available >= NEEDED_BYTES
