"""Join codes: what a person reads on one screen and types on another.

A code has 20 letters and digits: 4 for the certificate of the head, 15 that nobody can guess (75 bits), and one that
tells slips of the finger. The secret never travels. Both sides show that they know it, each in a way that holds only
for the certificate it sees: somebody in between, who has another certificate, can take no part.
"""

import hmac
import re
import secrets
from dataclasses import dataclass
from hashlib import sha256

from shoal.spec.errors import UserError

# Without I, L, O and U: those that look like 1 and 0, and one less word to be embarrassed about.
_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_NUM_FINGERPRINT, _NUM_SECRET = 4, 15
_LENGTH = _NUM_FINGERPRINT + _NUM_SECRET + 1
_GROUP = 5


@dataclass(frozen=True, slots=True)
class Code:
    """An invitation as it is typed."""

    fingerprint: str
    secret: str

    def __str__(self) -> str:
        letters = self.fingerprint + self.secret
        letters += _check_letter(letters)
        return "-".join(letters[at : at + _GROUP] for at in range(0, _LENGTH, _GROUP))


def make_code(certificate: bytes) -> Code:
    """A new code for a head with this certificate (DER)."""
    return Code(fingerprint_of(certificate), "".join(secrets.choice(_ALPHABET) for _ in range(_NUM_SECRET)))


def parse_code(text: str) -> Code:
    """A code as somebody typed it: small letters, spaces and O for 0 are fine."""
    letters = re.sub(r"[\s-]", "", text).upper().translate(str.maketrans("OIL", "011"))
    if len(letters) != _LENGTH or set(letters) - set(_ALPHABET):
        raise UserError(
            f"{text[:60]!r} is not a join code.",
            why=f"a code has {_LENGTH} letters and digits, in groups of {_GROUP}",
            hint="copy what `shoal up --cluster` printed on the first machine",
        )
    if _check_letter(letters[:-1]) != letters[-1]:
        raise UserError(
            "There is a mistake in the code.",
            why="its last letter does not fit the others",
            hint="compare it with what `shoal up --cluster` printed on the first machine",
        )
    return Code(letters[:_NUM_FINGERPRINT], letters[_NUM_FINGERPRINT:-1])


def fingerprint_of(certificate: bytes) -> str:
    """The letters of a code that belong to a certificate (DER)."""
    return _letters(sha256(certificate).digest(), _NUM_FINGERPRINT)


def prove(secret: str, *parts: bytes) -> str:
    """What only those can say who know the secret, about these bytes."""
    digest = hmac.new(secret.encode(), digestmod=sha256)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


def is_proof(proof: object, secret: str, *parts: bytes) -> bool:
    """Whether somebody who knows the secret said so; takes the same time whatever the answer."""
    said = proof if isinstance(proof, str) and proof.isascii() else ""
    return hmac.compare_digest(said, prove(secret, *parts))


def _check_letter(letters: str) -> str:
    return _letters(sha256(letters.encode()).digest(), 1)


def _letters(digest: bytes, count: int) -> str:
    number = int.from_bytes(digest, "big") >> (8 * len(digest) - 5 * count)
    return "".join(_ALPHABET[(number >> 5 * place) & 31] for place in reversed(range(count)))
