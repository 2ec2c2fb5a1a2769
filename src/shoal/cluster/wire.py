"""What is said at the door: lines of JSON inside TLS, each with a proof that its author knows the secret."""

import json
import socket
import ssl
from typing import Any

MAX_LINE_BYTES = 1 << 16
ASKED, ANSWERED = b"asked", b"answered"


class Broken(Exception):
    """The other side has gone, or does not speak as we do."""


class Lines:
    """Whole lines over a connection, of bounded length."""

    def __init__(self, connection: ssl.SSLSocket) -> None:
        self._connection = connection
        self._rest = b""

    def send(self, text: str, proof: str = "") -> None:
        line = json.dumps({"text": text, "proof": proof}).encode() + b"\n"
        try:
            self._connection.sendall(line)
        except OSError as error:
            raise Broken(str(error)) from None

    def receive(self) -> tuple[str, Any] | None:
        """A line's text and its proof, which may be anything; None at the end."""
        try:
            while b"\n" not in self._rest:
                part = self._connection.recv(MAX_LINE_BYTES)
                if not part:
                    return None
                self._rest += part
                if len(self._rest) > MAX_LINE_BYTES:
                    raise Broken("a line is too long")
            line, _, self._rest = self._rest.partition(b"\n")
            said = json.loads(line)
            return str(said["text"]), said["proof"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise Broken(str(error)) from None


def server_context(certificate_path: str, key_path: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(certificate_path, key_path)
    return context


def guest_tls(connection: socket.socket) -> ssl.SSLSocket:
    """TLS to somebody not known yet: who it is, the proofs have to show."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context.wrap_socket(connection)
