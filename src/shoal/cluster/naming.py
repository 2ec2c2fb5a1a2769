"""What people type about machines: names, labels, hosts and ports."""

import re
import socket
from collections.abc import Sequence

from shoal.cluster.ports import DEFAULT_PORT, NUM_PORTS
from shoal.spec.errors import UserError


def host_name() -> str:
    """What this machine is called where nobody says otherwise."""
    return re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname().partition(".")[0]).strip("-")[:63] or "node"


def check_name(name: str | None) -> str | None:
    if name is not None and not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,62}", name, re.ASCII):
        raise UserError(f"{name[:80]!r} cannot be the name of a machine.", hint="use letters, digits and dashes")
    return name


def join_labels(labels: Sequence[str]) -> str:
    """Labels as Ray takes them."""
    for label in labels:
        if not re.fullmatch(r"[A-Za-z0-9][\w./-]{0,62}=[A-Za-z0-9][\w.-]{0,62}", label, re.ASCII):
            raise UserError(
                f"--label {label[:80]!r} is not of the form KEY=VALUE.",
                why="keys and values are letters, digits, dots and dashes",
                hint="for example: `--label room=attic`",
            )
    return ",".join(labels)


def parse_host(text: str) -> tuple[str, int]:
    """HOST or HOST:PORT as a host and the port of its door."""
    host, colon, port = text.strip().partition(":")
    if not host or ":" in port:
        raise UserError(f"{text[:80]!r} is not a host.", hint="for example: `shoal join 192.168.1.10 --code CODE`")
    return host, parse_port(port) if colon else DEFAULT_PORT


def parse_port(text: str) -> int:
    """The first port of a cluster."""
    highest = 65536 - NUM_PORTS
    if not (text.isascii() and text.isdecimal() and 1024 <= int(text) <= highest):
        raise UserError(
            f"{text[:20]!r} is not a port to begin with.",
            why=f"the {NUM_PORTS} ports from there on are used",
            hint=f"give a number from 1024 to {highest}",
        )
    return int(text)
