"""Who may come in: the login link, and the cookie it is traded for."""

import hmac
import secrets
from hashlib import sha256

MAX_SESSIONS = 32


class Sessions:
    """One login link at a time, good for one login; and the cookies that were given out for them.

    Secrets have 256 bits and are compared as digests, in a time that says nothing about them. When the link is used,
    there is a new one. With too many sessions the oldest ends.
    """

    def __init__(self) -> None:
        self.link_token = secrets.token_urlsafe(32)
        self._known: list[bytes] = []

    def log_in(self, token: str) -> str | None:
        """A cookie for the right token, once."""
        if not hmac.compare_digest(_digest(token), _digest(self.link_token)):
            return None
        self.link_token, cookie = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        self._known = [*self._known, _digest(cookie)][-MAX_SESSIONS:]
        return cookie

    def is_known(self, cookie: str) -> bool:
        given = _digest(cookie)
        return sum(hmac.compare_digest(given, known) for known in self._known) > 0

    def log_out(self, cookie: str) -> None:
        given = _digest(cookie)
        self._known = [known for known in self._known if not hmac.compare_digest(given, known)]


def _digest(secret: str) -> bytes:
    return sha256(secret.encode("utf-8", "replace")).digest()
