"""People, their tokens and what they may do. Tokens are kept as digests, so that whoever reads the store has none."""

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256

from shoal.service.job import Job
from shoal.spec.errors import ShoalError, UserError
from shoal.verb_parser import unknown

VIEWER, USER, ADMIN = "viewer", "user", "admin"
ROLES = (VIEWER, USER, ADMIN)
TOKEN_PREFIX = "shoal_"
TOKEN_DAYS = 90
MAX_TOKEN_DAYS = 3650
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Forbidden(ShoalError):
    """Known, but not allowed to do this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    """Who may ask. A viewer looks, a user has jobs, an admin has everybody's. None: no limit.

    `account` is whose share their jobs count to, such as `lab` or `lab/alice`.
    """

    name: str
    role: str = USER
    account: str = ""
    max_jobs: int | None = None
    max_workers: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A way in for one person, until the service's clock says `ends_at`."""

    id: str
    person: str
    made_wall: float
    ends_at: float | None = None
    is_revoked: bool = False


def new_token() -> str:
    """A secret of 256 bits. What it is known by is the beginning of its digest."""
    return TOKEN_PREFIX + secrets.token_urlsafe(32)


def digest_token(secret: str) -> bytes:
    return sha256(secret.encode("utf-8", "replace")).digest()


def find_person(
    secret: str, tokens: Mapping[bytes, Token], people: Mapping[str, Person], now: float
) -> tuple[Person | None, str]:
    """Whose token this is, or why it is nobody's. Found by its digest, so that time says nothing of the secret."""
    token = tokens.get(digest_token(secret)) if secret else None
    if token is None:
        return None, "there is no such token" if secret else "no token was given"
    if token.is_revoked:
        return None, "the token was revoked"
    if token.ends_at is not None and now >= token.ends_at:
        return None, "the token has expired"
    person = people.get(token.person)
    return (person, "") if person else (None, "its owner is not known any more")


def check_name(name: object) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        shown = str(name)[:60]
        raise UserError(
            f"{shown!r} cannot be the name of a person.",
            hint="use up to 64 letters, digits, dots and dashes, and begin with a letter or digit",
        )
    return name


def check_role(role: object) -> str:
    if role not in ROLES:
        raise unknown(str(role)[:60], "role", ROLES, f"use one of: {', '.join(ROLES)}")
    return str(role)


def check_may_ask(person: Person, least: str) -> None:
    """Raises Forbidden where their role does not reach."""
    if ROLES.index(person.role) < ROLES.index(least):
        raise Forbidden(f"{person.name} may not do this.", why=f"it takes the role {least}; yours is {person.role}")


def check_may_change(person: Person, job: Job) -> None:
    """A job belongs to its owner; admins may help."""
    check_may_ask(person, USER)
    if job.owner != person.name and person.role != ADMIN:
        raise Forbidden(f"Job {job.number} belongs to {job.owner}.", hint=f"ask {job.owner}, or an admin")


def check_quota(person: Person, jobs: Mapping[int, Job], num_more: int, min_workers: int) -> None:
    """Raises UserError where so many more jobs would be too many. What counts is what is not over."""
    if person.max_workers is not None and min_workers > person.max_workers:
        raise UserError(
            f"{person.name} may use {person.max_workers} workers at once.", why=f"the job needs {min_workers}"
        )
    if person.max_jobs is None:
        return
    has = sum(job.owner == person.name for job in jobs.values())
    if has + num_more > person.max_jobs:
        raise UserError(
            f"{person.name} may have {person.max_jobs} jobs in the queue, and has {has}.",
            hint="wait until some are over, or ask an admin for more",
        )
