"""Whether the ranks of several hosts can reach each other where each of them listens, and who cannot be reached.

gloo would find out, too: after half a minute, and without a name.
"""

import contextlib
import errno
import select
import socket
import time
from collections.abc import Mapping, Sequence

import msgspec

from shoal.comm.group import name_ranks
from shoal.comm.rendezvous import Rendezvous
from shoal.spec.errors import UserError

REACH_SECONDS = 2.0
CAUSE = "wrong_interface"


def check_reach(meeting: Rendezvous, address: str, device: str = "") -> None:
    """Raise the same UserError on every rank where one listens at an address that the others do not reach.

    `address` is where this rank is going to listen, through `device`. Costs two rounds over the store, and one
    connection to every other rank; up to 2 s where something is wrong.
    """
    with _listen(address) as listener:
        places = [
            msgspec.json.decode(text, type=tuple[str, int, str])
            for text in meeting.gather("place", msgspec.json.encode((*listener.getsockname()[:2], device)).decode())
        ]
        peers = [rank for rank in range(meeting.size) if rank != meeting.rank]
        missed = try_all({rank: places[rank][:2] for rank in peers}, REACH_SECONDS)
        told = meeting.gather("missed", msgspec.json.encode(missed).decode())
    found = find_unreached([msgspec.json.decode(text, type=list[int]) for text in told])
    if found is None:
        return
    rank, by = found
    host, port, name = places[rank]
    raise UserError(
        f"Rank {rank} cannot be reached at {host}{f' (interface {name})' if name else ''}.",
        why=f"{name_ranks(by)} tried to connect to it there, port {port}, and got no answer",
        hint=f"on the machine of rank {rank}, set GLOO_SOCKET_IFNAME to the device that leads to the others, "
        "or leave it unset; check its firewall",
        rank=meeting.rank,
    ).blame(CAUSE, [rank])


def find_unreached(missed: Sequence[Sequence[int]]) -> tuple[int, list[int]] | None:
    """The rank that most others miss, and who they are; `missed` has for each rank those it did not reach.

    Of two who are missed by as many it is the one who reaches fewer itself.
    """
    by = {rank: [other for other, its in enumerate(missed) if rank in its] for rank in range(len(missed))}
    worst = max(by, key=lambda rank: (len(by[rank]), len(missed[rank])), default=None)
    return (worst, by[worst]) if worst is not None and by[worst] else None


def _listen(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def try_all(places: Mapping[int, tuple[str, int]], seconds: float) -> list[int]:
    """Connect to all places at once, and hang up. Those that did not answer in time."""
    poll, waiting, missed = select.poll(), {}, []
    with contextlib.ExitStack() as stack:
        for rank, (host, port) in places.items():
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            link = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            link.setblocking(False)
            if link.connect_ex((host, port)) in (0, errno.EINPROGRESS):
                poll.register(link, select.POLLOUT)
                waiting[link.fileno()] = rank, link
            else:
                missed.append(rank)
        deadline = time.monotonic() + seconds
        while waiting and (left := deadline - time.monotonic()) > 0:
            for number, _ in poll.poll(1e3 * left):
                poll.unregister(number)
                rank, link = waiting.pop(number)
                if link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    missed.append(rank)
        return sorted([*missed, *(rank for rank, _ in waiting.values())])
