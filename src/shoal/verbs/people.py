"""Verbs of people: `shoal people`, and `shoal login` for those who were let in."""

import argparse
import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from shoal.spec.errors import ShoalError, UserError
from shoal.verb_parser import Parser, parse_count, unknown
from shoal.verbs.printing import put, say, table, width

if TYPE_CHECKING:
    from shoal.service.client import Client
    from shoal.service.places import Login

_VERBS = ("list", "add", "remove", "token", "revoke")


def people(argv: Sequence[str]) -> int:
    """`shoal people`: who is let in, as what, and with which tokens."""
    parser = Parser(
        "people",
        "Show who may use the service; let people in and out. `token` makes another token, `revoke` ends one, "
        "`remove` ends all of somebody's; their jobs stay.",
        "[list]\n       shoal people add NAME [--role ROLE] [OPTIONS]\n       shoal people token|remove NAME"
        "\n       shoal people revoke TOKEN",
    )
    parser.add_argument("verb", metavar="list|add|token|remove|revoke", nargs="?", default="list")
    parser.add_argument("name", metavar="NAME", nargs="?", help="of a person; to revoke, of a token")
    parser.add_argument("--role", metavar="ROLE", default="user", help="viewer (looks), user (has jobs) or admin")
    parser.add_argument("--account", metavar="NAME", default="", help="whose share their jobs count to")
    parser.add_argument("--max-jobs", metavar="N", help="at most so many in the queue")
    parser.add_argument("--max-workers", metavar="N", help="at most so many at once")
    parser.add_argument("--days", metavar="N", default="90", help="how long a new token is good (default: 90)")
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(argv)
    if options.verb not in _VERBS:
        raise unknown(options.verb, "verb of `shoal people`:", _VERBS, f"use one of: {', '.join(_VERBS)}")
    if (options.name is None) != (options.verb == "list"):
        raise UserError("Who?" if options.name is None else "`shoal people list` lists all.", hint="see `--help`")
    from shoal.service.client import Client

    with Client() as client:
        if options.verb == "list":
            told = client.people()
            put(told, options.json, tell_people(told["people"], width()))
        elif options.verb in ("add", "token"):
            _let_in(client, options)
        else:
            is_token = options.verb == "revoke"
            told = client.revoke_token(options.name) if is_token else client.remove_person(options.name)
            put(told, options.json, f"{options.name} {'is revoked' if is_token else 'is let in no more'}")
    return 0


def _let_in(client: "Client", options: argparse.Namespace) -> None:
    """Make somebody known, if that is asked for, and a token of theirs; it is shown once, and never kept."""
    from shoal.service.places import find_login

    days = parse_count(options.days, "--days")
    if options.verb == "add":
        limits = {"max_jobs": options.max_jobs, "max_workers": options.max_workers}
        counts = {name: int(text) if text and text.isdecimal() else text for name, text in limits.items()}
        client.put_person(options.name, role=options.role, account=options.account, **counts)
    secret = client.give_token(options.name, days)
    login = find_login()
    assert login is not None  # it has just been asked
    command = login_command(login)
    text = [
        f"{options.name} is let in, for {days} days with this token, which is not shown again:",
        "",
        f"  {secret}",
        "",
    ]
    text += ["they say this, and paste it when asked:", "", f"  {command}"]
    if urlsplit(login.address).scheme == "http":
        text += ["", "from this machine only; for others: `shoal down`, then `shoal up --host 0.0.0.0`"]
    put({"person": options.name, "days": days, "token": secret, "login": command}, options.json, "\n".join(text))


def login_command(login: "Login") -> str:
    """What people who were let in are to say. Pure."""
    from shoal.service.transport import fingerprint

    known = f" --fingerprint {fingerprint(login.certificate)}" if login.certificate else ""
    return f"shoal login {login.address}{known}"


def tell_people(rows: Sequence[Mapping[str, Any]], most: int) -> str:
    """People as aligned text. Pure."""
    cells = [
        (
            row["person"],
            row["role"],
            row["account"],
            _of(row["num_jobs"], row["max_jobs"]),
            _of(row["num_workers"], row["max_workers"]),
            ", ".join(_tell_token(token) for token in row["tokens"] if not token["is_revoked"]),
        )
        for row in rows
    ]
    return table(("PERSON", "ROLE", "ACCOUNT", "JOBS", "WORKERS", "TOKENS"), cells, most)


def _of(count: int, limit: int | None) -> str:
    return str(count) if limit is None else f"{count} of {limit}"


def _tell_token(token: Mapping[str, Any]) -> str:
    ends = token["ends_in_seconds"]
    if ends is None:
        return str(token["id"])
    return f"{token['id']} ({f'{ends / 86400:.0f} days' if ends > 0 else 'expired'})"


def login(argv: Sequence[str]) -> int:
    """`shoal login`: remember how to ask the service of another machine, or of somebody else on this one."""
    parser = Parser(
        "login",
        "Use a service that somebody else runs. The token is read from the terminal, or from a pipe.",
        "ADDRESS [--fingerprint DIGEST] [--json]\n       shoal login --out",
    )
    parser.add_argument("address", metavar="ADDRESS", nargs="?", help="such as https://10.0.0.7:4647")
    parser.add_argument(
        "--fingerprint", metavar="DIGEST", default="", help="of its certificate, as an admin told you"
    )
    parser.add_argument("--out", action="store_true", help="forget the service and the token")
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(argv)
    import json
    from dataclasses import asdict

    from shoal.cluster.files import make_folder, write_private
    from shoal.service import places

    folder = places.service_folder()
    if options.out:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, places.LOGIN))
        put({"status": "logged out"}, options.json, "the service and the token are forgotten")
        return 0
    if options.address is None:
        raise UserError("Which service?", hint="`shoal login ADDRESS`, as an admin told you")
    if places.read_up(folder) is not None:
        raise UserError("You run a service yourself, on this machine.", hint="`shoal down` first")
    address = options.address if "://" in options.address else f"https://{options.address}"
    certificate = _certificate_of(address, options.fingerprint)
    token = _read_token()
    from shoal.service.client import Client

    with Client(address, token, certificate=certificate, patience_seconds=5.0) as client:
        me = client.me()
    make_folder(folder)
    found = places.Login(address=address, token=token, certificate=certificate)
    write_private(folder, places.LOGIN, json.dumps(asdict(found)))
    put({"address": address, **me}, options.json, f"you are {me['name']} ({me['role']}) at {address}")
    return 0


def _certificate_of(address: str, expected: str) -> str:
    """The certificate of a service, if it is the one that we were told of; none where there is no TLS."""
    import ssl

    from shoal.service.transport import fingerprint

    parts = urlsplit(address)
    if parts.scheme != "https" or not parts.hostname:
        return ""
    say(f"asking {address}")
    try:
        found = ssl.get_server_certificate((parts.hostname, parts.port or 443), timeout=10.0)
    except (OSError, ValueError) as error:
        raise ShoalError(
            f"{address} does not answer.", why=str(error), hint="see whether the service is up"
        ) from None
    digest = fingerprint(found)
    if not expected:
        raise UserError(
            "The fingerprint of the service is needed.",
            why="without it anybody in between could pretend to be the service",
            hint=f"ask an admin for it. If it is this one, add --fingerprint {digest}",
        )
    if digest != expected.replace(":", "").lower():
        raise UserError(
            f"{address} is not the service that you were told of.",
            why=f"its fingerprint is {digest}",
            hint="ask an admin whether it has a new one; otherwise somebody stands in between",
        )
    return found


def _read_token() -> str:
    if sys.stdin.isatty():
        from getpass import getpass

        token = getpass("token: ")
    else:
        token = sys.stdin.readline(1000)
    if not token.strip():
        raise UserError("No token was given.", hint="paste the one that an admin gave you, or pipe it in")
    return token.strip()
