"""The tables of the service, version by version. A newer shoal brings an older database up to date, never back."""

import sqlite3
from collections.abc import Sequence

from shoal.spec.errors import UserError

VERSIONS: Sequence[str] = (
    """
    CREATE TABLE jobs (
        number INTEGER PRIMARY KEY,
        owner TEXT NOT NULL,
        state TEXT NOT NULL,
        is_over INTEGER NOT NULL,
        asked BLOB NOT NULL,
        facts BLOB NOT NULL
    ) STRICT;
    CREATE INDEX jobs_over ON jobs (is_over, number);
    CREATE TABLE keys (
        person TEXT NOT NULL,
        key TEXT NOT NULL,
        digest BLOB NOT NULL,
        answer BLOB NOT NULL,
        at REAL NOT NULL,
        PRIMARY KEY (person, key)
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX keys_at ON keys (at);
    CREATE TABLE people (
        name TEXT PRIMARY KEY,
        role TEXT NOT NULL,
        account TEXT NOT NULL,
        max_jobs INTEGER,
        max_workers INTEGER
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE tokens (
        id TEXT PRIMARY KEY,
        digest BLOB NOT NULL UNIQUE,
        person TEXT NOT NULL,
        made_wall REAL NOT NULL,
        ends_at REAL,
        is_revoked INTEGER NOT NULL DEFAULT 0
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE drained (node TEXT PRIMARY KEY, why TEXT NOT NULL) STRICT, WITHOUT ROWID;
    CREATE TABLE usage (
        person TEXT NOT NULL,
        account TEXT NOT NULL,
        worker_seconds REAL NOT NULL,
        lately REAL NOT NULL,
        at REAL NOT NULL,
        PRIMARY KEY (person, account)
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID;
    CREATE TABLE audit (
        number INTEGER PRIMARY KEY,
        wall REAL NOT NULL,
        who TEXT NOT NULL,
        action TEXT NOT NULL,
        subject TEXT NOT NULL,
        details TEXT NOT NULL,
        digest TEXT NOT NULL
    ) STRICT;
    CREATE TRIGGER audit_stays BEFORE UPDATE ON audit BEGIN SELECT RAISE(ABORT, 'the audit log only grows'); END;
    CREATE TRIGGER audit_keeps BEFORE DELETE ON audit BEGIN SELECT RAISE(ABORT, 'the audit log only grows'); END;
    """,
)
"""What leads from each version to the next. Texts that were released are never changed, new ones are added."""


def upgrade(connection: sqlite3.Connection, versions: Sequence[str] = VERSIONS) -> int:
    """Bring the database to the newest version, each step whole or not at all; returns the version it had."""
    had = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if had > len(versions):
        raise UserError(
            "The service's database was written by a newer shoal.",
            why=f"it has version {had}, and this shoal knows versions up to {len(versions)}",
            hint="upgrade shoal: `pip install -U shoal`",
        )
    for number, text in enumerate(versions[had:], start=had + 1):
        # `executescript` would commit what is open, so the transaction is part of the script.
        try:
            connection.executescript(f"BEGIN IMMEDIATE;{text};PRAGMA user_version = {number};COMMIT;")
        except sqlite3.Error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
    return had
