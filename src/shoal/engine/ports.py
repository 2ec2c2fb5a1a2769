"""Ports for workers to meet at, kept for them until the run ends."""

import socket
from typing import Self


class ReservedPorts:
    """Free TCP ports that the kernel hands to nobody else while this is open.

    Each port is held by a bound socket that never listens. With SO_REUSEADDR on both sides a worker can still bind
    the port and listen on it (torch's TCPStore and gRPC set that option), while `bind(0)` and outgoing connections of
    other processes pass it over. Asking for a free port and closing it again would leave a gap in which it is taken.
    """

    def __init__(self, num_ports: int) -> None:
        self._sockets: list[socket.socket] = []
        try:
            for _ in range(num_ports):
                self._sockets.append(_bind_free())
        except OSError:
            self.close()
            raise
        self.numbers: tuple[int, ...] = tuple(held.getsockname()[1] for held in self._sockets)

    def close(self) -> None:
        for held in self._sockets:
            held.close()
        self._sockets.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _bind_free() -> socket.socket:
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # All addresses, because that is what a TCPStore binds: holding 127.0.0.1 alone would not keep 0.0.0.0 free.
        held.bind(("", 0))
    except OSError:
        held.close()
        raise
    return held
