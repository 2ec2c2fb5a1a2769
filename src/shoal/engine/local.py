"""Workers as processes of this machine."""

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from shoal.engine import seeds
from shoal.engine.engine import CALL_FD, CONTROL_FD, PYTHON, RESULT_FD, WORKER_FILE, WORLD_FD, Listener, ignore
from shoal.engine.env import inherited_env
from shoal.engine.guard import is_group_alive, signal_group
from shoal.engine.log import LIMIT_BYTES, Log
from shoal.engine.machine import available_cores
from shoal.engine.nameless import make_file, read_file
from shoal.engine.nursery import Spare, has_room, order_for
from shoal.engine.outbox import Outbox
from shoal.engine.ports import ReservedPorts
from shoal.engine.processes import open_pid_fd, start_guard
from shoal.engine.sampler import SAMPLE_SECONDS, Sampler
from shoal.spec.errors import UserError
from shoal.spec.job import Seat, WorkerExit, WorkerSpec

if TYPE_CHECKING:
    from shoal.engine.stacks import Stack

READ_BYTES = 1 << 16
PIPE_BYTES = 1 << 18
# What a worker wrote before it ended fits into its pipe; reading more would be reading what its children still write.
MAX_LAST_READS = 2 * PIPE_BYTES // READ_BYTES
LINGER_SECONDS = 0.3
KILL_SECONDS = 1.0
_F_SETPIPE_SZ = 1031


@dataclass(slots=True, kw_only=True, eq=False)
class _Worker:
    """One process and the descriptors that lead to it; -1 is a closed one. Its pid is also its process group."""

    rank: int
    process: "subprocess.Popen[bytes] | seeds.Seed"
    output_fd: int
    control_fd: int
    log: Log
    outbox: Outbox | None = None
    result_fd: int = -1
    pid_fd: int = -1
    control_rest: bytes = b""
    is_told_later: bool = False
    linger_until: float | None = None


class LocalEngine:
    """Starts each worker in a session of its own, reads what it writes, and leaves no process behind.

    Nothing happens between calls: output waits in pipes until `poll`. Processes that a worker started end with it,
    unless they made a session of their own. If this process is killed, the kernel tells the workers, and a guard
    process ends all that is left of them within 2 s. Must be polled by the thread that called `start`, which must
    outlive the workers (the kernel watches the thread). Call `stop` in the end, always.
    """

    def __init__(
        self,
        listener: Listener | None = None,
        *,
        stdin_fd: int | None = None,
        inherit_fds: Mapping[int, Sequence[int]] | None = None,
        wake_fds: Sequence[int] = (),
        orphan_seconds: float | None = None,
        lease_seconds: float | None = None,
        held_fds: Sequence[int] = (),
    ) -> None:
        """`stdin_fd` becomes the input of rank 0, others read nothing. `inherit_fds` are kept open, by rank.

        When one of `wake_fds` becomes readable, `poll` returns early; whoever gave it reads it. `orphan_seconds` is
        what workers get to end in where this process was killed, if not what the guard gives them. With
        `lease_seconds` they are also ended where this process has not called `beat` for so long. If this process is
        killed, `held_fds` stay open until its workers are dead.
        """
        self._listener = listener or Listener()
        self._stdin_fd = stdin_fd
        self._inherit_fds = inherit_fds or {}
        self._wake_fds = wake_fds
        self._selector: selectors.BaseSelector | None = None
        self._running: list[_Worker] = []
        self._lingering: list[_Worker] = []
        self._exits: list[WorkerExit] = []
        self._guard: subprocess.Popen[bytes] | None = None
        self._spare: Spare | None = None
        self._ready = seeds.take()
        self._is_input_taken = False
        self._call: tuple[bytes, int] | None = None
        self._orphan_seconds, self._lease_seconds, self._held_fds = orphan_seconds, lease_seconds, held_fds
        self._seats: dict[int, Seat] = {}
        self._ports: list[ReservedPorts] = []
        self._sampler = Sampler(os.uname().nodename) if self._listener.system is not ignore else None
        self._sample_due = 0.0
        self._folder = "."

    def seat(self, ranks: Sequence[int], least: int) -> Mapping[int, Seat]:
        if new := [rank for rank in ranks if rank not in self._seats]:
            self._ports.append(ReservedPorts(2 * len(new)))
            numbers, cores = self._ports[-1].numbers, available_cores()
            for place, rank in enumerate(new):
                self._seats[rank] = Seat(
                    store_port=numbers[2 * place],
                    worker_port=numbers[2 * place + 1],
                    local_rank=rank,
                    num_local=len(ranks),
                    cores=cores,
                )
        return {rank: self._seats[rank] for rank in ranks}

    @property
    def room(self) -> int | None:
        return None

    def start(self, workers: Sequence[WorkerSpec]) -> None:
        others = list(self._running)
        self._open()
        self._folder = next((_folder_of(spec) for spec in workers), self._folder)
        try:
            for spec in workers:
                self._running.append(self._spawn(fit(spec)))
            # Last, so that no worker waits for it.
            self._close_ready()
            self._have_guarded([worker.process.pid for worker in self._running if worker not in others])
        except BaseException:
            for worker in self._running:
                if worker not in others:
                    worker.process.kill()
            if not others:
                self.stop(0.0)
            raise

    def poll(self, timeout_seconds: float = 0.0) -> Sequence[WorkerExit]:
        if not self._exits:
            self._wait(timeout_seconds)
        exits, self._exits = self._exits, []
        return exits

    def tell(self, rank: int, line: bytes) -> bool:
        worker = self._find(rank)
        if worker is None or worker.outbox is None or not worker.outbox.put(line + b"\n"):
            return False
        self._send(worker)
        return True

    def kill(self, rank: int) -> bool:
        worker = self._find(rank)
        if worker is None:
            return False
        # What it started is ended when its exit is seen, a moment later, as with every death.
        worker.process.kill()
        return True

    def stop(self, grace_seconds: float) -> None:
        self.signal(signal.SIGTERM)
        self.signal(signal.SIGCONT)
        self._wait_for_end(grace_seconds)
        for worker in self._running:
            worker.process.kill()
        self._wait_for_end(KILL_SECONDS)
        self._close()

    def keep_spare(self, spec: WorkerSpec) -> bool:
        """Have a process ready for the next worker like `spec`; False where there is one, or no memory for it.

        Such workers are `worker.py` with two pipes; for others, `start` does not use it.
        """
        if self._spare is not None or not self._running or not has_room():
            return False
        with contextlib.suppress(OSError):
            self._spare = Spare(fit(spec))
            self._tell_guard(f"+{self._spare.process.pid}\n")
        return self._spare is not None

    @property
    def pids(self) -> dict[int, int]:
        return {worker.rank: worker.process.pid for worker in self._running}

    def take_stacks(self, run_dir: str, reason: str, working_dir: str) -> "dict[int, Stack]":
        from shoal.engine.stacks import take_stacks

        return take_stacks(run_dir, self.pids, reason, working_dir)

    def look_into(self, run_dir: str, ranks: Sequence[int], word: str) -> None:
        from shoal.engine.native import look_into_all, write_look

        mine = {rank: pid for rank, pid in self.pids.items() if rank in ranks}
        look_into_all(mine, lambda look: write_look(run_dir, word, look))

    def close(self) -> None:
        self._close()
        for ports in self._ports:
            ports.close()
        self._ports.clear()
        self._seats.clear()

    def signal(self, number: int, rank: int | None = None) -> None:
        for worker in [*self._running, *self._lingering]:
            if rank is None or worker.rank == rank:
                signal_group(worker.process.pid, number)

    def _find(self, rank: int) -> _Worker | None:
        return next((worker for worker in self._running if worker.rank == rank), None)

    def _open(self) -> None:
        if self._selector is None:
            self._selector = selectors.DefaultSelector()
            for fd in self._wake_fds:
                self._selector.register(fd, selectors.EVENT_READ, ignore)

    def _have_guarded(self, groups: Sequence[int]) -> None:
        if self._guard is not None and self._guard.poll() is not None:  # it took us for dead
            self._guard.communicate()
            self._guard = None
        if self._guard is None:
            self._guard = start_guard(groups, self._orphan_seconds, self._lease_seconds, self._held_fds)
        else:
            self._tell_guard("".join(f"+{group}\n" for group in groups))

    def _spawn(self, spec: WorkerSpec) -> _Worker:
        opened: list[int] = []
        call_fds: tuple[int, ...] = ()
        log: Log | None = None
        try:
            log = Log(spec.log_path, self._listener.problem, spec.log_limit_bytes or LIMIT_BYTES)
            if spec.call is not None:
                call_fds = (self._call_file(spec.call), make_file("shoal-result"))
            opened.extend(os.pipe())
            opened.extend(os.pipe())
            if WORLD_FD in spec.command:
                opened.extend(os.pipe())
            output_fd, output_end, control_fd, control_end, *world = opened
            process = self._execute(spec, output_end, control_end, *world[:1], call_fds=call_fds)
        except BaseException as error:
            _close_all([*opened, *call_fds[1:]])
            if log is not None:
                log.close()
            if isinstance(error, OSError):
                raise _cannot_start(spec, error) from error
            raise
        _close_all([output_end, control_end, *world[:1]])
        worker = _Worker(
            rank=spec.rank,
            process=process,
            output_fd=output_fd,
            control_fd=control_fd,
            log=log,
            outbox=Outbox(world[1]) if world else None,
            result_fd=call_fds[1] if call_fds else -1,
            pid_fd=open_pid_fd(process.pid),
        )
        self._watch(worker)
        return worker

    def _call_file(self, call: bytes) -> int:
        """A file that all workers read which make this call."""
        if self._call is None or self._call[0] is not call:
            self._forget_call()
            self._call = (call, make_file("shoal-call", call))
        return self._call[1]

    def _forget_call(self) -> None:
        if self._call is not None:
            os.close(self._call[1])
            self._call = None

    def _execute(
        self,
        spec: WorkerSpec,
        output_end: int,
        control_end: int,
        world_end: int = -1,
        *,
        call_fds: tuple[int, ...],
    ) -> "subprocess.Popen[bytes] | seeds.Seed":
        _enlarge(output_end)
        # A replacement could only read what is left of the input.
        has_input = spec.rank == 0 and self._stdin_fd is not None and not self._is_input_taken
        is_plain = not call_fds and spec.rank not in self._inherit_fds
        if is_plain and (self._ready or self._spare is not None):
            with open(os.devnull, "rb") as nothing:
                stdin = self._stdin_fd if has_input and self._stdin_fd is not None else nothing.fileno()
                ends = (stdin, output_end, control_end, *((world_end,) if world_end >= 0 else ()))
                process = self._use_ready(spec, ends)
            if process is not None:
                self._is_input_taken |= has_input
                return process
        self._is_input_taken |= has_input
        numbers = {CONTROL_FD: str(control_end), WORLD_FD: str(world_end)}
        numbers |= dict(zip((CALL_FD, RESULT_FD), map(str, call_fds), strict=False))
        passed = (control_end, world_end) if world_end >= 0 else (control_end,)
        return subprocess.Popen(
            [numbers.get(part, part) for part in spec.command],
            stdin=self._stdin_fd if has_input else subprocess.DEVNULL,
            stdout=output_end,
            stderr=output_end,
            env=dict(spec.env),
            cwd=spec.working_dir,
            pass_fds=(*passed, *call_fds, *self._inherit_fds.get(spec.rank, ())),
            start_new_session=True,
        )

    def _use_ready(self, spec: WorkerSpec, ends: Sequence[int]) -> "subprocess.Popen[bytes] | seeds.Seed | None":
        """Make a process that waits this worker, if there is one that can be."""
        while (seed := next((seed for seed in self._ready if seed.fits(spec)), None)) is not None:
            self._ready.remove(seed)
            if seed.become(order_for(spec, seed.loaded), ends):
                return seed
        if self._spare is not None and self._spare.fits(spec):
            spare, self._spare = self._spare, None
            return spare.become(spec, ends)
        return None

    def _watch(self, worker: _Worker) -> None:
        assert self._selector is not None
        for fd, read in ((worker.output_fd, self._read_output), (worker.control_fd, self._read_control)):
            os.set_blocking(fd, False)
            self._selector.register(fd, selectors.EVENT_READ, partial(read, worker))
        if worker.pid_fd >= 0:
            self._selector.register(worker.pid_fd, selectors.EVENT_READ, ignore)

    def _wait(self, timeout_seconds: float) -> None:
        if self._selector is None and self._wake_fds:
            self._open()  # somebody may want to wake us before there is a worker
        if self._selector is None:
            return
        if self._lingering or any(worker.pid_fd < 0 for worker in self._running):
            timeout_seconds = min(timeout_seconds, 0.02)
        if self._sampler is not None:
            timeout_seconds = min(timeout_seconds, self._look_at_machine(self._sampler))
        for key, _ in self._selector.select(max(0.0, timeout_seconds)):
            key.data()
        for worker in [worker for worker in self._running if worker.process.poll() is not None]:
            self._retire(worker)
        for worker in list(self._lingering):
            self._let_go(worker)

    def _look_at_machine(self, sampler: Sampler) -> float:
        """Take a sample if it is time for one; returns how long it is until the next."""
        clock = time.monotonic()
        if clock >= self._sample_due and self._running:
            self._sample_due = max(clock, self._sample_due + SAMPLE_SECONDS)
            sample = sampler.sample(self.pids, self._folder, time.time(), clock)
            if sample is not None:
                self._listener.system(sample)
        return max(0.01, self._sample_due - clock) if self._running else SAMPLE_SECONDS

    def _wait_for_end(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._running and (left := deadline - time.monotonic()) > 0:
            self._wait(min(left, 0.1))

    def _read_output(self, worker: _Worker) -> bool:
        """Take one piece of output; False where there is none now."""
        try:
            data = os.read(worker.output_fd, READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._unwatch(worker.output_fd)
            worker.output_fd = -1
            return False
        worker.log.write(data)
        self._listener.output(worker.rank, data)
        return True

    def _read_control(self, worker: _Worker) -> bool:
        try:
            data = os.read(worker.control_fd, READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._unwatch(worker.control_fd)
            worker.control_fd = -1
            return False
        *lines, worker.control_rest = (worker.control_rest + data).split(b"\n")
        # After its end only processes it forked can write here, and its rank may belong to another worker by now.
        for line in lines if worker.linger_until is None else ():
            self._listener.control(worker.rank, line)
        return True

    def _send(self, worker: _Worker) -> None:
        """Send what the pipe takes now; the rest waits until the worker has read."""
        assert self._selector is not None
        assert worker.outbox is not None
        is_waiting = worker.outbox.flush()
        if is_waiting and not worker.is_told_later:
            self._selector.register(worker.outbox.fd, selectors.EVENT_WRITE, partial(self._send, worker))
        elif worker.is_told_later and not is_waiting:
            self._selector.unregister(worker.outbox.fd)
        worker.is_told_later = is_waiting

    def _retire(self, worker: _Worker) -> None:
        """A worker ended: take its last words, then report its exit."""
        for read, name in ((self._read_control, "control_fd"), (self._read_output, "output_fd")):
            for _ in range(MAX_LAST_READS):
                if getattr(worker, name) < 0 or not read(worker):
                    break
        self._running.remove(worker)
        self._hang_up(worker)
        code, result = worker.process.returncode, None
        if worker.result_fd >= 0:
            result = read_file(worker.result_fd) if code == 0 else None
            os.close(worker.result_fd)
        self._exits.append(WorkerExit(rank=worker.rank, code=code, time=time.time(), result=result))
        if signal_group(worker.process.pid, signal.SIGTERM):
            signal_group(worker.process.pid, signal.SIGCONT)
        worker.linger_until = time.monotonic() + LINGER_SECONDS
        self._lingering.append(worker)

    def _hang_up(self, worker: _Worker) -> None:
        if worker.outbox is not None:
            if worker.is_told_later:
                assert self._selector is not None
                self._selector.unregister(worker.outbox.fd)
                worker.is_told_later = False
            worker.outbox.close()

    def _let_go(self, worker: _Worker) -> None:
        """Forget a worker that ended once everything it started has ended too, which is seen to."""
        if is_group_alive(worker.process.pid):
            if worker.linger_until is not None and time.monotonic() < worker.linger_until:
                return
            signal_group(worker.process.pid, signal.SIGKILL)
        self._lingering.remove(worker)
        self._tell_guard(f"-{worker.process.pid}\n")
        for fd in (worker.output_fd, worker.control_fd, worker.pid_fd):
            self._unwatch(fd)
        worker.log.close()

    def _unwatch(self, fd: int) -> None:
        if fd >= 0:
            assert self._selector is not None
            self._selector.unregister(fd)
            os.close(fd)

    def beat(self) -> None:
        """Let the guard know that this process is not stopped."""
        self._tell_guard("\n")

    def _tell_guard(self, line: str) -> None:
        if self._guard is not None and self._guard.stdin is not None:
            with contextlib.suppress(OSError):
                self._guard.stdin.write(line.encode())

    def _close_ready(self) -> None:
        while self._ready:
            self._ready.pop().close()

    def _close(self) -> None:
        self._close_ready()
        while self._lingering:
            self._wait(0.02)
        self._forget_call()
        if self._spare is not None:
            self._spare.close()
            self._spare = None
        if self._guard is not None:
            self._guard.kill()
            self._guard.communicate()
            self._guard = None
        if self._selector is not None:
            self._selector.close()
            self._selector = None


def fit(spec: WorkerSpec) -> WorkerSpec:
    """A worker as it is started on this machine: with its interpreter, and in its environment."""
    worker_file = os.path.join(os.path.dirname(os.path.abspath(__file__)), "worker.py")
    places = {PYTHON: sys.executable, WORKER_FILE: worker_file}
    env = spec.env if spec.defaults is None else {**spec.defaults, **inherited_env(), **spec.env}
    command = (*(places.get(part, part) for part in spec.command[:2]), *spec.command[2:])
    return replace(spec, command=command, env=env, defaults=None)


def _folder_of(spec: WorkerSpec) -> str:
    """Where a worker's run is kept, if that is on this machine; else where it works."""
    folder = spec.env.get("SHOAL_RUN_DIR", "")
    return folder if os.path.isdir(folder) else spec.working_dir


def _cannot_start(spec: WorkerSpec, error: OSError) -> UserError:
    return UserError(
        f"Worker {spec.rank} could not be started.",
        why=f"{error.strerror or error}: {error.filename or spec.command[0]}",
        hint="check the interpreter, the working folder, and the limits of `ulimit -a`",
    )


def _enlarge(pipe: int) -> None:
    """Let a worker run ahead of a launcher that is busy. Without the privilege the pipe stays as it is."""
    from fcntl import fcntl

    with contextlib.suppress(OSError):
        fcntl(pipe, _F_SETPIPE_SZ, PIPE_BYTES)


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
