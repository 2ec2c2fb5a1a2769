"""Measuring links: an actor of Ray on each machine, and between each two of them, for a moment, bare TCP.

Training does not go through Ray either, so this is the way that gradients take: through ports that the system picks,
without TLS. Each measurement is bounded in bytes and seconds.
"""

import hmac
import json
import secrets
import socket
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from typing import Any

from shoal.cluster.links import Link, plan_rounds

MAX_BYTES = 64 << 20
MAX_SECONDS = 1.0
"""What is sent each way between two machines, at most, and for how long."""
NUM_PINGS = 21
CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 30.0
CHUNK_BYTES = 1 << 18


def measure(ray: Any, nodes: Sequence[dict[str, Any]], say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Measure the link between each two of these machines, and never two links of one machine at a time."""
    scheduling = import_module("ray.util.scheduling_strategies")
    ends, addresses = {}, {node["name"]: node["address"] for node in nodes}
    for node in nodes:
        there = scheduling.NodeAffinitySchedulingStrategy(node["id"], soft=False)
        actor = ray.remote(num_cpus=0, max_restarts=0, max_concurrency=2)(End)
        ends[node["name"]] = actor.options(scheduling_strategy=there).remote(addresses[node["name"]])
    rounds = plan_rounds(list(ends))
    num_pairs = sum(map(len, rounds))
    found: list[Link] = []
    for pairs in rounds:
        say(f"measuring {', '.join(f'{a}-{b}' for a, b in pairs)} ({len(found)} of {num_pairs} done)")
        found += _measure_round(ray, ends, addresses, pairs)
    return [asdict(link) for link in found]


def _measure_round(
    ray: Any, ends: Mapping[str, Any], addresses: Mapping[str, str], pairs: Sequence[tuple[str, str]]
) -> list[Link]:
    """Measure pairs of which none shares its machine, at once."""
    asked, found = [], []
    for first, second in pairs:
        token = secrets.token_hex(16)
        door = ends[second].listen.remote(token)
        asked.append((first, second, ends[first].call.remote(addresses[second], door, token)))
    for first, second, call in asked:
        try:
            measured = ray.get(call, timeout=ANSWER_SECONDS)
        except Exception as error:  # Whatever Ray makes of it, this link was not measured.
            measured = {"problem": " ".join(str(error).split())[-200:] or type(error).__name__}
        found.append(Link(first=first, second=second, **measured))
    return found


class End:
    """One end of links, on its machine."""

    def __init__(self, address: str) -> None:
        self._address = address

    def listen(self, token: str) -> int:
        """Answer one other end, soon; returns the port to call."""
        listener = socket.create_server((self._address, 0))
        listener.settimeout(CONNECT_SECONDS)
        threading.Thread(target=_answer, args=(listener, token.encode()), daemon=True).start()
        return int(listener.getsockname()[1])

    def call(self, host: str, port: int, token: str) -> dict[str, Any]:
        """Measure the link to another end that listens; what is in the way is part of the answer."""
        try:
            return measure_link(host, port, token.encode())
        except OSError as error:
            reason = (
                f"no answer within {CONNECT_SECONDS:.0f} s" if isinstance(error, TimeoutError) else error.strerror
            )
            return {"problem": f"{reason or error} (from {self._address} to {host}, TCP port {port})"}


def measure_link(host: str, port: int, token: bytes) -> dict[str, Any]:
    """Latency and the rates both ways to somebody who answers at an address."""
    with _connect(host, port, token, b"p") as line:
        latency = statistics.median(_ping(line) for _ in range(NUM_PINGS))
    with _connect(host, port, token, b"f") as line:
        _send(line)
        line.shutdown(socket.SHUT_WR)
        forward = json.loads(line.makefile("rb").readline())
    with _connect(host, port, token, b"b") as line:
        backward = _receive(line)
    return {"latency_seconds": latency, "forward": forward, "backward": backward}


def _connect(host: str, port: int, token: bytes, what: bytes) -> socket.socket:
    line = socket.create_connection((host, port), CONNECT_SECONDS)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.sendall(token + what)
    return line


def _ping(line: socket.socket) -> float:
    began = time.perf_counter()
    line.sendall(b"x")
    if not line.recv(1):
        raise ConnectionError("the other end hung up")
    return time.perf_counter() - began


def _answer(listener: socket.socket, token: bytes) -> None:
    """Be measured: pings, what they send us, what we send. Who does not know the token is sent away."""
    with listener:
        left = 3
        while left:
            try:
                line, _ = listener.accept()
                line.settimeout(CONNECT_SECONDS)
                with line:
                    left -= _answer_one(line, token)
            except TimeoutError:
                return
            except OSError:
                continue


def _answer_one(line: socket.socket, token: bytes) -> bool:
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    said = line.recv(len(token) + 1, socket.MSG_WAITALL)
    if not hmac.compare_digest(said[:-1], token):
        return False
    match said[-1:]:
        case b"p":
            while line.recv(1):
                line.sendall(b"x")
        case b"f":
            line.sendall(json.dumps(_receive(line)).encode() + b"\n")
        case b"b":
            _send(line)
    return True


def _send(line: socket.socket) -> None:
    """Send what the bounds allow."""
    chunk, deadline = bytes(CHUNK_BYTES), time.monotonic() + MAX_SECONDS
    for _ in range(MAX_BYTES // CHUNK_BYTES):
        line.sendall(chunk)
        if time.monotonic() > deadline:
            return


def _receive(line: socket.socket) -> float:
    """Bytes a second until the end, by the clock of whom they reach. What comes first began before we looked."""
    buffer = bytearray(CHUNK_BYTES)
    line.recv_into(buffer)
    began, num_bytes = time.perf_counter(), 0
    while got := line.recv_into(buffer):
        num_bytes += got
    return num_bytes / max(1e-9, time.perf_counter() - began)
