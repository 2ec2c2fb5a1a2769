"""The one who writes: many changes share one transaction, and nobody is told of theirs before it is on disk."""

import queue
import sqlite3
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from shoal.service import audit
from shoal.service.job import Job
from shoal.service.store import Store
from shoal.spec.errors import ShoalError, UserError

MAX_BATCH = 512
T = TypeVar("T")


class Change:
    """One change being made. It sees what those before it in the transaction did; if it raises, it is undone."""

    def __init__(self, store: Store, batch: dict[int, Job]) -> None:
        self._store = store
        self._batch = batch
        self.jobs: dict[int, Job] = {}
        self.touches_people = False
        self.now = store.clock.now()
        self.wall = store.clock.wall()

    @property
    def connection(self) -> sqlite3.Connection:
        return self._store.connection

    def job(self, number: int) -> Job:
        """The job as it is by now, over or not."""
        for known in (self.jobs, self._batch, self._store.known.jobs):
            if number in known:
                return known[number]
        found = self._store.read_job(number)
        if found is None:
            raise UserError(f"There is no job {number}.", hint="`shoal queue --all` shows those there were")
        return found

    def live_jobs(self) -> dict[int, Job]:
        """All that are not over, as they are by now."""
        found = {**self._store.known.jobs, **self._batch, **self.jobs}
        return {number: job for number, job in found.items() if not job.is_over}

    def add(self, make: Callable[[int], Job]) -> Job:
        """A new job under the next number."""
        job = make(self._store.next_number)
        self._store.next_number += 1
        self._store.write_job(job, is_new=True)
        self.jobs[job.number] = job
        return job

    def put(self, job: Job) -> None:
        if self.job(job.number) is not job:
            self._store.write_job(job, is_new=False)
            self.jobs[job.number] = job

    def note(self, who: str, action: str, subject: str, **details: Any) -> None:
        """A line in the audit log."""
        audit.append(self.connection, self.wall, who, action, subject, details)

    def next_number(self) -> int:
        return self._store.next_number


class Writer:
    """A thread with a queue. `do` returns at once; what it returns is done when the change is on disk."""

    def __init__(self, store: Store, on_change: Callable[[], None] = lambda: None) -> None:
        self._store = store
        self._on_change = on_change
        self._queue: queue.SimpleQueue[tuple[Callable[[Change], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="shoal-writer", daemon=True)
        self.num_commits = 0
        self.num_changes = 0
        self._thread.start()

    def do(self, act: Callable[[Change], T]) -> "Future[T]":
        done: Future[T] = Future()
        self._queue.put((act, done))
        return done

    def close(self) -> None:
        """Write what was asked for so far, and end."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            first = self._queue.get()
            if first is None:
                return
            asked, is_last = [first], False
            while len(asked) < MAX_BATCH and not is_last and not self._queue.empty():
                more = self._queue.get()
                is_last = more is None
                asked += [more] if more is not None else []
            self._write(asked)
            if is_last:
                return

    def _write(self, asked: list[tuple[Callable[[Change], Any], "Future[Any]"]]) -> None:
        """All of them in one transaction: those that fail are undone alone, a disk that fails undoes all."""
        store, batch, touches_people = self._store, dict[int, Job](), False
        first_free = store.next_number
        # Whoever does not wait any more must not keep the others from their answers.
        asked = [each for each in asked if each[1].set_running_or_notify_cancel()]
        results: list[tuple[Future[Any], Any, BaseException | None]] = []
        try:
            store.connection.execute("BEGIN IMMEDIATE")
            for act, done in asked:
                change = Change(store, batch)
                before = store.next_number
                store.connection.execute("SAVEPOINT one")
                try:
                    results.append((done, act(change), None))
                    batch.update(change.jobs)
                    touches_people |= change.touches_people
                except sqlite3.OperationalError:
                    raise
                except Exception as error:
                    store.connection.execute("ROLLBACK TO one")
                    store.next_number = before
                    results.append((done, None, error))
                store.connection.execute("RELEASE one")
            store.write_mark()
            store.connection.execute("COMMIT")
        except sqlite3.Error as error:
            store.next_number = first_free
            if store.connection.in_transaction:
                store.connection.execute("ROLLBACK")
            self._refuse(asked, error)
            return
        self._publish(batch, touches_people)
        self.num_commits += 1
        self.num_changes += len(asked)
        for done, value, problem in results:
            if problem is None:
                done.set_result(value)
            else:
                done.set_exception(problem)
        if batch or touches_people:
            self._on_change()

    def _publish(self, batch: Mapping[int, Job], touches_people: bool) -> None:
        known = self._store.known
        for number, job in batch.items():
            if job.is_over:
                known.jobs.pop(number, None)
            else:
                known.jobs[number] = job
            if job.is_active:
                known.active[number] = job
            else:
                known.active.pop(number, None)
        if touches_people:
            self._store.load_people()
        known.num_changes += len(batch) + touches_people

    def _refuse(self, asked: list[tuple[Callable[[Change], Any], "Future[Any]"]], error: sqlite3.Error) -> None:
        problem = ShoalError(
            "The service cannot write.",
            why=f"{self._store.path}: {error}",
            hint="see whether its disk is full; what was answered before is safe",
        )
        for _, done in asked:
            done.set_exception(problem)
