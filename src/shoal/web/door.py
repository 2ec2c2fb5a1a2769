"""Which hosts and origins are answered, and what every answer carries. Pure."""

import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass

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
    """Where we serve, as a browser that means us says in its headers. `right_way` is for those who came otherwise."""

    host: str
    port: int
    scheme: str = "http"
    right_way: str = "open the link that `shoal dash` printed"

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
                hint=self.right_way,
            )
        origin = headers.get("origin")
        is_same = origin == f"{self.scheme}://{host}"
        from_where = headers.get("sec-fetch-site", "same-origin")
        is_foreign = from_where not in ("same-origin", "none") and headers.get("sec-fetch-mode") != "navigate"
        if (origin is not None and not is_same) or (method not in _SAFE and origin is None) or is_foreign:
            return Refusal(status=403, message="This request comes from another page.", hint="use the page itself")
        return None

    def _is_ours(self, host: str) -> bool:
        name, _, port = host.rpartition(":")
        if not name or port != str(self.port):
            return self.port == {"http": 80, "https": 443}[self.scheme] and self._is_name(host)
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
