"""How processes that know only an address and their rank find each other: a store with a prefix per generation."""

import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

from shoal.comm.group import lost, name_ranks
from shoal.spec.errors import MemberLost, UserError

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.05


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
    try:
        return _open(address, port, size, timeout_seconds, is_host=False)
    except dist.DistError as error:
        raise _no_store(address, port, timeout_seconds) from error


def _open(address: str, port: int, size: int, timeout_seconds: float, *, is_host: bool) -> Store:
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


class Rendezvous:
    """One generation's corner of a store. Keys of other generations are invisible, so late messages reach nobody."""

    def __init__(self, store: Store, generation: int, rank: int, size: int, timeout_seconds: float) -> None:
        self.store = PrefixStore(f"shoal/{generation}", store)
        self.rank, self.size, self.timeout_seconds = rank, size, timeout_seconds

    def gather(self, key: str, value: str) -> list[str]:
        """Everyone's value for `key`, in rank order. Raises MemberLost naming those who did not come in time."""
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
