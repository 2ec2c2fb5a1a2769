"""The service's memory: SQLite in its folder, and what of it is looked at often. One process at a time writes."""

import contextlib
import json
import os
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from shoal.service import audit
from shoal.service.clock import Clock, Mark
from shoal.service.job import FINISHED, OVER, Job, decode_job, encode_asked, encode_facts
from shoal.service.people import Person, Token
from shoal.service.schema import upgrade
from shoal.spec.errors import UserError

FILE = "service.db"
_JOB = "SELECT asked, facts FROM jobs"


@dataclass(slots=True)
class Known:
    """What is in memory of the store: all jobs that are not over, people, tokens, nodes that drain.

    `active` are those of the jobs that have an attempt: they are looked at all the time, and others may be very many.
    `num_changes` grows with whatever may change a decision. Only the writer changes it, after what it shows is on
    disk. Others read: each dict is replaced or changed by one step that Python does at once.
    """

    jobs: dict[int, Job] = field(default_factory=dict)
    active: dict[int, Job] = field(default_factory=dict)
    people: Mapping[str, Person] = field(default_factory=dict)
    tokens: Mapping[bytes, Token] = field(default_factory=dict)
    drained: Mapping[str, str] = field(default_factory=dict)
    num_changes: int = 0


class Store:
    """The open database. `clock` goes on from where it stood when the service last wrote."""

    def __init__(self, folder: str, clock: Clock | None = None) -> None:
        self.path = os.path.join(folder, FILE)
        self.clock = clock or Clock()
        self.connection = _connect(self.path)
        with self._explained():
            upgrade(self.connection)
            self.clock.resume(self._last_mark())
        self.known = Known()
        self.next_number = 1
        self.load()

    def load(self) -> None:
        """Read all that is kept in memory."""
        with self._explained():
            jobs = [decode_job(*row) for row in self.connection.execute(f"{_JOB} WHERE is_over = 0 ORDER BY number")]
            self.known.jobs = {job.number: job for job in jobs}
            self.known.active = {job.number: job for job in jobs if job.is_active}
            last = self.connection.execute("SELECT max(number) FROM jobs").fetchone()[0] or 0
            self.next_number = max(last, int(self.fact("last_number", "0"))) + 1
            self.load_people()

    def load_people(self) -> None:
        rows = self.connection.execute("SELECT name, role, account, max_jobs, max_workers FROM people ORDER BY name")
        self.known.people = {
            name: Person(name=name, role=role, account=account, max_jobs=jobs, max_workers=workers)
            for name, role, account, jobs, workers in rows
        }
        rows = self.connection.execute("SELECT id, digest, person, made_wall, ends_at, is_revoked FROM tokens")
        self.known.tokens = {
            bytes(digest): Token(id=id, person=person, made_wall=made, ends_at=ends, is_revoked=bool(revoked))
            for id, digest, person, made, ends, revoked in rows
        }
        self.known.drained = dict(self.connection.execute("SELECT node, why FROM drained ORDER BY node"))

    def fact(self, name: str, default: str) -> str:
        row = self.connection.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return default if row is None else str(row[0])

    def set_fact(self, name: str, value: str) -> None:
        self.connection.execute("INSERT OR REPLACE INTO facts (name, value) VALUES (?, ?)", (name, value))

    def write_job(self, job: Job, *, is_new: bool) -> None:
        if is_new:
            self.connection.execute(
                "INSERT INTO jobs (number, owner, state, is_over, asked, facts) VALUES (?, ?, ?, ?, ?, ?)",
                (job.number, job.owner, job.state, job.is_over, encode_asked(job.asked), encode_facts(job)),
            )
        else:
            self.connection.execute(
                "UPDATE jobs SET state = ?, is_over = ?, facts = ? WHERE number = ?",
                (job.state, job.is_over, encode_facts(job), job.number),
            )

    def read_job(self, number: int) -> Job | None:
        row = self.connection.execute(f"{_JOB} WHERE number = ?", (number,)).fetchone()
        return None if row is None else decode_job(*row)

    def write_mark(self) -> None:
        self.set_fact("clock", json.dumps(asdict(self.clock.mark())))

    def _last_mark(self) -> Mark | None:
        text = self.fact("clock", "")
        return Mark(**json.loads(text)) if text else None

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            raise unreadable(self.path, error) from None

    def close(self) -> None:
        self.connection.close()


class Reader:
    """A second connection that only reads, for what is not in memory: jobs that are over, the audit log, usage."""

    def __init__(self, folder: str) -> None:
        self.connection = _connect(os.path.join(folder, FILE), is_reading=True)

    def job(self, number: int) -> Job | None:
        row = self.connection.execute(f"{_JOB} WHERE number = ?", (number,)).fetchone()
        return None if row is None else decode_job(*row)

    def over(self, limit: int, owner: str = "", before: int = 1 << 62, state: str = "") -> list[Job]:
        """Jobs that are over, the newest first."""
        only = {"owner": owner, "state": state if state in OVER else ""}
        whose = "".join(f"AND {name} = ? " for name, value in only.items() if value)
        values = tuple(value for value in only.values() if value)
        rows = self.connection.execute(
            f"{_JOB} WHERE is_over = 1 AND number < ? {whose} ORDER BY number DESC LIMIT ?", (before, *values, limit)
        )
        return [decode_job(*row) for row in rows]

    def finished(self, limit: int) -> list[Job]:
        """Jobs that finished well, the newest first."""
        rows = self.connection.execute(
            f"{_JOB} WHERE is_over = 1 AND state = ? ORDER BY number DESC LIMIT ?", (FINISHED, limit)
        )
        return [decode_job(*row) for row in rows]

    def counts(self) -> dict[str, int]:
        return dict(self.connection.execute("SELECT state, count(*) FROM jobs GROUP BY state"))

    def usage(self) -> list[dict[str, Any]]:
        rows = self.connection.execute("SELECT person, account, worker_seconds, lately, at FROM usage")
        return [
            {"person": person, "account": account, "worker_seconds": total, "lately": lately, "at": at}
            for person, account, total, lately, at in rows
        ]

    def audit(self, after: int = 0, limit: int = -1) -> Iterator[audit.Entry]:
        return audit.read(self.connection, after, limit)

    def close(self) -> None:
        self.connection.close()


def _connect(path: str, *, is_reading: bool = False) -> sqlite3.Connection:
    """Readable by its owner only. What is committed is on disk before anybody is told (`synchronous=FULL`)."""
    if not is_reading:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30)
    try:
        if is_reading:
            connection.execute("PRAGMA query_only = ON")
        else:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA foreign_keys = ON")
    except sqlite3.DatabaseError as error:
        connection.close()
        raise unreadable(path, error) from None
    return connection


def unreadable(path: str, error: Exception) -> UserError:
    return UserError(
        f"{path} cannot be used.",
        why=str(error),
        hint="if it is damaged, put a copy of it back; what is left can be read with `sqlite3 ... .recover`",
    )
