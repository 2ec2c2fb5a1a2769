"""Who may come in: codes that let each machine in once, for ten minutes. A file remembers who used them."""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from shoal.cluster.codes import Code, is_proof, make_code
from shoal.cluster.files import locked, write_private
from shoal.spec.errors import UserError

OPEN_SECONDS = 600.0
# An expired code is known for a while, so that its owner can be told why it is refused.
_KEPT_SECONDS = 86400.0
_FILE, _LOCK = "invitations.json", "invitations.lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """A secret that lets machines in until `expires` (seconds since 1970), and the addresses of those that came."""

    secret: str
    expires: float
    used_by: tuple[str, ...] = ()


def invite(folder: str, certificate: bytes, now: float | None = None) -> Code:
    """Make a code for the head with this certificate (DER); those before stay good until they expire."""
    now = time.time() if now is None else now
    code = make_code(certificate)
    with locked(folder, _LOCK, waits=True):
        kept = [each for each in read_invitations(folder) if each.expires + _KEPT_SECONDS > now]
        _write(folder, [*kept, Invitation(secret=code.secret, expires=now + OPEN_SECONDS)])
    return code


def read_invitations(folder: str) -> list[Invitation]:
    try:
        with open(os.path.join(folder, _FILE), encoding="utf-8") as file:
            return [Invitation(**{**each, "used_by": tuple(each["used_by"])}) for each in json.load(file)]
    except (OSError, ValueError, TypeError, KeyError):
        return []


def find_invitation(invitations: Sequence[Invitation], proof: object, *parts: bytes) -> Invitation | None:
    """The invitation whose secret somebody has shown to know."""
    found = [each for each in invitations if is_proof(proof, each.secret, *parts)]
    return found[0] if found else None


def check_open(invitation: Invitation, machine: str, now: float) -> None:
    """Raise UserError where an invitation does not hold, for this machine, any more."""
    hint = "`shoal up --cluster --invite` on the first machine makes a new one"
    if now >= invitation.expires:
        raise UserError(
            "This code has expired.", why=f"codes are good for {OPEN_SECONDS / 60:.0f} minutes", hint=hint
        )
    if machine in invitation.used_by:
        raise UserError(
            "This code has been used already.", why=f"it lets each machine in once, and {machine} came in", hint=hint
        )


def use(folder: str, secret: str, machine: str, now: float) -> None:
    """Write down that a machine has come in; raises UserError where it may not."""
    with locked(folder, _LOCK, waits=True):
        invitations = read_invitations(folder)
        for place, each in enumerate(invitations):
            if each.secret == secret:
                check_open(each, machine, now)
                invitations[place] = replace(each, used_by=(*each.used_by, machine))
                _write(folder, invitations)
                return
    raise UserError("This code is not good any more.", hint="`shoal up --cluster --invite` makes a new one")


def open_until(folder: str) -> float:
    """When the last of the invitations expires (seconds since 1970)."""
    return max((each.expires for each in read_invitations(folder)), default=0.0)


def came_in(folder: str) -> set[str]:
    """The addresses of all machines that were let in lately; some may have left."""
    return {machine for each in read_invitations(folder) for machine in each.used_by}


def _write(folder: str, invitations: Sequence[Invitation]) -> None:
    write_private(folder, _FILE, json.dumps([asdict(each) for each in invitations], indent=1) + "\n")
