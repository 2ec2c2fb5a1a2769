"""The service's side of warm processes: have some, ask them for keepers, do without them where that cannot be."""

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.engine.cgroups import find_parent
from shoal.engine.env import inherited_env, plain_env, thread_variables
from shoal.engine.machine import available_cores
from shoal.place.cluster import Node
from shoal.service import attempts
from shoal.service.orders import Orders, Seen, Size
from shoal.service.processes import MARK

QUIET_SECONDS = 10.0
"""How long after the first job with a setup one is made: it shall not compete with that job's own start."""
CHANGE_SECONDS = 60.0
"""How long one is kept at least, before another takes its place."""
NUM_READY = 2
"""So many there are at once, for jobs whose variables differ: of two that stop each other, both come back as soon."""
ANSWER_SECONDS = 2.0
ROOM_BYTES = 8192
"""The longest name of an attempt's folder, and what else is shown with it."""
_FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "warm.py")


_OTHERS = frozenset(["--engine", "--env", "--framework", "--python"])
"""Options of `shoal run` after which workers find something else than they would here, or elsewhere."""
_OF_PROGRAMS = ("LD_", "PYTHON")
"""Variables that say which code a process has. Those of a job are not for its keeper and its launcher."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What libraries find when workers load them, beside what they find in each: threads, and the job's variables."""

    num_threads: int
    variables: Mapping[str, str]


def setup_of(orders: Orders, cores: int, *, is_held: bool) -> Setup | None:
    """The setup of a job's workers; None where they are to be started plainly. `is_held`: its cores are. Pure."""
    own = {name: value for name, value in orders.env.items() if not name.startswith("SHOAL_")}
    if "HOME" in own or any(name.startswith(_OF_PROGRAMS) for name in own):
        return None
    if any(part.partition("=")[0] in _OTHERS for part in orders.argv):
        return None
    asked = asked_threads(orders.argv)
    threads = thread_variables(asked) if asked else {}
    return Setup(asked or threads_of(orders, cores, is_held=is_held), {**own, **threads})


def asked_threads(argv: Sequence[str]) -> int | None:
    """The threads that `--threads` says. Pure."""
    for part, after in zip(argv, (*argv[1:], ""), strict=True):
        name, equals, value = part.partition("=")
        if name == "--threads":
            text = value if equals else after
            return int(text) if text.isascii() and text.isdecimal() and len(text) < 6 else None
    return None


def threads_of(orders: Orders, cores: int, *, is_held: bool) -> int:
    """How many threads each worker of a job will be told to have. `is_held`: the kernel holds its cores. Pure."""
    if is_held and orders.cores:
        cores = min(cores, max(1, int(orders.cores * orders.num_workers)))
    return max(1, cores // max(1, orders.num_workers))


class Ready:
    """A process that has imported torch for jobs with a setup, or is about to. It may be killed at any moment."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.made_at = time.monotonic()
        self._has_said = False
        self._channel, theirs = socket.socketpair()
        with theirs:
            try:
                self.process = subprocess.Popen(
                    [sys.executable, _FILE, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env={**plain_env(setup.num_threads, inherited_env()), **setup.variables, MARK: "-" * ROOM_BYTES},
                    cwd="/",
                    pass_fds=(theirs.fileno(),),
                )
            except BaseException:
                self._channel.close()
                raise
        self._channel.setblocking(False)

    def is_there(self) -> bool:
        return self.process.poll() is None

    def has_warmed(self) -> bool:
        if not self.is_there():
            return False
        self._has_said = self._has_said or self._hear(0.0) == b"+"
        return self._has_said

    def fork(self, folder: Path) -> bool:
        """Have it fork the keeper of an attempt. False where it does not say it did; one that says nothing ends."""
        from shoal.engine.seeds import tell

        order = {"folder": str(folder), "env": {**inherited_env(), MARK: str(folder)}}
        if tell(self._channel, order, ()) and (answer := self._hear(ANSWER_SECONDS)):
            return answer == b"+"
        self.close()
        return False

    def _hear(self, seconds: float) -> bytes:
        if not select.select([self._channel], [], [], seconds)[0]:
            return b""
        with contextlib.suppress(OSError):
            return self._channel.recv(1)
        return b""

    def close(self) -> None:
        self._channel.close()
        self.process.kill()
        self.process.wait()


class Warm:
    """Processes that have imported torch, or none. Nothing but time depends on them.

    One is made once a job has been started, for jobs with its setup. They end with this object or with its process.
    `is_wanted` may change its mind.
    """

    def __init__(self, is_wanted: Callable[[], bool], quiet_seconds: float = QUIET_SECONDS) -> None:
        self._is_wanted = is_wanted
        self._quiet_seconds = quiet_seconds
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._is_over = False
        self._asked: list[tuple[Setup, float]] = []
        """The setups of the jobs that were started last, the newest first, and since when they are asked for."""
        self._processes: list[Ready] = []
        # The kernel ends a warm process with the thread that has started it.
        self._thread = threading.Thread(target=self._run, name="shoal-warm", daemon=True)

    def fork(self, folder: Path, orders: Orders) -> bool:
        """Have a keeper of an attempt forked. False where none suits, or it does not say it did."""
        setup = setup_of(orders, available_cores(), is_held=find_parent("cpu") is not None)
        if setup is None:
            return False
        with self._lock:
            self._ask_for(setup)
            found = self._find(setup)
            has_place = len(os.fsencode(folder)) <= ROOM_BYTES // 2
            return found is not None and has_place and found.has_warmed() and found.fork(folder)

    def wait(self, seconds: float) -> bool:
        """Wait until there is one for the job that was started last; False where it does not come."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with self._lock:
                found = self._newest()
                if found is not None and found.has_warmed():
                    return True
            time.sleep(0.02)
        return False

    @property
    def pid(self) -> int | None:
        """The one for the job that was started last."""
        found = self._newest()
        return None if found is None else found.process.pid

    def close(self) -> None:
        self._is_over = True
        self._changed.set()
        if self._thread.ident is not None:
            self._thread.join()
        with self._lock:
            self._drop(lambda _: True)

    def _newest(self) -> Ready | None:
        return self._find(self._asked[0][0]) if self._asked else None

    def _find(self, setup: Setup) -> Ready | None:
        return next((each for each in self._processes if each.setup == setup and each.is_there()), None)

    def _ask_for(self, setup: Setup) -> None:
        since = next((at for known, at in self._asked if known == setup), None)
        others = [each for each in self._asked if each[0] != setup]
        self._asked = [(setup, time.monotonic() if since is None else since), *others][:NUM_READY]
        if self._thread.ident is None:
            self._thread.start()
        elif since is None:
            self._changed.set()

    def _run(self) -> None:
        from shoal.engine.nursery import has_room

        while not self._is_over:
            with self._lock:
                if self._can():
                    self._renew(time.monotonic(), has_room)
                else:
                    self._drop(lambda _: True)
            self._changed.wait(1.0)
            self._changed.clear()

    def _renew(self, now: float, has_room: Callable[[], bool]) -> None:
        """End those that nobody asks for now, and make one that is missing."""
        asked = [setup for setup, _ in self._asked]
        # One that has died keeps its place for as long: what ends at once shall not be made again all the time.
        self._drop(
            lambda each: now >= each.made_at + CHANGE_SECONDS and not (each.is_there() and each.setup in asked)
        )
        made = [each.setup for each in self._processes]
        for setup, since in self._asked:
            is_due = setup not in made and now >= since + self._quiet_seconds
            if is_due and len(made) < NUM_READY and has_room():
                with contextlib.suppress(OSError):
                    self._processes.append(Ready(setup))
                return

    def _drop(self, is_done: Callable[[Ready], bool]) -> None:
        for each in self._processes:
            if is_done(each):
                each.close()
        self._processes = [each for each in self._processes if not is_done(each)]

    def _can(self) -> bool:
        """Python makes relative folders on its path absolute when it starts: these would be those of no job."""
        path = inherited_env().get("PYTHONPATH", "")
        return self._is_wanted() and all(map(os.path.isabs, path.split(os.pathsep) if path else ()))


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

    def resize(self, jobs_folder: str, job: str, token: int, size: Size) -> None:
        attempts.resize(jobs_folder, job, token, size)

    def here(self, folder: str) -> Node:
        return attempts.here(folder)
