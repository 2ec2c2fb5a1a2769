"""Who may come in: which hosts and origins are answered, the login link, and the cookie it is traded for. Pure."""

import hmac
import ipaddress
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256

MAX_SESSIONS = 32
_SAFE = frozenset({"GET", "HEAD"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a request is not answered."""

    status: int
    message: str
    why: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """Where the page is served: what a browser that means us says in its headers."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        address = _address(self.host)
        return self.host == "localhost" or (address is not None and address.is_loopback)

    def refuse(self, method: str, headers: Mapping[str, str]) -> Refusal | None:
        """What is wrong with a request before anybody looks at what it wants; None where nothing is.

        A page of somebody else can have a name that leads to this machine (DNS rebinding), so the name must be ours.
        It can send requests here, so whoever says where they come from must come from here, and whoever wants
        something changed must say it.
        """
        host = headers.get("host", "")
        if not self._is_ours(host):
            return Refusal(
                status=421,
                message="This is not the address of this page.",
                why="the browser asked for another host",
                hint="open the link that `shoal dash` printed",
            )
        origin = headers.get("origin")
        is_same = origin == f"http://{host}"
        from_where = headers.get("sec-fetch-site", "same-origin")
        is_foreign = from_where not in ("same-origin", "none") and headers.get("sec-fetch-mode") != "navigate"
        if (origin is not None and not is_same) or (method not in _SAFE and origin is None) or is_foreign:
            return Refusal(status=403, message="This request comes from another page.", hint="use the page itself")
        return None

    def _is_ours(self, host: str) -> bool:
        name, _, port = host.rpartition(":")
        if not name or port != str(self.port):
            return self.port == 80 and self._is_name(host)
        return self._is_name(name)

    def _is_name(self, name: str) -> bool:
        name = name.lower().removeprefix("[").removesuffix("]")
        if name in ("localhost", self.host):
            return True
        if self.is_loopback:
            address = _address(name)
            return address is not None and address.is_loopback
        # Whoever has an address has no name that could lead here from elsewhere.
        return _address(name) is not None or name == socket.gethostname().lower()


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


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


POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)

SHIELDS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
}
"""Headers of every answer."""
