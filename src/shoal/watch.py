"""Wiring: one run seen through, from the start of its workers to what became of them."""

import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, TextIO

from shoal.answer import answer
from shoal.engine.berths import name_machine
from shoal.engine.cause import Evidence, Failure, find_failures, should_stop
from shoal.engine.engine import Engine, Listener
from shoal.engine.entry import command_of, stacks_file
from shoal.engine.env import RunFacts, worker_layers
from shoal.engine.local import LocalEngine
from shoal.engine.log import limit_of
from shoal.engine.machine import OutOfMemoryKills, available_cores, out_of_memory_kills
from shoal.engine.nursery import num_at_start, wants_spare
from shoal.engine.requests import RequestSocket
from shoal.engine.signals import StopSignals, grace_of, holding_back_ctrl_c
from shoal.engine.story import tell_error
from shoal.observe.folder import RunFolder
from shoal.spec.errors import ShoalError
from shoal.spec.event import Event
from shoal.spec.job import Job, Seat, WorkerExit, WorkerSpec
from shoal.spec.system import SystemSample

if TYPE_CHECKING:
    from shoal.alerting import Alerts, AlertWatch
    from shoal.diagnosing import Diagnosing
    from shoal.elastic_run import ElasticRun
    from shoal.engine.clock import ClockOffset
    from shoal.engine.ground import Ground
    from shoal.engine.stacks import Stack
    from shoal.hanging import HangWatch
    from shoal.observe.console import Console
    from shoal.observe.journal import Journal
    from shoal.observe.system import SystemWriter
    from shoal.sending import Sending


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """Who is to be started: a job with its number of workers, and what each of them runs.

    `ground` is where the machines are; None is this one. `alerts` is what the user said about them.
    """

    job: Job
    python: str
    entry_of: Callable[[int], tuple[str, ...]]
    stdin_fd: int | None = None
    call: bytes | None = field(default=None, repr=False)
    ground: "Ground | None" = None
    alerts: "Alerts | None" = None

    @property
    def num_workers(self) -> int:
        return self.job.num_workers or 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a run. `failures` has the first cause first; `exit_code` is that of the cause.

    `status` is `finished`, `failed`, or `stopped` (by a signal: then `stopped_by` names it).
    """

    name: str
    run_dir: str
    status: str
    exit_code: int
    num_workers: int
    seconds: float
    exits: tuple[WorkerExit, ...]
    failures: tuple[Failure, ...] = ()
    stopped_by: str = ""


class Watch:
    """Sees one run through: starts the workers, passes on what they say, and stops the rest when one fails."""

    def __init__(
        self,
        folder: RunFolder,
        facts: RunFacts,
        stops: StopSignals | None,
        out: TextIO | None,
        send_to: Sequence[str] = (),
        copy_to: str | None = None,
    ) -> None:
        self._folder = folder
        self._facts = facts
        self._stops = stops
        self._out = out
        self._send_to, self._copy_to = send_to, copy_to
        self._console: Console | None = None
        self._journal: Journal | None = None
        self._system: SystemWriter | None = None
        self._sending: Sending | None = None
        self._alerts: AlertWatch | None = None
        self._elastic: ElasticRun | None = None
        self._hangs: HangWatch | None = None
        self._diagnosing: Diagnosing | None = None
        self._errors: list[Event] = []
        self._exits: dict[int, WorkerExit] = {}
        self._nodes: dict[int, str] = {}
        self._is_stuck = False

    def run(self, crew: Crew) -> Outcome:
        """Start the workers and return when all of them have ended, whatever the reason."""
        started, memory_kills = time.monotonic(), out_of_memory_kills()
        with RequestSocket(self._folder.path) as requests:
            engine = self._make_engine(crew, requests)
            try:
                with holding_back_ctrl_c() if self._stops is None else contextlib.nullcontext():
                    seats = self._seat(crew, engine)
                    engine.start([self._spec(crew, rank, seat) for rank, seat in seats.items()])
                    self._open(crew, engine)
                self._follow(engine, requests)
            finally:
                stopped_at = time.time() if engine.pids else None
                engine.stop(grace_of(crew.job.options))
                self._record(engine.poll())
                engine.close()
                if self._console is not None:
                    self._display(self._console.close)
        evidence = self._evidence(stopped_at, memory_kills)
        outcome = self._conclude(evidence, time.monotonic() - started)
        if self._diagnosing is not None:
            self._diagnosing.failed(outcome.failures)
        self._note_end(outcome)
        return outcome

    def _make_engine(self, crew: Crew, requests: RequestSocket) -> Engine:
        listener = Listener(
            output=self._show,
            control=self._hear,
            problem=self._note,
            clock=self._keep_clock,
            system=self._keep_sample,
        )
        wake_fds = [requests.fileno(), *([self._stops.wake_fd] if self._stops else [])]
        engine: Engine
        if crew.ground is not None:
            from shoal.engine.fleet import Fleet

            engine = Fleet(crew.ground, listener, crew.num_workers, wake_fds=wake_fds, should_stop=self._should_stop)
        else:
            engine = LocalEngine(listener, stdin_fd=crew.stdin_fd, wake_fds=wake_fds)
        if self._stops is not None:
            self._stops.on_second = lambda: engine.signal(signal.SIGKILL)
            self._stops.on_pause = lambda: engine.signal(signal.SIGSTOP)
            self._stops.on_resume = lambda: engine.signal(signal.SIGCONT)
        return engine

    def _should_stop(self) -> bool:
        return self._stops is not None and bool(self._stops.requested)

    def _seat(self, crew: Crew, engine: Engine) -> Mapping[int, Seat]:
        """Find out where workers will be, and so where they meet."""
        first_ones = num_at_start(crew.job.options, self._facts.min_workers, crew.num_workers)
        seats = engine.seat(range(first_ones), self._facts.min_workers or first_ones)
        first = next(iter(seats.values()))
        self._facts = replace(
            self._facts,
            master_addr=first.address,
            master_port=first.store_port,
            worker_addresses=tuple(f"{seat.address}:{seat.worker_port}" for seat in seats.values()),
        )
        return seats

    def _spec(self, crew: Crew, rank: int, seat: Seat, incarnation: int = 0) -> WorkerSpec:
        if crew.ground is not None:
            self._nodes[rank] = name_machine(seat.node, seat.address)
        is_elastic, stacks_path = self._facts.min_workers is not None, stacks_file(self._folder.path, rank)
        entry = crew.entry_of(rank)
        defaults, env = worker_layers(crew.job, rank, self._facts, seat, incarnation)
        return WorkerSpec(
            rank=rank,
            command=command_of(crew.python, rank, entry, is_elastic=is_elastic, stacks_path=stacks_path),
            env=env,
            defaults=defaults,
            working_dir=crew.job.working_dir,
            log_path=self._log_path(rank),
            log_limit_bytes=limit_of(crew.job.options),
            call=crew.call,
        )

    def _log_path(self, rank: int) -> str:
        return os.path.join(self._folder.path, "logs", f"{rank}.log")

    def _open(self, crew: Crew, engine: Engine) -> None:
        # Imported now, while the workers are starting up.
        from shoal.alerting import Alerts, AlertWatch
        from shoal.observe.console import Console
        from shoal.observe.journal import Journal

        if self._out is not None:
            self._console = Console(self._out, num_workers=crew.num_workers)
        self._journal = Journal(os.path.join(self._folder.path, "journal.jsonl"), self._note)
        if self._send_to or self._copy_to is not None:
            from shoal.sending import Sending

            since = self._folder.facts["created"] if self._facts.is_resumed else 0.0
            self._sending = Sending(self._folder.path, self._send_to, since, self._note, self._copy_to)
        since = self._folder.facts["created"]
        self._alerts = AlertWatch(self._folder.path, crew.alerts or Alerts(), self._keep, self._note, since=since)
        self._diagnosing = self._make_diagnosing(crew, engine)
        command = " ".join(self._folder.facts["command"])
        self._write("run_started", num_workers=crew.num_workers, command=command, num_cores=available_cores())
        for rank, pid in engine.pids.items():
            self._write("worker_started", rank, pid=pid)
        if self._facts.min_workers is not None:
            self._elastic = self._make_elastic(crew, engine, self._facts.min_workers)
            self._elastic.begin()
        elif crew.num_workers > 1:
            from shoal.hanging import HangWatch

            self._hangs = HangWatch(self._folder.path, self._taker(engine), self._keep, self._note)

    def _make_diagnosing(self, crew: Crew, engine: Engine) -> "Diagnosing":
        from shoal.diagnosing import Diagnosing

        return Diagnosing(
            (lambda rank: engine.pids.get(rank)) if crew.ground is None else lambda rank: None,
            self._taker(engine),
            self._keep,
            self._note,
            self._facts.worker_addresses,
            is_elastic=self._facts.min_workers is not None,
        )

    def _make_elastic(self, crew: Crew, engine: Engine, min_workers: int) -> "ElasticRun":
        from shoal.elastic_run import ElasticRun, Hooks

        hooks = Hooks(
            spec_of=lambda rank, incarnation: self._spec(crew, rank, engine.seat([rank], 1)[rank], incarnation),
            write=self._keep,
            show=self._note,
            began=self._begin_again,
            changed=self._resized,
            take_stacks=self._taker(engine),
        )
        has_spare = wants_spare(crew.job.options) and crew.entry_of(0)[0] in ("script", "module")
        return ElasticRun(engine, min_workers, crew.num_workers, hooks, has_spare=has_spare)

    def _taker(self, engine: Engine) -> "Callable[[str], Mapping[int, Stack]]":
        """How the stacks of all workers that run are had, with the reason for which they are wanted."""
        working_dir = os.path.abspath(self._folder.facts["job"]["working_dir"])
        return lambda reason: engine.take_stacks(self._folder.path, reason, working_dir)

    def _follow(self, engine: Engine, requests: RequestSocket) -> None:
        """Return when all workers have ended, or when the rest of them should be stopped."""
        take_stacks = self._taker(engine)
        if requests.problem:
            self._note(requests.problem)
        while engine.pids or (self._elastic is not None and self._elastic.is_waiting):
            self._take(engine.poll(self._patience()))
            requests.look(
                lambda request: answer(request, engine, self._elastic, self._keep, take_stacks, self._folder.path)
            )
            if self._elastic is not None:
                self._elastic.look()
                if self._elastic.failure is not None:
                    return
            if self._hangs is not None:
                self._hangs.look()
            if self._diagnosing is not None:
                self._diagnosing.look()
            if self._sending is not None:
                self._sending.look()
            if self._alerts is not None:
                self._alerts.look()
            if self._console is not None:
                self._display(self._console.tick)
            if self._stops is not None and self._stops.requested:
                self._stops.acknowledge()
                if self._elastic is not None:
                    self._elastic.stop(self._stops.requested.name)
                return
            if self._has_failed():
                failures = find_failures(Evidence(exits=list(self._exits.values()), errors=self._errors))
                if should_stop(failures, time.time()):
                    if self._diagnosing is not None:
                        self._diagnosing.failed(failures)
                    return

    def _has_failed(self) -> bool:
        return bool(self._errors) or any(end.code for end in self._exits.values())

    def _patience(self) -> float:
        most = 0.05 if self._elastic is not None or self._has_failed() else 1.0
        due = self._console.next_tick() if self._console is not None else None
        return most if due is None else min(most, due)

    def _take(self, exits: Sequence[WorkerExit]) -> None:
        """Workers have ended by themselves. Those that an elastic run can do without are not among its exits."""
        for end in exits:
            if self._diagnosing is not None:
                self._diagnosing.ended(end.rank)
            is_failure = end.code > 0 or any(event.rank == end.rank for event in self._errors)
            if self._elastic is None or not self._elastic.exited(end, is_failure=is_failure):
                self._record([end])
                continue
            self._write("worker_exited", end.rank, code=end.code)
            if self._console is not None:
                self._display(self._console.lose, end.rank)

    def _record(self, exits: Sequence[WorkerExit]) -> None:
        for end in exits:
            self._exits[end.rank] = end
            self._write("worker_exited", end.rank, code=end.code)
            if self._console is not None:
                self._display(self._console.end, end.rank)

    def _begin_again(self, rank: int) -> None:
        self._exits.pop(rank, None)
        if self._console is not None:
            self._display(self._console.begin, rank)

    def _resized(self, num_workers: int) -> None:
        with contextlib.suppress(ShoalError):  # a full disk does not end a run
            self._folder.update(num_workers=num_workers)

    def _show(self, rank: int, data: bytes) -> None:
        if self._console is not None:
            self._display(self._console.feed, rank, data)

    def _display(self, act: Callable[..., None], *args: Any) -> None:
        """Use the console. A terminal that is held or a reader that sleeps must not keep Ctrl-C from working."""
        if self._stops is None:
            act(*args)
        elif not self._is_stuck:
            self._is_stuck = not self._stops.attempt(act, *args)

    def _hear(self, rank: int, line: bytes) -> None:
        from shoal.observe.journal import decode

        event = decode(line)
        if event is None:
            return
        event = replace(event, rank=rank)
        if event.kind == "error":
            self._keep(event)
            if event.data.get("is_for_log") is True:
                self._log(rank, tell_error(event))
            if self._elastic is not None and event.data.get("is_retryable") is True:
                self._elastic.hear(event)
            else:
                self._errors.append(event)
        elif event.kind == "progress" and self._console is not None:
            self._display(self._console.progress, event)
        elif event.kind != "progress" and self._elastic is not None:
            self._elastic.hear(event)
        if self._hangs is not None:
            self._hangs.hear(event)
        if self._diagnosing is not None and event.kind != "error":
            self._diagnosing.hear(event)

    def _log(self, rank: int, text: str) -> None:
        """Add to what a worker has printed."""
        with contextlib.suppress(OSError), open(self._log_path(rank), "a", encoding="utf-8") as file:
            file.write(f"{text}\n")

    def _note(self, text: str) -> None:
        if self._console is not None and self._console.is_tty:
            self._display(self._console.note, f"shoal: {text}")
        else:
            say(f"shoal: {text}")

    def _write(self, kind: str, rank: int | None = None, **data: Any) -> None:
        self._keep(Event(kind=kind, time=time.time(), rank=rank, data=data))

    def _keep_sample(self, sample: SystemSample) -> None:
        if self._system is None:
            from shoal.observe.system import SystemWriter

            self._system = SystemWriter(self._folder.path, self._note)
        self._system.write(sample)

    def _keep(self, event: Event) -> None:
        if self._journal is not None:
            self._journal.write(event)
        if self._diagnosing is not None:
            self._diagnosing.hear(event)

    def _keep_clock(self, offset: "ClockOffset") -> None:
        self._write("clock", **asdict(offset))

    def _evidence(self, stopped_at: float | None, before: OutOfMemoryKills) -> Evidence:
        from shoal.observe.log_parts import last_log_lines

        after = out_of_memory_kills()
        ended = {end.rank for end in self._exits.values() if end.code}
        ended |= (
            self._elastic.lost_ranks if self._elastic is not None and self._elastic.failure is not None else set()
        )
        silent = ended - {event.rank for event in self._errors}
        return Evidence(
            exits=list(self._exits.values()),
            errors=self._errors,
            stopped_at=stopped_at,
            working_dir=os.path.abspath(self._folder.facts["job"]["working_dir"]),
            tails={rank: last_log_lines(self._log_path(rank), 400)[0].decode("utf-8", "replace") for rank in silent},
            nodes=self._nodes,
            memory_kills=OutOfMemoryKills(
                cgroup=after.cgroup - before.cgroup, machine=after.machine - before.machine
            ),
        )

    def _conclude(self, evidence: Evidence, seconds: float) -> Outcome:
        requested = self._stops.requested if self._stops is not None else None
        failures = find_failures(evidence) if self._elastic is None else self._elastic.find_failures(evidence)
        status, code = ("failed", failures[0].exit_code) if failures else ("finished", 0)
        if requested is not None:
            # What workers say when they are told to end is not why they ended.
            failures = [failure for failure in failures if failure.time < (evidence.stopped_at or math.inf)]
            status, code = "stopped", 128 + requested
        return Outcome(
            name=self._folder.name,
            run_dir=self._folder.path,
            status=status,
            exit_code=code,
            num_workers=self._facts.num_workers,
            seconds=seconds,
            exits=tuple(self._exits[rank] for rank in sorted(self._exits)),
            failures=tuple(failures),
            stopped_by=requested.name if requested is not None else "",
        )

    def _note_end(self, outcome: Outcome) -> None:
        cause = asdict(outcome.failures[0]) if outcome.failures else None
        data = {"status": outcome.status, "exit_code": outcome.exit_code, "cause": cause}
        ended = Event(kind="run_ended", time=time.time(), data=data)
        if self._alerts is not None:
            self._alerts.look(ended)
        self._keep(ended)
        if self._journal is not None:
            self._journal.close()
        if self._system is not None:
            self._system.close()

    def close(self) -> None:
        """Let go of those who follow the run. To be called when its folder says what has become of it."""
        if self._alerts is not None:
            self._alerts.close()
            self._alerts = None
        if self._sending is not None:
            self._sending.close(is_stopped=self._should_stop())
            self._sending = None


def say(text: str) -> None:
    """Our own words, beside the output of workers."""
    with contextlib.suppress(OSError, ValueError):  # nobody may be there to read it
        print(text, file=sys.stderr, flush=True)
