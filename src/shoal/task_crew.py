"""Wiring: the workers of a map as processes of this machine, seen and kept in a run folder."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Self, TextIO

from shoal.answer import answer
from shoal.engine.cause import Evidence, find_failures
from shoal.engine.engine import PYTHON, Listener
from shoal.engine.entry import command_of, stacks_file
from shoal.engine.env import RunFacts, inherited_env, task_env
from shoal.engine.local import LocalEngine
from shoal.engine.machine import OutOfMemoryKills, available_cores, out_of_memory_kills
from shoal.engine.requests import RequestSocket
from shoal.engine.signals import grace_of, holding_back_ctrl_c
from shoal.engine.story import as_error
from shoal.observe.console import Console
from shoal.observe.folder import RunFolder
from shoal.observe.journal import Journal, decode
from shoal.observe.log_parts import last_log_lines
from shoal.observe.system import SystemWriter
from shoal.spec.errors import ShoalError, WorkerError
from shoal.spec.event import Event
from shoal.spec.job import Job, Seat, WorkerExit, WorkerSpec
from shoal.tasks.decision import Decision, Fail, Give, GiveUp, Kill, Retry, Start, TakeBack
from shoal.tasks.errors import ItemError, ending_of
from shoal.tasks.handout import Handout
from shoal.tasks.packing import Packed
from shoal.tasks.post import Line, Post
from shoal.tasks.progress import Progress
from shoal.watch import say

END_SECONDS = 2.0
"""Workers that have nothing more to do may take so long to end as Python programs do."""


class TaskCrew:
    """Starts and replaces workers, carries items to them and words back, and shows what they print.

    It decides nothing: `Handout` does. Leaving it ends all workers, whatever they are doing.
    """

    def __init__(self, job: Job, folder: RunFolder, call: tuple[bytes, bytes], out: TextIO | None) -> None:
        self.num_workers = job.num_workers or 1
        self._job, self._folder = job, folder
        self._facts = RunFacts(name=folder.name, dir=folder.path, num_workers=self.num_workers)
        self._console = Console(out, num_workers=self.num_workers) if out is not None else None
        self._journal = Journal(os.path.join(folder.path, "journal.jsonl"), self._note)
        self._system = SystemWriter(folder.path, self._note)
        self.progress = Progress(self._show_progress, self._keep)
        self._errors: list[Event] = []
        self._why: dict[int, str] = {}
        self._inherit: dict[int, Sequence[int]] = {}
        self._memory_kills = out_of_memory_kills()
        self._stack = ExitStack()
        self._post = Post(*call)
        self._stack.callback(self._post.close)
        self._requests = self._stack.enter_context(RequestSocket(folder.path))
        self._inherit[-1] = ()  # an engine does not keep an empty mapping
        self._engine = LocalEngine(
            Listener(output=self._show, control=self._hear, problem=self._note, system=self._system.write),
            inherit_fds=self._inherit,
            wake_fds=[self._requests.fileno(), self._post.fileno()],
        )
        self._write("run_started", num_workers=self.num_workers, command=" ".join(folder.facts["command"]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self._engine.stop(grace_of(self._job.options))
            for end in self._engine.poll():
                self._write("worker_exited", end.rank, code=end.code)
            self._engine.close()
        finally:
            self._say_end(error)
            if self._console is not None:
                self._console.close()
            self._journal.close()
            self._system.close()
            self._stack.close()

    def carry_out(
        self, decisions: Sequence[Decision], handout: Handout, items: Mapping[int, Packed]
    ) -> Iterator[GiveUp]:
        """Do what was decided; what is given up is the caller's to tell."""
        self._start([each for each in decisions if isinstance(each, Start)], handout)
        for decision in decisions:
            match decision:
                case Give():
                    self._post.send(decision.worker, [(number, items[number]) for number in decision.numbers])
                case TakeBack():
                    self._post.take_back(decision.worker)
                case Kill():
                    self._note(f"worker {decision.worker}: {decision.why}; killing it")
                    self._why[decision.worker] = decision.why
                    self._engine.kill(decision.worker)
                case Retry():
                    self._tell_retry(decision)
                case GiveUp():
                    yield decision
                case Fail():
                    raise self._cannot_work(decision)

    def _answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return answer(request, self._engine, None, self._keep, self._take_stacks, self._folder.path)

    def listen(self, patience: float, handout: Handout) -> Iterator[tuple[Line, Any, int]]:
        """Wait for something to happen; what workers say, and who has ended."""
        exits = self._engine.poll(patience)
        self._requests.look(self._answer)
        for line, running, since in self._post.look():
            handout.seen(line.worker, line.incarnation, running, since)
        yield from self._post.collect()
        for end in exits:
            running, incarnation = self._post.running(end.rank)
            yield from self._post.close_line(end.rank)
            handout.exited(end.rank, incarnation, running, self._bury(end), time.monotonic())
        if self._console is not None:
            self._console.tick()

    def finish(self) -> None:
        """All is done: let workers end as they like, if they do it soon."""
        self._post.hang_up()
        deadline = time.monotonic() + END_SECONDS
        while self._engine.pids and time.monotonic() < deadline:
            for end in self._engine.poll(0.05):
                self._write("worker_exited", end.rank, code=end.code)

    def note_failure(self, number: int, error: ItemError) -> None:
        """Write down what went wrong with an item."""
        data = {"item": number, "message": error.message, "why": error.why, "where": error.where}
        self._write("item_failed", error.rank, **data)

    def _say_end(self, error: BaseException | None) -> None:
        """Write down what became of the map."""
        cause = None
        if isinstance(error, ShoalError):
            cause = {name: getattr(error, name) for name in ("message", "why", "hint", "where", "rank")}
        status, exit_code = ending_of(error)
        self._write("run_ended", status=status, exit_code=exit_code, cause=cause)

    def _start(self, starts: Sequence[Start], handout: Handout) -> None:
        if not starts:
            return
        specs = [self._spec(each.worker, each.incarnation) for each in starts]
        with holding_back_ctrl_c():
            self._engine.start(specs)
        for each in starts:
            self._post.started(each.worker)
            handout.started(each.worker, each.incarnation, time.monotonic())
            pid = self._engine.pids.get(each.worker)
            more = {"incarnation": each.incarnation} if each.incarnation else {}
            self._write("worker_started", each.worker, pid=pid, **more)
            if each.incarnation and self._console is not None:
                self._console.begin(each.worker)

    def _spec(self, worker: int, incarnation: int) -> WorkerSpec:
        seat = Seat(local_rank=worker, num_local=self.num_workers, cores=available_cores())
        env = task_env(self._job, worker, self._facts, seat, inherited_env(), incarnation)
        entry, fds = self._post.open(worker, incarnation, self._folder.path if "SHOAL_FAULTS" in env else None)
        self._inherit[worker] = fds
        stacks_path = stacks_file(self._folder.path, worker)
        return WorkerSpec(
            rank=worker,
            command=command_of(PYTHON, worker, entry, stacks_path=stacks_path),
            env=env,
            working_dir=self._job.working_dir,
            log_path=self._log_path(worker),
        )

    def _log_path(self, worker: int) -> str:
        return os.path.join(self._folder.path, "logs", f"{worker}.log")

    def _bury(self, end: WorkerExit) -> str:
        """A process has ended while there was work: how, in a sentence. Raises where it could not even begin."""
        self._write("worker_exited", end.rank, code=end.code)
        if self._console is not None:
            self._console.lose(end.rank)
        errors = [event for event in self._errors if event.rank == end.rank]
        if errors:
            raise self._cannot_load(end, errors)
        if (why := self._why.pop(end.rank, None)) is not None:
            return why
        before, after = self._memory_kills, out_of_memory_kills()
        kills = OutOfMemoryKills(cgroup=after.cgroup - before.cgroup, machine=after.machine - before.machine)
        found = find_failures(Evidence(exits=[end], tails={end.rank: self._tail(end.rank)}, memory_kills=kills))
        if not found:
            return "The worker ended itself, with exit code 0."
        return f"{found[0].message} ({found[0].why})" if found[0].why else found[0].message

    def _tail(self, worker: int) -> str:
        return last_log_lines(self._log_path(worker), 400)[0].decode("utf-8", "replace")

    def _cannot_load(self, end: WorkerExit, errors: Sequence[Event]) -> WorkerError:
        failure = find_failures(Evidence(exits=[end], errors=errors))[0]
        error = as_error(replace(failure, why=failure.why or "the worker could not load or serve the function"))
        error.add_note(f"\nIn worker {error.rank}:\n{error.remote_traceback.rstrip()}")
        return error

    def _cannot_work(self, decision: Fail) -> WorkerError:
        return WorkerError(
            "Workers end again and again without having begun an item.",
            why=decision.why,
            hint=f"their logs may say more: {os.path.join(self._folder.path, 'logs')}",
        )

    def _tell_retry(self, retry: Retry) -> None:
        self._write("item_retried", retry.worker, item=retry.number, attempt=retry.attempt, why=retry.why)
        self._note(f"item {retry.number} failed on worker {retry.worker} and is tried again: {retry.why}")

    def _take_stacks(self, reason: str) -> dict[int, Any]:
        working_dir = os.path.abspath(self._job.working_dir)
        return self._engine.take_stacks(self._folder.path, reason, working_dir)

    def _show(self, worker: int, data: bytes) -> None:
        if self._console is not None:
            self._console.feed(worker, data)

    def _show_progress(self, event: Event) -> None:
        if self._console is not None:
            self._console.progress(event)

    def _hear(self, worker: int, line: bytes) -> None:
        event = decode(line)
        if event is not None and event.kind == "error":
            self._errors.append(replace(event, rank=worker))
            self._keep(self._errors[-1])

    def _note(self, text: str) -> None:
        if self._console is not None and self._console.is_tty:
            self._console.note(f"shoal: {text}")
        elif self._console is not None:
            say(f"shoal: {text}")

    def _write(self, kind: str, worker: int | None = None, **data: Any) -> None:
        self._keep(Event(kind=kind, time=time.time(), rank=worker, data=data))

    def _keep(self, event: Event) -> None:
        self._journal.write(event)
