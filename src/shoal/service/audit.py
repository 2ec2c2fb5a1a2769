"""Who did what and when: each line holds a digest of itself and of all before it, so that no change goes unseen."""

import json
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

START = "0" * 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line of the log. `wall` is a date for people; the order is that of `number`."""

    number: int
    wall: float
    who: str
    action: str
    subject: str
    details: str
    digest: str


def digest_of(before: str, number: int, wall: float, who: str, action: str, subject: str, details: str) -> str:
    line = json.dumps([before, number, wall, who, action, subject, details], separators=(",", ":"))
    return sha256(line.encode()).hexdigest()


def append(
    connection: sqlite3.Connection, wall: float, who: str, action: str, subject: str, details: Mapping[str, Any]
) -> None:
    """Add a line, in the transaction of what it tells of."""
    last = connection.execute("SELECT number, digest FROM audit ORDER BY number DESC LIMIT 1").fetchone()
    before, number = (last[1], last[0] + 1) if last else (START, 1)
    text = json.dumps(details, separators=(",", ":"), sort_keys=True)
    digest = digest_of(before, number, wall, who, action, subject, text)
    connection.execute(
        "INSERT INTO audit (number, wall, who, action, subject, details, digest) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (number, wall, who, action, subject, text, digest),
    )


def read(connection: sqlite3.Connection, after: int = 0, limit: int = -1) -> Iterator[Entry]:
    columns = "number, wall, who, action, subject, details, digest"
    rows = connection.execute(f"SELECT {columns} FROM audit WHERE number > ? ORDER BY number LIMIT ?", (after, limit))
    for number, wall, who, action, subject, details, digest in rows:
        yield Entry(number=number, wall=wall, who=who, action=action, subject=subject, details=details, digest=digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a check of the log found. `first_bad` is the first line that does not fit those before it, 0 if all do.

    The digest of the last line stands for all of them: whoever noted one can ask later whether it is still there
    (`has_expected`), which also shows lines that were cut off at the end.
    """

    num_entries: int
    first_bad: int
    digest: str
    has_expected: bool

    @property
    def is_sound(self) -> bool:
        return not self.first_bad and self.has_expected


def verify(entries: Iterator[Entry], expected: str = "") -> Verdict:
    """Go through the whole chain. Pure."""
    before, number, first_bad = START, 0, 0
    has_expected = not expected or expected == START
    for entry in entries:
        number += 1
        told = digest_of(before, number, entry.wall, entry.who, entry.action, entry.subject, entry.details)
        if entry.number != number or entry.digest != told:
            first_bad = number
            break
        before = told
        has_expected = has_expected or told == expected
    return Verdict(num_entries=number, first_bad=first_bad, digest=before, has_expected=has_expected)
