"""The launcher's hand on another machine: starts workers there as it is told, and says what becomes of them.

A Ray actor, a rank of mpirun or a task of Spark calls `serve`. It decides nothing. Workers that nobody can hear of
any more are of no use and may do harm: when the launcher hangs up, or has been silent for `LEASE_SECONDS`, they are
killed.
"""

import contextlib
import os
import queue
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import msgspec

from shoal.engine.engine import Listener
from shoal.engine.entry import script_of
from shoal.engine.env import AGENT, given_gpus, leave_mpirun
from shoal.engine.local import LocalEngine
from shoal.engine.machine import available_cores, available_memory_bytes, interfaces
from shoal.engine.native import Look, look_into_all
from shoal.engine.ports import ReservedPorts
from shoal.engine.ways import Bell, try_places
from shoal.engine.wire import Invitation, Line, Refused, call_launcher
from shoal.spec.errors import UserError
from shoal.spec.job import WorkerSpec
from shoal.version import __version__

LEASE_SECONDS = 10.0
BEAT_SECONDS = 0.5
STRIDE_SECONDS = 1.0
"""Whoever lets more time pass between two looks was kept from running, and has only itself to blame for silence."""
MAX_WAITING_BYTES = 4 << 20
"""What may wait to be sent before workers' output is left in their pipes."""
ORPHAN_SECONDS = 0.0
CONNECTED = "shoal: the agent is connected"
"""What `main` prints when the launcher has been reached."""


def serve(
    invitation: Invitation,
    name: str,
    node: str,
    num_slots: int,
    order: int = 0,
    connected: Callable[[], None] = lambda: None,
    *,
    moved: tuple[str, str] | None = None,
) -> str:
    """Be the agent `name` on `node` until the launcher needs it no more; returns why it ended.

    `order` is the place of the node among those of the run. `connected` is called when the launcher has been reached;
    raises UserError where it cannot be. `moved` is a folder of the launcher and where its copy is on this machine.
    """
    try:
        line = call_launcher(invitation)
    except (OSError, Refused) as error:
        raise UserError(
            f"{node or socket.gethostname()} cannot reach the launcher at {invitation.host}:{invitation.port}.",
            why=str(error),
            hint=f"let TCP connections from there to {invitation.host}, port {invitation.port}, through the firewall",
        ) from error
    connected()
    _be_as_important_as_others()
    agent = Agent(line, node or socket.gethostname(), num_slots, moved)
    try:
        agent.say("hello", {"name": name, "node": node, "order": order, **agent.facts()})
        return agent.run()
    finally:
        agent.close()


class Agent:
    """A local engine whose calls come over a line."""

    def __init__(self, line: Line, node: str, num_slots: int, moved: tuple[str, str] | None = None) -> None:
        self._line, self._node = line, node
        self._moved = moved
        self._num_slots = num_slots
        self._ports = ReservedPorts(2 * num_slots)
        self._bell = Bell()
        listener = Listener(
            output=lambda rank, data: self.say("output", rank, data),
            control=lambda rank, text: self.say("control", rank, text),
            problem=lambda text: self.say("problem", text),
            system=lambda sample: self.say("system", asdict(sample)),
        )
        self._engine = LocalEngine(
            listener,
            wake_fds=[line.fileno()],
            orphan_seconds=ORPHAN_SECONDS,
            lease_seconds=LEASE_SECONDS,
            held_fds=[line.fileno()],  # the launcher hears of our end when nobody of ours is left
        )
        self._why_ended = ""
        self._stopping: tuple[int, float] | None = None
        self._is_paused = False
        self._silence = 0.0
        self._looks: queue.SimpleQueue[tuple[str, Look]] = queue.SimpleQueue()
        self._acts: dict[str, Callable[..., None]] = {
            "start": self._start,
            "tell": self._tell,
            "kill": self._kill,
            "signal": self._signal,
            "spare": self._keep_spare,
            "stacks": self._take_stacks,
            "look": self._look_into,
            "try": self._try_ways,
            "stop": self._stop,
            "beat": self._tell_time,
            "end": self._end,
        }

    def facts(self) -> dict[str, Any]:
        """What the launcher should know of this machine."""
        address = self._line.address
        return {
            "address": address,
            "interface": interfaces().get(address, "lo"),
            "num_slots": self._num_slots,
            "ports": self._ports.numbers,
            "bell": self._bell.port,
            "cores": available_cores(),
            "memory": available_memory_bytes(),
            "gpus": given_gpus(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "python": sys.executable,
            "versions": versions(),
        }

    def run(self) -> str:
        """Do what is asked for until there is nobody to ask; returns why it ended."""
        last, beat_due = time.monotonic(), 0.0
        while not self._why_ended:
            try:
                self._look()
                now = time.monotonic()
                if now >= beat_due:
                    beat_due = now + BEAT_SECONDS
                    self.say("beat")
                    self._engine.beat()
                self._see_to_stop(now)
                self._line.flush()
            except EOFError:
                return "the launcher hung up"
            except (OSError, Refused) as error:
                return f"lost the launcher: {error}"
            self._silence += min(STRIDE_SECONDS, now - last)
            last = now
            if self._silence > LEASE_SECONDS and not self._is_paused:
                return f"the launcher was silent for {LEASE_SECONDS:g} s"
        return self._why_ended

    def _look(self) -> None:
        if self._line.num_waiting_bytes < MAX_WAITING_BYTES:
            for end in self._engine.poll(BEAT_SECONDS / 2):
                self.say("exit", end.rank, end.code, end.result)
        else:
            time.sleep(0.01)
        self._bell.silence()
        while not self._looks.empty():
            word, look = self._looks.get()
            self.say("look", word, asdict(look))
        heard = self._line.num_heard_bytes
        for kind, *arguments in self._line.receive():
            self._acts[kind](*arguments)
        if self._line.num_heard_bytes > heard:  # a large message takes its time
            self._silence = 0.0

    def close(self) -> None:
        """Leave nothing behind."""
        self._engine.signal(signal.SIGKILL)
        self._engine.stop(0.0)
        self._engine.close()
        self._ports.close()
        self._bell.close()
        self._line.close()

    def say(self, *message: Any) -> None:
        """Tell the launcher: at once what it waits for, the rest with the next beat."""
        self._line.put(list(message))
        if message[0] in ("hello", "control", "exit", "started", "tried", "clock"):
            with contextlib.suppress(OSError):  # `run` finds out by itself, and the engine is in the middle of things
                self._line.flush()

    def _start(self, number: int, specs: list[dict[str, Any]]) -> None:
        try:
            workers = [_read_spec(each, self._moved) for each in specs]
            for worker in workers:
                check_files(worker, self._node)
            self._engine.start(workers)
        except UserError as error:
            self.say("refused", number, error.message, error.why, error.hint)
            return
        pids = self._engine.pids
        self.say("started", number, {worker.rank: pids.get(worker.rank, 0) for worker in workers})

    def _tell_time(self, asked_at: float) -> None:
        self.say("clock", asked_at, time.time())

    def _tell(self, rank: int, line: bytes) -> None:
        self.say("told", rank, len(line), self._engine.tell(rank, line))

    def _kill(self, rank: int) -> None:
        self._engine.kill(rank)

    def _signal(self, number: int, rank: int | None) -> None:
        if rank is None and number in (signal.SIGSTOP, signal.SIGCONT):
            self._is_paused = number == signal.SIGSTOP
        self._engine.signal(number, rank)

    def _keep_spare(self, spec: dict[str, Any]) -> None:
        self._engine.keep_spare(_read_spec(spec, self._moved))

    def _take_stacks(self, number: int, run_dir: str, reason: str, working_dir: str) -> None:
        taken = self._engine.take_stacks(run_dir, reason, move(working_dir, self._moved))
        self.say("stacks", number, [asdict(stack) for stack in taken.values()])

    def _look_into(self, word: str, ranks: list[int]) -> None:
        """Have py-spy look into workers; what it saw is sent by `run`: one thread alone may use the line."""
        mine = {rank: pid for rank, pid in self._engine.pids.items() if rank in ranks}
        look_into_all(mine, lambda look: self._looks.put((word, look)))

    def _try_ways(self, number: int, places: list[tuple[str, int]]) -> None:
        """Connect to bells of others. Takes seconds where something is in the way."""
        failed = try_places([(address, port) for address, port in places])
        here = self._line.address
        self.say("tried", number, [[here, address, port, why] for (address, port), why in failed.items()])

    def _stop(self, number: int, grace_seconds: float) -> None:
        """Ask workers to end. We go on as before, so that they are heard, until they have, or had their time."""
        self._is_paused = False
        self._engine.signal(signal.SIGTERM)
        self._engine.signal(signal.SIGCONT)
        self._stopping = number, time.monotonic() + grace_seconds

    def _see_to_stop(self, now: float) -> None:
        if self._stopping is None or (self._engine.pids and now < self._stopping[1]):
            return
        number, self._stopping = self._stopping[0], None
        self._engine.stop(0.0)
        for end in self._engine.poll():
            self.say("exit", end.rank, end.code, end.result)
        self.say("stopped", number)

    def _end(self) -> None:
        self._why_ended = "the run is over"


def _read_spec(facts: Mapping[str, Any], moved: tuple[str, str] | None) -> WorkerSpec:
    """A worker as the launcher described it. Its log is kept there."""
    command = tuple(move(part, moved) for part in facts["command"])
    folder = move(facts["working_dir"], moved)
    env = {**facts["env"], AGENT: "1"}
    return WorkerSpec(**{**facts, "command": command, "working_dir": folder, "log_path": os.devnull, "env": env})


def move(path: str, moved: tuple[str, str] | None) -> str:
    """A path of the launcher as it is on this machine, where its folder was copied to another place. Pure."""
    if moved is None:
        return path
    there, here = moved
    return here + path[len(there) :] if path == there or path.startswith(there + os.sep) else path


def check_files(worker: WorkerSpec, node: str) -> None:
    """Raise UserError where the folder of a worker, or its script, is not on this machine, which is called `node`."""
    script = script_of(worker.command)
    path = os.path.join(worker.working_dir, script) if script else ""
    if not os.path.isdir(worker.working_dir):
        missing = f"folder {worker.working_dir}"
    elif path and not os.path.exists(path):
        missing = f"script {path}"
    else:
        return
    raise UserError(
        f"Worker {worker.rank} could not be started on {node}.",
        why=f"there is no {missing} on that machine",
        hint="keep the script and its data in a folder that all machines share, or copy it to each of them",
    )


def versions() -> dict[str, str]:
    """What has to be the same on all machines of a run."""
    import importlib.metadata

    found = {"shoal": __version__, "python": f"{sys.version_info.major}.{sys.version_info.minor}"}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["torch"] = importlib.metadata.version("torch")
    return found


def _be_as_important_as_others() -> None:
    """Ray runs its processes at nice 15, and workers would inherit it. Who may not change that, stays so."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, 0)


def _say_connected() -> None:
    print(CONNECTED, flush=True)


def main() -> int:
    """Be an agent, with an invitation from our input."""
    leave_mpirun()
    facts = msgspec.json.decode(sys.stdin.buffer.readline(), type=dict[str, Any])
    invitation = Invitation(host=facts["host"], port=facts["port"], token=facts["token"])
    try:
        serve(invitation, facts["name"], facts["node"], facts["num_slots"], facts["order"], _say_connected)
    except UserError as error:
        print(error.render(), file=sys.stderr, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
