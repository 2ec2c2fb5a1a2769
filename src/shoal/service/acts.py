"""What people can have done: each act is a change of the store that is made once, however often it is asked for."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

import msgspec

from shoal.observe.clean import clean
from shoal.service import people, transitions
from shoal.service.asking import Submission
from shoal.service.job import CANCELLED, FAILED, Job
from shoal.service.people import Person
from shoal.service.writer import Change
from shoal.spec.errors import ShoalError, UserError

Act = Callable[[Change], dict[str, Any]]
KEY_DAYS = 7.0
DAY_SECONDS = 86400.0


class Conflict(ShoalError):
    """The same key came with something else before."""


def once(change: Change, person: str, key: str, digest: bytes, act: Act) -> bytes:
    """Do it, or give the answer that was given when it was done: key, change and answer are one commit."""
    row = change.connection.execute(
        "SELECT digest, answer FROM keys WHERE person = ? AND key = ?", (person, key)
    ).fetchone()
    if row is not None:
        if bytes(row[0]) != digest:
            raise Conflict(
                "This key was used for another request.", hint="make a new key for each thing that is to be done"
            )
        return bytes(row[1])
    answer = msgspec.json.encode(act(change))
    change.connection.execute(
        "INSERT INTO keys (person, key, digest, answer, at) VALUES (?, ?, ?, ?, ?)",
        (person, key, digest, answer, change.now),
    )
    return answer


def forget_keys(change: Change) -> None:
    """Keys of a week ago: nobody asks again after so long."""
    change.connection.execute("DELETE FROM keys WHERE at < ?", (change.now - KEY_DAYS * DAY_SECONDS,))


def digest_of(method: str, path: str, body: bytes) -> bytes:
    return sha256(f"{method} {path}\n".encode() + body).digest()


def submit(change: Change, person: Person, submission: Submission) -> dict[str, Any]:
    """Take jobs into the queue, all or none."""
    people.check_may_ask(person, people.USER)
    if person.max_jobs is not None or person.max_workers is not None:
        jobs = change.live_jobs() if person.max_jobs is not None else {}
        largest = max(asked.min_workers for asked in submission.jobs)
        people.check_quota(person, jobs, len(submission.jobs), largest)
    first = change.next_number()
    numbers = range(first, first + len(submission.jobs))
    for number in {number for asked in submission.jobs for number in asked.after}:
        _check_after(change, number)
    for place, (asked, links) in enumerate(zip(submission.jobs, submission.links, strict=True)):
        array = numbers[place - asked.index] if asked.index is not None else None
        after = (*asked.after, *(numbers[other] for other in links))
        whole = replace(asked, after=after, array=array, account=asked.account or person.account)
        change.add(
            lambda number, whole=whole: transitions.submit(  # type: ignore[misc]
                number, person.name, whole, change.now, change.wall, is_held=submission.is_held
            )
        )
    told = str(first) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
    change.note(person.name, "submit", told, names=sorted({clean(asked.name) for asked in submission.jobs})[:20])
    return {"jobs": list(numbers), "runs": [f"job-{number}" for number in numbers[:1000]]}


def _check_after(change: Change, number: int) -> None:
    first = change.job(number)
    if first.state in (FAILED, CANCELLED):
        raise UserError(
            f"Job {number} is {first.state}, so what is to run after it could never start.",
            hint=f"`shoal requeue {number}` first, or leave `--after {number}` out",
        )


def change_jobs(
    change: Change, person: Person, verb: str, numbers: Sequence[int], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Cancel, hold, release, requeue or resize jobs, all or none."""
    told = []
    for number in numbers:
        job = change.job(number)
        people.check_may_change(person, job)
        after = _VERBS[verb](change, person, job, facts)
        if after is not job:
            change.put(after)
        told.append({"job": number, "state": after.state, "before": job.state, "is_held": after.is_held})
    change.note(person.name, verb, ",".join(map(str, numbers))[:400], **facts)
    return {"jobs": told}


_VERBS: dict[str, Callable[[Change, Person, Job, Mapping[str, Any]], Job]] = {
    "cancel": lambda change, person, job, _: transitions.cancel(
        job, f"cancelled by {person.name}", change.now, change.wall
    ),
    "hold": lambda change, person, job, _: transitions.hold(job),
    "release": lambda change, person, job, _: transitions.release(job),
    "requeue": lambda change, person, job, _: transitions.requeue(job, change.now),
    "resize": lambda change, person, job, facts: transitions.resize(job, facts["least"], facts["most"]),
}
JOB_VERBS = tuple(_VERBS)


def drain(change: Change, person: Person, node: str, *, is_draining: bool, why: str) -> dict[str, Any]:
    """Start nothing new on a node, or use it again. What runs there goes on."""
    people.check_may_ask(person, people.ADMIN)
    change.connection.execute("DELETE FROM drained WHERE node = ?", (node,))
    if is_draining:
        change.connection.execute("INSERT INTO drained (node, why) VALUES (?, ?)", (node, why))
    change.touches_people = True
    change.note(person.name, "drain" if is_draining else "undrain", node, why=why)
    return {"node": node, "is_draining": is_draining}


def add_person(change: Change, by: Person, person: Person) -> dict[str, Any]:
    """Let somebody in, or change what they may do."""
    people.check_may_ask(by, people.ADMIN)
    if by.name == person.name and person.role != people.ADMIN:
        raise UserError("You would not be an admin any more.", hint="have another admin do this")
    change.connection.execute(
        "INSERT OR REPLACE INTO people (name, role, account, max_jobs, max_workers) VALUES (?, ?, ?, ?, ?)",
        (person.name, person.role, person.account, person.max_jobs, person.max_workers),
    )
    change.touches_people = True
    facts = {"role": person.role, "account": person.account}
    change.note(by.name, "person", person.name, **facts, max_jobs=person.max_jobs, max_workers=person.max_workers)
    return {"person": person.name, "role": person.role}


def remove_person(change: Change, by: Person, name: str) -> dict[str, Any]:
    """Nobody comes in with their tokens any more. Their jobs stay."""
    people.check_may_ask(by, people.ADMIN)
    if by.name == name:
        raise UserError("You would lock yourself out.", hint="have another admin do this")
    if not change.connection.execute("DELETE FROM people WHERE name = ?", (name,)).rowcount:
        raise UserError(f"There is nobody called {name!r}.", hint="`shoal people` lists them")
    change.connection.execute("UPDATE tokens SET is_revoked = 1 WHERE person = ?", (name,))
    change.touches_people = True
    change.note(by.name, "remove person", name)
    return {"person": name}


def give_token(change: Change, by: Person, name: str, digest: bytes, days: float | None) -> dict[str, Any]:
    """A new token for somebody. Everybody may make their own.

    Whoever asks has made the secret and keeps it: only its digest comes here, so that no answer ever holds one.
    """
    if by.name != name:
        people.check_may_ask(by, people.ADMIN)
    if not change.connection.execute("SELECT 1 FROM people WHERE name = ?", (name,)).fetchone():
        raise UserError(f"There is nobody called {name!r}.", hint=f"`shoal people add {name}` lets them in")
    taken = "SELECT 1 FROM tokens WHERE digest = ? OR id = ?"
    if change.connection.execute(taken, (digest, digest.hex()[:8])).fetchone():
        raise UserError("There is such a token already.", hint="make another one")
    ends, id = None if days is None else change.now + days * DAY_SECONDS, digest.hex()[:8]
    change.connection.execute(
        "INSERT INTO tokens (id, digest, person, made_wall, ends_at) VALUES (?, ?, ?, ?, ?)",
        (id, digest, name, change.wall, ends),
    )
    change.touches_people = True
    change.note(by.name, "token", name, id=id, days=days)
    return {"person": name, "id": id, "days": days}


def revoke_token(change: Change, by: Person, id: str) -> dict[str, Any]:
    row = change.connection.execute("SELECT person FROM tokens WHERE id = ?", (id,)).fetchone()
    if row is None:
        raise UserError(f"There is no token {id[:20]!r}.", hint="`shoal people` lists them")
    if by.name != row[0]:
        people.check_may_ask(by, people.ADMIN)
    change.connection.execute("UPDATE tokens SET is_revoked = 1 WHERE id = ?", (id,))
    change.touches_people = True
    change.note(by.name, "revoke", row[0], id=id)
    return {"person": row[0], "id": id}
