"""The service's side of the warm process: have one, ask it for keepers, do without it where that cannot be."""

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from shoal.engine.cgroups import find_parent
from shoal.engine.env import inherited_env, plain_env
from shoal.engine.machine import available_cores
from shoal.place.cluster import Node
from shoal.service import attempts
from shoal.service.orders import Orders, Seen
from shoal.service.processes import MARK

QUIET_SECONDS = 10.0
"""How long after the first job one is made: it shall not compete with that job's own start."""
CHANGE_SECONDS = 60.0
"""How long one is kept at least, before another takes its place that suits the newest job."""
ANSWER_SECONDS = 2.0
ROOM_BYTES = 8192
"""The longest name of an attempt's folder, and what else is shown with it."""
_FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "warm.py")


_OTHERS = frozenset(["--engine", "--env", "--framework", "--python", "--threads"])
"""Options of `shoal run` after which workers find something else than they would here, or elsewhere."""


def is_usual(orders: Orders) -> bool:
    """Whether its workers are processes of this machine that find nothing but what the run says of itself. Pure."""
    has_own = any(not name.startswith("SHOAL_") for name in orders.env)
    return not has_own and not any(part.partition("=")[0] in _OTHERS for part in orders.argv)


def threads_of(orders: Orders, cores: int, *, is_held: bool) -> int:
    """How many threads each worker of a job will be told to have. `is_held`: the kernel holds its cores. Pure."""
    if is_held and orders.cores:
        cores = min(cores, max(1, int(orders.cores * orders.num_workers)))
    return max(1, cores // max(1, orders.num_workers))


class Warm:
    """A process that has imported torch, or none. Nothing but time depends on it: it may be killed at any moment.

    It is made once a job has been started, for workers with as many threads as that job's, and ends with this object
    or with its process. `is_wanted` may change its mind.
    """

    def __init__(self, is_wanted: Callable[[], bool], quiet_seconds: float = QUIET_SECONDS) -> None:
        self._is_wanted = is_wanted
        self._quiet_seconds = quiet_seconds
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._is_over = False
        self._num_threads = self._wanted_threads = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._is_ready = False
        # The kernel ends the warm process with the thread that has started it.
        self._thread = threading.Thread(target=self._run, name="shoal-warm", daemon=True)

    def fork(self, folder: Path, orders: Orders) -> bool:
        """Have it fork the keeper of an attempt. False where none suits, or it does not say it did."""
        if not is_usual(orders):
            return False
        num_threads = threads_of(orders, available_cores(), is_held=find_parent("cpu") is not None)
        with self._lock:
            self._wanted_threads = num_threads
            if self._thread.ident is None:
                self._thread.start()
            has_place = len(os.fsencode(folder)) <= ROOM_BYTES // 2
            if num_threads != self._num_threads or not has_place or not self._has_warmed():
                return False
            assert self._channel is not None
            from shoal.engine.seeds import tell

            order = {"folder": str(folder), "env": {**inherited_env(), MARK: str(folder)}}
            if tell(self._channel, order, ()) and (answer := self._hear(ANSWER_SECONDS)):
                return answer == b"+"
            self._end()
            return False

    def wait(self, seconds: float) -> bool:
        """Wait until there is one; False where it does not come."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with self._lock:
                if self._has_warmed():
                    return True
            time.sleep(0.02)
        return False

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process is not None else None

    def close(self) -> None:
        self._is_over = True
        self._changed.set()
        if self._thread.ident is not None:
            self._thread.join()
        with self._lock:
            self._end()

    def _run(self) -> None:
        from shoal.engine.nursery import has_room

        self._changed.wait(self._quiet_seconds)
        made_at = -CHANGE_SECONDS
        while not self._is_over:
            with self._lock:
                if self._process is not None and (self._process.poll() is not None or not self._can()):
                    self._end()
                suits = self._process is not None and self._num_threads == self._wanted_threads
                is_due = time.monotonic() >= made_at + CHANGE_SECONDS
                if not suits and is_due and self._can() and has_room():
                    made_at = time.monotonic()
                    self._end()
                    with contextlib.suppress(OSError):
                        self._make(self._wanted_threads)
            self._changed.wait(1.0)

    def _can(self) -> bool:
        """Python makes relative folders on its path absolute when it starts: these would be those of no job."""
        path = inherited_env().get("PYTHONPATH", "")
        return self._is_wanted() and all(map(os.path.isabs, path.split(os.pathsep) if path else ()))

    def _make(self, num_threads: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, _FILE, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env={**plain_env(num_threads, inherited_env()), MARK: "-" * ROOM_BYTES},
                    cwd="/",
                    pass_fds=(theirs.fileno(),),
                )
            except BaseException:
                ours.close()
                raise
        ours.setblocking(False)
        self._channel, self._num_threads, self._is_ready = ours, num_threads, False

    def _has_warmed(self) -> bool:
        if self._process is None or self._process.poll() is not None:
            return False
        self._is_ready = self._is_ready or self._hear(0.0) == b"+"
        return self._is_ready

    def _hear(self, seconds: float) -> bytes:
        assert self._channel is not None
        if not select.select([self._channel], [], [], seconds)[0]:
            return b""
        with contextlib.suppress(OSError):
            return self._channel.recv(1)
        return b""

    def _end(self) -> None:
        if self._channel is not None:
            self._channel.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = self._channel = None
        self._is_ready = False


class WarmAttempts:
    """The functions of `attempts.py`; what they start is forked where that is possible."""

    def __init__(self, warm: Warm) -> None:
        self._warm = warm

    def start(self, jobs_folder: str, orders: Orders) -> None:
        attempts.start(jobs_folder, orders, self._warm.fork)

    def look(self, jobs_folder: str, job: str, token: int) -> Seen:
        return attempts.look(jobs_folder, job, token)

    def stop(self, jobs_folder: str, job: str, token: int, why: str) -> None:
        attempts.stop(jobs_folder, job, token, why)

    def resize(
        self, jobs_folder: str, job: str, token: int, num_workers: int, places: Mapping[str, int] | None = None
    ) -> None:
        attempts.resize(jobs_folder, job, token, num_workers, places)

    def here(self, folder: str) -> Node:
        return attempts.here(folder)
