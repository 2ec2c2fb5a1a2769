"""Who listens at a port: an engine that is told to use a stranger's would wait for it for more than a minute."""

import socket
import ssl
import struct
from collections.abc import Callable
from dataclasses import dataclass

CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 3.0
"""What a stranger gets to answer. Servers that we look for do so in milliseconds."""
_HTTP2_SETTINGS = 4
_SPARK_NO_STREAM = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """What to say to a server, how many bytes of its answer are enough, and whether they are those of its kind."""

    words: bytes
    num_bytes: int
    is_answer: Callable[[bytes], bool]
    name: str


GRPC = Greeting(
    words=b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + struct.pack(">IBI", _HTTP2_SETTINGS, 0, 0),
    num_bytes=9,
    is_answer=lambda head: len(head) >= 9 and head[3] == _HTTP2_SETTINGS,
    name="Ray",
)
"""All of Ray's own ports speak it: HTTP/2 begins with the settings of both sides."""


def _ask_spark() -> bytes:
    stream = b"/files/shoal"
    message = struct.pack(">BI", 6, len(stream)) + stream
    return struct.pack(">Q", 8 + len(message)) + message


SPARK = Greeting(
    words=_ask_spark(),
    num_bytes=9,
    is_answer=lambda head: len(head) >= 9 and head[8] == _SPARK_NO_STREAM and head[:4] == bytes(4),
    name="Spark",
)
"""A master is asked for a file that it does not have. It says so, and writes nothing about it to its log."""


def greet(host: str, port: int, greeting: Greeting, *, may_be_tls: bool) -> str:
    """What is wrong with who listens there; nothing where it answers as it should.

    Raises OSError where nobody listens. With `may_be_tls` a server that speaks TLS is taken at its word.
    """
    with socket.create_connection((host, port), timeout=CONNECT_SECONDS) as line:
        line.settimeout(ANSWER_SECONDS)
        head = b""
        try:
            line.sendall(greeting.words)
            while len(head) < greeting.num_bytes and (more := line.recv(4096)):
                head += more
        except TimeoutError:  # who waits for TLS does not stay silent after such a beginning
            if not head:
                return f"who listens there did not answer within {ANSWER_SECONDS:.0f} s, as {greeting.name} does"
        except OSError:
            head = b""
    if greeting.is_answer(head) or (may_be_tls and _speaks_tls(host, port)):
        return ""
    return f"who listens there does not speak as {greeting.name} does"


def _speaks_tls(host: str, port: int) -> bool:
    """Whether it is a server with TLS. Nothing is trusted to it here, so it need not prove who it is."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with (
            socket.create_connection((host, port), timeout=ANSWER_SECONDS) as line,
            context.wrap_socket(line),
        ):
            return True
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")  # it speaks TLS, and wants to know who we are
    except OSError:
        return False
