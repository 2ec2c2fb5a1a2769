"""Handing a descriptor of shared memory to the other processes of a host.

Two ways: by its number, which the peers open through `/proc/PID/fd`; or, where the system forbids that, the
descriptor itself, over unix sockets. A `Swap` is either of them: every rank gives one, every rank gets everyone's.
"""

import errno
import os
import secrets
import socket
import struct
from collections.abc import Callable, Sequence

from shoal.comm.process import Process

# Gives a descriptor (or -1 for none) to every peer; returns theirs, opened here, -1 where a peer gave none.
Swap = Callable[[int], list[int]]
_CREDENTIALS = struct.Struct("iII")


def open_of(process: Process, fd: int) -> int:
    """Open another process's descriptor through `/proc`. Raises OSError where the system does not allow it."""
    path = f"/proc/{process.pid}/fd/{fd}"
    opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    if not os.readlink(path).startswith("/memfd:shoal"):
        os.close(opened)
        raise OSError(errno.ESTALE, "the process closed it, or another process has taken its pid", path)
    return opened


def swap_by_proc(processes: Sequence[Process], rank: int, gather: Callable[[int], list[int]]) -> Swap:
    """Pass descriptors by number: `gather` tells every rank each rank's number, `/proc` opens them."""

    def swap(fd: int) -> list[int]:
        numbers = gather(fd)
        return [
            -1 if number < 0 else os.dup(fd) if peer == rank else open_of(processes[peer], number)
            for peer, number in enumerate(numbers)
        ]

    return swap


def swap_by_sockets(sockets: Sequence[socket.socket | None], rank: int) -> Swap:
    """Pass descriptors themselves over one connected unix socket per peer (None at our own rank)."""

    def swap(fd: int) -> list[int]:
        for peer in sockets:
            if peer is not None:
                socket.send_fds(peer, [b"f" if fd >= 0 else b"-"], [fd] if fd >= 0 else [])
        return [_take(peer) if peer is not None else os.dup(fd) if fd >= 0 else -1 for peer in sockets]

    return swap


def _take(peer: socket.socket) -> int:
    word, descriptors, _, _ = socket.recv_fds(peer, 1, 1, socket.MSG_CMSG_CLOEXEC)
    if not word:
        raise ConnectionResetError(errno.ECONNRESET, "a worker went away while memory was being shared")
    return descriptors[0] if descriptors else -1


def listen() -> tuple[socket.socket, str]:
    """A unix socket with a name outside the file system, which ends with it."""
    name = f"shoal-{secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0{name}")
    listener.listen()
    return listener, name


def connect_all(
    listener: socket.socket, names: Sequence[str], processes: Sequence[Process], rank: int, timeout_seconds: float
) -> list[socket.socket | None]:
    """One connected socket per peer: we call the lower ranks, the higher ranks call us.

    Callers are known by the pid and user the kernel vouches for; strangers are hung up on.
    """
    sockets: list[socket.socket | None] = [None] * len(processes)
    rank_of = {process.pid: peer for peer, process in enumerate(processes)}
    for peer in range(rank):
        caller = sockets[peer] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        caller.settimeout(timeout_seconds)
        caller.connect(f"\0{names[peer]}")
    listener.settimeout(timeout_seconds)
    while None in sockets[rank + 1 :]:
        called, _ = listener.accept()
        caller_rank = rank_of.get(_pid_behind(called), rank)
        if caller_rank <= rank or sockets[caller_rank] is not None:
            called.close()
            continue
        called.settimeout(timeout_seconds)
        sockets[caller_rank] = called
    return sockets


def _pid_behind(peer: socket.socket) -> int:
    """The process at the other end, or -1 if it belongs to another user."""
    pid, user, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid if user == os.getuid() else -1
