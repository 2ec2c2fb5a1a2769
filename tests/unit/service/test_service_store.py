"""What is kept: changes of one commit, each once, in a log that shows every change to it; and a clock of its own."""

import os
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.service import acts, audit, schema
from shoal.service.asking import read_submission
from shoal.service.clock import Clock, Mark, go_on
from shoal.service.people import ADMIN, USER, VIEWER, Forbidden, Person, digest_token, find_person
from shoal.service.store import Reader, Store
from shoal.service.writer import Writer
from shoal.spec.errors import ShoalError, UserError

ROOT, ANN, BOB = Person(name="root", role=ADMIN), Person(name="ann"), Person(name="bob")


class Ticks:
    """A machine's clocks in the hand of the test."""

    def __init__(self) -> None:
        self.boot, self.since_boot, self.wall = "one", 100.0, 1_700_000_000.0

    def clock(self) -> Clock:
        return Clock(boot=self.boot, tick=lambda: self.since_boot, wall=lambda: self.wall)


@pytest.fixture
def ticks() -> Ticks:
    return Ticks()


@pytest.fixture
def writer(tmp_path: Path, ticks: Ticks) -> Iterator[Writer]:
    store = Store(str(tmp_path), ticks.clock())
    writer = Writer(store)
    yield writer
    writer.close()
    store.close()


def submission(**fields: object):
    return read_submission({"jobs": [{"args": ["train.py"], "dir": "/", **fields}]})


def submit(writer: Writer, key: str, person: Person = ANN, **fields: object) -> bytes:
    digest = acts.digest_of("POST", "/api/jobs", repr(sorted(fields.items())).encode())
    asked = submission(**fields)
    return writer.do(
        lambda change: acts.once(change, person.name, key, digest, lambda change: acts.submit(change, person, asked))
    ).result()


def known(writer: Writer):
    return writer._store.known


def test_the_same_request_is_done_once_and_answered_alike(writer):
    first = submit(writer, "k1")
    assert submit(writer, "k1") == first
    assert len(known(writer).jobs) == 1
    assert submit(writer, "k1", BOB) != first, "keys of others are others"
    with pytest.raises(acts.Conflict):
        submit(writer, "k1", name="another")
    assert len(known(writer).jobs) == 2


def test_keys_are_forgotten_after_a_week_and_not_before(writer, ticks):
    first = submit(writer, "k1")
    ticks.since_boot += 6 * 86400
    writer.do(acts.forget_keys).result()
    assert submit(writer, "k1") == first
    ticks.since_boot += 2 * 86400
    writer.do(acts.forget_keys).result()
    assert submit(writer, "k1") != first


def test_a_change_that_fails_is_undone_alone_and_takes_no_number(writer):
    def half(change):
        acts.submit(change, ANN, submission())
        raise UserError("no")

    done = [writer.do(half), writer.do(lambda change: acts.submit(change, ANN, submission()))]
    with pytest.raises(UserError, match="no"):
        done[0].result()
    assert done[1].result()["jobs"] == [1]
    assert list(known(writer).jobs) == [1]


def test_who_stops_waiting_does_not_keep_others_from_their_answers(writer):
    futures = [writer.do(lambda change: acts.submit(change, ANN, submission())) for _ in range(50)]
    for future in futures[::2]:
        future.cancel()
    assert [future.result() for future in futures[1::2]]
    assert submit(writer, "after")


def test_many_changes_share_one_commit(writer):
    futures = [writer.do(lambda change: acts.submit(change, ANN, submission())) for _ in range(200)]
    assert sorted(number for future in futures for number in future.result()["jobs"]) == list(range(1, 201))
    assert writer.num_commits < 100


def test_a_disk_that_refuses_takes_all_back(writer, tmp_path):
    submit(writer, "k1")
    connection = writer._store.connection
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(ShoalError, match="cannot write"):
        submit(writer, "k2", args=["train.py", "x" * 100_000])
    assert list(known(writer).jobs) == [1]
    connection.execute("PRAGMA max_page_count = 100000")
    assert b"[2]" in submit(writer, "k2", args=["train.py", "x" * 100_000])


def test_what_was_written_is_there_after_another_start(writer, tmp_path):
    submit(writer, "k1", array=3)
    again = Store(str(tmp_path))
    assert again.known.jobs == known(writer).jobs
    assert again.next_number == 4
    assert stat.S_IMODE(os.stat(tmp_path / "service.db").st_mode) == 0o600
    assert again.connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert again.connection.execute("PRAGMA synchronous").fetchone() == (2,)
    again.close()


def test_a_file_that_is_no_database_is_named(tmp_path):
    (tmp_path / "service.db").write_bytes(b"nothing of the kind" * 100)
    with pytest.raises(UserError, match="cannot be used"):
        Store(str(tmp_path))


# --- versions


def test_upgrades_keep_what_there_is_and_a_newer_one_is_left_alone(tmp_path):
    connection = sqlite3.connect(tmp_path / "x.db", isolation_level=None)
    assert schema.upgrade(connection) == 0
    connection.execute("INSERT INTO facts VALUES ('a', 'b')")
    more = (*schema.VERSIONS, "ALTER TABLE people ADD COLUMN mail TEXT; CREATE TABLE extra (x INTEGER) STRICT")
    with pytest.raises(sqlite3.Error):
        schema.upgrade(connection, (*more, "CREATE TABLE y (z INTEGER) STRICT; CREATE TABLE extra (x INTEGER)"))
    assert connection.execute("SELECT count(*) FROM sqlite_master WHERE name = 'y'").fetchone() == (0,)
    assert schema.upgrade(connection, more) == 2, "the step that was whole stays"
    assert connection.execute("SELECT value FROM facts").fetchall() == [("b",)]
    with pytest.raises(UserError, match="newer shoal"):
        schema.upgrade(connection)
    connection.close()


# --- the clock


def mark(at: float, boot: str, since_boot: float, wall: float) -> Mark:
    return Mark(at=at, boot=boot, since_boot=since_boot, wall=wall)


@pytest.mark.parametrize("jump", [-3600.0, 0.0, 3600.0])
def test_the_date_may_jump_and_the_clock_goes_on(jump):
    last = mark(500.0, "one", 800.0, 10_000.0)
    assert go_on(last, mark(0.0, "one", 810.0, 10_010.0 + jump)) + 810.0 == 510.0


def test_after_another_boot_the_date_tells_and_never_backwards():
    last = mark(500.0, "one", 800.0, 10_000.0)
    assert go_on(last, mark(0.0, "two", 5.0, 10_060.0)) + 5.0 == 560.0
    assert go_on(last, mark(0.0, "two", 5.0, 9_000.0)) + 5.0 == 500.0


@pytest.mark.parametrize("jump", [-3600.0, 3600.0])
def test_a_jump_of_the_date_changes_no_token_no_key_and_no_time(writer, ticks, tmp_path, jump):
    first = submit(writer, "k1")
    writer.do(lambda change: acts.add_person(change, ROOT, ANN)).result()
    writer.do(lambda change: acts.give_token(change, ROOT, "ann", digest_token("secret"), 0.02)).result()
    ticks.wall += jump
    ticks.since_boot += 60.0
    again = Store(str(tmp_path), ticks.clock())
    found = again.known
    assert find_person("secret", found.tokens, found.people, again.clock.now())[0] == ANN
    assert again.clock.now() == writer._store.clock.now()
    assert submit(writer, "k1") == first
    ticks.since_boot += 0.02 * 86400
    assert find_person("secret", found.tokens, found.people, again.clock.now()) == (None, "the token has expired")
    again.close()


# --- people


def test_people_come_in_by_the_digest_of_their_token_until_it_is_revoked(writer):
    writer.do(lambda change: acts.add_person(change, ROOT, ANN)).result()
    told = writer.do(lambda change: acts.give_token(change, ROOT, "ann", digest_token("secret"), 1.0)).result()
    store = writer._store

    def who(secret: str):
        return find_person(secret, store.known.tokens, store.known.people, store.clock.now())

    assert who("secret") == (ANN, "")
    assert who("other") == (None, "there is no such token")
    assert who("") == (None, "no token was given")
    rows = store.connection.execute("SELECT * FROM tokens").fetchall()
    assert "secret" not in repr(rows)
    with pytest.raises(Forbidden):
        writer.do(lambda change: acts.revoke_token(change, BOB, told["id"])).result()
    with pytest.raises(UserError, match="already"):
        writer.do(lambda change: acts.give_token(change, ROOT, "ann", digest_token("secret"), 1.0)).result()
    writer.do(lambda change: acts.revoke_token(change, ANN, told["id"])).result()
    assert who("secret") == (None, "the token was revoked")


def test_roles_owners_and_quotas_hold(writer):
    submit(writer, "k1")
    with pytest.raises(Forbidden, match="belongs to ann"):
        writer.do(lambda change: acts.change_jobs(change, BOB, "cancel", [1], {})).result()
    with pytest.raises(Forbidden, match="may not"):
        submit(writer, "k2", Person(name="eve", role=VIEWER))
    for act in (
        lambda change: acts.drain(change, ANN, "node", is_draining=True, why=""),
        lambda change: acts.add_person(change, ANN, Person(name="ann", role=ADMIN)),
        lambda change: acts.remove_person(change, ANN, "bob"),
        lambda change: acts.give_token(change, ANN, "root", b"x" * 32, 1.0),
    ):
        with pytest.raises(Forbidden):
            writer.do(act).result()
    with pytest.raises(UserError, match="lock yourself out"):
        writer.do(lambda change: acts.remove_person(change, ROOT, "root")).result()
    few = Person(name="ann", role=USER, max_jobs=2, max_workers=2)
    submit(writer, "k3", few)
    with pytest.raises(UserError, match="may have 2 jobs"):
        submit(writer, "k4", few)
    with pytest.raises(UserError, match="may use 2 workers"):
        submit(writer, "k5", few, workers=3)
    assert writer.do(lambda change: acts.change_jobs(change, ROOT, "cancel", [1], {})).result()["jobs"][0][
        "state"
    ] == ("cancelled")


# --- the audit log


def test_the_log_only_grows_and_shows_every_change_to_it(writer, tmp_path):
    for number in range(5):
        submit(writer, f"k{number}")
    reader = Reader(str(tmp_path))
    entries = list(reader.audit())
    verdict = audit.verify(iter(entries))
    assert verdict.is_sound
    assert verdict.num_entries == 5
    assert not audit.verify(iter(entries[:4]), verdict.digest).is_sound, "lines cut off at the end"
    assert audit.verify(iter(entries[1:])).first_bad == 1
    reader.close()
    connection = writer._store.connection
    for statement in ("UPDATE audit SET who = 'x'", "DELETE FROM audit"):
        with pytest.raises(sqlite3.IntegrityError, match="only grows"):
            connection.execute(statement)
    connection.execute("DROP TRIGGER audit_stays")
    connection.execute("UPDATE audit SET who = 'x' WHERE number = 3")
    assert audit.verify(audit.read(connection)).first_bad == 3
