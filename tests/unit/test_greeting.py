"""Listeners that are no cluster are told from one before an engine begins to wait for them."""

import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from shoal.engine import greeting, ray, spark
from shoal.engine.greeting import GRPC, SPARK, Greeting, greet
from shoal.spec.errors import UserError

Serve = Callable[[bytes], int]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a server that reads something, answers with these bytes, and hangs up; returns its port."""
    servers: list[tuple[socket.socket, threading.Thread]] = []

    def answer_all(server: socket.socket, answer: bytes) -> None:
        while True:
            try:
                line = server.accept()[0]
            except OSError:
                return
            with line:
                line.recv(4096)
                line.sendall(answer)

    def start(answer: bytes) -> int:
        server = socket.create_server(("127.0.0.1", 0))
        thread = threading.Thread(target=answer_all, args=(server, answer))
        thread.start()
        servers.append((server, thread))
        return int(server.getsockname()[1])

    yield start
    for server, thread in servers:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join()


def probe_with(engine: str, port: int) -> None:
    if engine == "ray":
        ray.probe(f"127.0.0.1:{port}", greeting=GRPC)
    else:
        spark.probe(f"spark://127.0.0.1:{port}")


@pytest.mark.parametrize("engine", ["ray", "spark"])
def test_one_who_says_nothing_is_not_waited_for(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greeting, "ANSWER_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(UserError, match=f"127.0.0.1:{port}") as caught:
            probe_with(engine, port)
    assert str(port) in caught.value.why
    assert "did not answer within" in caught.value.why


@pytest.mark.parametrize("engine", ["ray", "spark"])
def test_a_web_server_is_no_cluster(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greeting, "ANSWER_SECONDS", 0.5)
    quiet = type("Quiet", (BaseHTTPRequestHandler,), {"log_message": lambda *_: None})
    with ThreadingHTTPServer(("127.0.0.1", 0), quiet) as server:
        thread = threading.Thread(target=partial(server.serve_forever, 0.01))
        thread.start()
        with pytest.raises(UserError, match=r"There is no Ray cluster|No Spark master") as caught:
            probe_with(engine, server.server_port)
        server.shutdown()
        thread.join()
    assert "who listens there" in caught.value.why


@pytest.mark.parametrize(
    ("hello", "answer", "is_theirs"),
    [
        (GRPC, bytes([0, 0, 6, 4, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 1]), True),
        (GRPC, b"HTTP/1.1 400 Bad Request\r\n\r\n", False),
        (GRPC, b"", False),
        (SPARK, bytes([0, 0, 0, 0, 0, 0, 0, 19, 8, 0, 0, 0, 1, 47]), True),
        (SPARK, b"-ERR unknown command\r\n", False),
        (SPARK, b"short", False),
    ],
)
def test_answers_are_told_apart(serve: Serve, hello: Greeting, answer: bytes, is_theirs: bool) -> None:
    assert (greet("127.0.0.1", serve(answer), hello, may_be_tls=False) == "") is is_theirs


def test_one_with_tls_is_left_to_the_engine_where_that_may_use_it(serve: Serve) -> None:
    refusing = serve(bytes([0x15, 3, 3, 0, 2, 2, 40]))  # an alert: the handshake failed
    assert greet("127.0.0.1", refusing, SPARK, may_be_tls=True) == ""
    assert "does not speak as Ray" in greet("127.0.0.1", refusing, GRPC, may_be_tls=False)
    assert "does not speak as Spark" in greet("127.0.0.1", serve(b"no idea what you mean"), SPARK, may_be_tls=True)
