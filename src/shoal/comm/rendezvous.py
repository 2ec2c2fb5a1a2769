"""How processes that know only an address and their rank find each other: a store with a prefix per generation."""

import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

from shoal.comm.group import lost, name_ranks
from shoal.spec.errors import MemberLost, UserError

LOOPBACK = "127.0.0.1"
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.05
_STORE_SECONDS = 10.0


def open_store(address: str, port: int, rank: int, size: int, timeout_seconds: float = 60.0) -> Store:
    """The store at MASTER_ADDR:MASTER_PORT. Rank 0 hosts it, unless someone (a torchrun agent) already does.

    It is the one `init_process_group` uses there: within a process both share the server, in either order. The store
    ends with its host, and with it the chance to form new groups, not the groups that exist.
    """
    if rank == 0:
        try:
            return _open(address, port, size, timeout_seconds, is_host=True)
        except dist.DistNetworkError as error:
            if "EADDRINUSE" not in str(error):
                raise _no_store(address, port, timeout_seconds) from error
    if not await_listener(address, port, timeout_seconds):
        raise _no_store(address, port, timeout_seconds)
    try:
        return _open(address, port, size, timeout_seconds, is_host=False)
    except dist.DistError as error:
        raise _no_store(address, port, timeout_seconds) from error


def await_listener(address: str, port: int, timeout_seconds: float) -> bool:
    """Whether somebody listened there in time. Asks often: PyTorch's store sleeps for half a second or longer."""
    pause, deadline = _SHORTEST_PAUSE, time.monotonic() + timeout_seconds
    while (left := deadline - time.monotonic()) > 0:
        try:
            socket.create_connection((address, port), timeout=left).close()
            return True
        except OSError:
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE)
    return False


def _open(address: str, port: int, size: int, timeout_seconds: float, *, is_host: bool) -> TCPStore:
    return TCPStore(
        address,
        port,
        size,
        is_master=is_host,
        timeout=timedelta(seconds=timeout_seconds),
        wait_for_workers=False,
        multi_tenant=True,
    )


def _no_store(address: str, port: int, timeout_seconds: float) -> UserError:
    return UserError(
        f"No meeting point at {address}:{port} after {timeout_seconds:g} s.",
        why="rank 0 did not start, cannot be reached, or the port belongs to something else",
        hint="check MASTER_ADDR and MASTER_PORT, and that a firewall lets the workers reach them",
    )


Gather = Callable[[str, str, Sequence[int] | None], list[str]]
"""(key, value, ranks) -> the values of these ranks for that key, in their order; None is all. Only they call it."""

Look = Callable[[Sequence[int], float], None]
"""(ranks, seconds): called ten times a second by whoever has waited so long for these ranks; may raise to end it."""


def nobody_looks(ranks: Sequence[int], seconds: float) -> None:
    """Wait as long as it takes."""


class Rendezvous:
    """Where the ranks of one generation find each other: in a corner of a store, or by a `gather` of someone else's.

    Keys of other generations are invisible, so late messages reach nobody. With a `gather`, a store is made only
    when it is asked for, and rank 0 hosts it, at its `address`. `look` is called while ranks are waited for, here and
    in the group. `interface` is the network device towards the others, where somebody has named one.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        timeout_seconds: float,
        *,
        store: Store | None = None,
        generation: int = 0,
        gather: Gather | None = None,
        look: Look = nobody_looks,
        address: str = LOOPBACK,
        interface: str = "",
    ) -> None:
        self.rank, self.size, self.timeout_seconds, self.look = rank, size, timeout_seconds, look
        self._store: Store | None = PrefixStore(f"shoal/{generation}", store) if store is not None else None
        self._gather = gather
        self._address = address
        self.interface = interface

    @property
    def is_fixed(self) -> bool:
        """Nobody comes and goes here: who cannot take part now never will."""
        return self._gather is None

    def among(self, name: str, ranks: Sequence[int]) -> "Rendezvous":
        """Where only these ranks find each other, in this order. `name` tells such places apart."""
        gather, look = self._gather, self.look
        return Rendezvous(
            ranks.index(self.rank),
            len(ranks),
            self.timeout_seconds,
            store=PrefixStore(name, self._store) if gather is None and self._store is not None else None,
            gather=None if gather is None else lambda key, value, _: gather(f"{name}/{key}", value, ranks),
            look=lambda peers, seconds: look([ranks[peer] for peer in peers], seconds),
            address=self._address,
            interface=self.interface,
        )

    @property
    def store(self) -> Store:
        if self._store is None:
            self._store = self._host_store()
        return self._store

    def _host_store(self) -> Store:
        hosted = _open(self._address, 0, self.size, self.timeout_seconds, is_host=True) if self.rank == 0 else None
        address, _, port = self.gather("store", f"{self._address}:{hosted.port if hosted else 0}")[0].rpartition(":")
        try:
            return hosted or _open(address, int(port), self.size, _STORE_SECONDS, is_host=False)
        except dist.DistError as error:
            raise lost([0], "The meeting point is gone.", why="its host ended", rank=self.rank) from error

    def gather(self, key: str, value: str) -> list[str]:
        """Everyone's value for `key`, in rank order. Raises MemberLost naming those who did not come in time."""
        if self._gather is not None:
            return self._gather(key, value, None)
        keys = [f"{key}/{peer}" for peer in range(self.size)]
        try:
            self.store.set(keys[self.rank], value)
            if not self.await_keys(keys, self.timeout_seconds):
                raise self._absent(keys)
            return [self.store.get(name).decode() for name in keys]
        except dist.DistError as error:
            raise lost([0], "Lost the meeting point.", why=f"its host ended: {error}", rank=self.rank) from error

    def await_keys(self, keys: Sequence[str], timeout_seconds: float) -> bool:
        """Whether all keys were set in time. Asks again and again: the store's own wait cannot be interrupted."""
        pause, deadline = _SHORTEST_PAUSE, time.monotonic() + timeout_seconds
        while not self.store.check(list(keys)):
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return True

    def _absent(self, keys: Sequence[str]) -> MemberLost:
        absent = [peer for peer, name in enumerate(keys) if not self.store.check([name])]
        why = "did not start, ended before it could say so, or cannot reach the meeting point"
        return lost(absent, f"Waited {self.timeout_seconds:g} s for {name_ranks(absent)}.", why=why, rank=self.rank)
