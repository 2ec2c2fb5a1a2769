"""`shoal dash`: serve the page until Ctrl-C."""

import contextlib
import importlib
import json
import os
import socket
import sys
import threading
from collections.abc import Mapping
from importlib.util import find_spec
from types import FrameType

from shoal.dash.built import PageFile, is_built, read_page
from shoal.engine.env import has_display, shoal_home
from shoal.spec.errors import UserError
from shoal.verb_parser import Parser
from shoal.web.door import Door

PORT = 4646


def main(argv: list[str]) -> int:
    """What `shoal dash` does; returns the exit code."""
    parser = Parser("dash", "Show runs on a page in the browser.", "[--port N] [--host ADDRESS] [--no-open] [--json]")
    parser.add_argument("--port", metavar="N", help=f"port to serve it on; 0 takes a free one (default: {PORT})")
    parser.add_argument("--host", metavar="ADDRESS", default="127.0.0.1", help="address to listen at (127.0.0.1)")
    parser.add_argument("--no-open", action="store_true", help="do not open a browser")
    parser.add_argument("--json", action="store_true", help="print each login link as a line of JSON")
    options = parser.parse_args(argv)
    port = None if options.port is None else _parse_port(options.port)
    _check_parts()
    page = read_page()
    with _listen(options.host, port) as listener:
        door = Door(host=options.host, port=listener.getsockname()[1])
        return _serve(listener, door, page, as_json=options.json, is_opened=not options.no_open)


def _parse_port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) < 65536):
        raise UserError(
            f"--port {text!r} is not a port.", hint="give it a number from 0 to 65535; 0 takes a free one"
        )
    return int(text)


def _check_parts() -> None:
    """Raise one error for all that is missing, with one command for all of it."""
    missing = []
    if not is_built():
        missing.append(
            ("it has not been built: this is a source checkout, or was installed from one without npm", "make page")
        )
    if not all(map(find_spec, ("starlette", "uvicorn"))):
        missing.append(("Starlette and uvicorn are not installed", "pip install 'shoal[service]'"))
    if missing:
        needs_npm = ", which needs npm" if missing[0][1] == "make page" else ""
        raise UserError(
            "The page of `shoal dash` cannot be shown.",
            why="; and ".join(why for why, _ in missing),
            hint=f"run `{' && '.join(command for _, command in missing)}`{needs_npm}",
        )


def _listen(host: str, port: int | None) -> socket.socket:
    """A socket at this port; where none was asked for and the usual one is taken, at a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for number in (PORT, 0) if port is None else (port,):
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, number))
            listener.listen(128)
            return listener
        except OSError as error:
            listener.close()
            trouble = error
    raise UserError(
        f"Cannot listen at {host}:{port or PORT}.",
        why=trouble.strerror or str(trouble),
        hint="choose another port with `--port`, or `--port 0` for a free one",
    )


def _serve(
    listener: socket.socket, door: Door, page: Mapping[str, PageFile], *, as_json: bool, is_opened: bool
) -> int:
    # Curves need it, and it takes a fifth of a second: it is there when the first of them is asked for.
    threading.Thread(target=importlib.import_module, args=("numpy",), name="shoal-dash-numpy", daemon=True).start()
    import uvicorn

    from shoal.dash.app import Dash

    class Server(uvicorn.Server):
        """Ends streams of news when it is told to end: they would hold it up."""

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            dash.is_over = True
            super().handle_exit(sig, frame)

    def tell_link(*, is_first: bool = False) -> None:
        link = f"{address}/login#{dash.sessions.link_token}"
        if as_json:
            text = json.dumps({"address": address, "login": link, "pid": os.getpid()})
        elif is_first:
            text = f"shoal dash is at {address}. Log in with this link, good for once:\n\n  {link}\n\nCtrl-C ends it."
        else:
            text = f"Somebody logged in. For another browser:\n\n  {link}\n"
        print(text, flush=True)

    named = "127.0.0.1" if door.host in ("0.0.0.0", "localhost") else door.host
    address = f"http://[{named}]:{door.port}" if ":" in named else f"http://{named}:{door.port}"
    dash = Dash(shoal_home(), door, page, tell_link)
    config = uvicorn.Config(
        dash.app(),
        log_level="error",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        h11_max_incomplete_event_size=32 << 10,
        timeout_graceful_shutdown=2,
    )
    server = Server(config)
    # Ten thousand runs take a second or two to read: by the time the page asks, many are there.
    threading.Thread(target=dash.index.refresh, name="shoal-dash-index", daemon=True).start()
    tell_link(is_first=True)
    if not door.is_loopback:
        print(
            f"warning: {door.host} can be reached from other machines, and nothing is encrypted. "
            "Through ssh it is: `ssh -L 4646:127.0.0.1:4646 MACHINE`, with `shoal dash` there.",
            file=sys.stderr,
        )
    if is_opened and has_display() and sys.stdout.isatty():
        import webbrowser

        webbrowser.open(f"{address}/login#{dash.sessions.link_token}")
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listener])
    return 0
