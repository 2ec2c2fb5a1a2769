"""What ranks that talk over sockets tell each other through the store when something is wrong.

Sockets say that a call failed or takes long, not why. A rank that waits longer than half a second writes down which
call it is in; one whose call failed writes that down. From these notes everyone learns who disagrees and who is lost.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence

import torch.distributed as dist

from shoal.comm.group import disagreement, lost, name_ranks
from shoal.comm.process import Process, is_running, on_one_host
from shoal.comm.rendezvous import Rendezvous
from shoal.spec.errors import MemberLost

LOOK_SECONDS = 0.5
_ROLL_CALL_SECONDS = 1.0


class Roll:
    """One rank's notes in the store, and its reading of the others'."""

    def __init__(self, meeting: Rendezvous, processes: Sequence[Process]) -> None:
        self.rank, self.timeout_seconds = meeting.rank, meeting.timeout_seconds
        self._meeting, self._store = meeting, meeting.store
        self._processes = processes
        self._peers = [peer for peer in range(meeting.size) if peer != meeting.rank]
        self._noted = ""

    def compare(self, call: str, code: int) -> None:
        """Return when all ranks have noted the same code for a call. About 0.2 ms a rank."""
        began = time.monotonic()
        keys = [f"{call}/{peer}" for peer in self._peers]
        with self._asking():
            self._note(call, code)
            while not self._meeting.await_keys(keys, LOOK_SECONDS):
                self.look(call, code, began)
            self._compare_noted(call, code)

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """Without the store nobody can be asked; its host is lost at least."""
        try:
            yield
        except dist.DistError as error:
            raise self.lost(self._dead() or [0], "the meeting point ended with its host") from error

    def look(self, call: str, code: int, began: float) -> None:
        """While a call takes long: raise if a rank has ended, called something else, or is silent too long."""
        with self._asking():
            self._note(call, code)
            self._compare_noted(call, code)
            self.look_for_the_lost(call)
            silent = [peer for peer in self._peers if not self._has(f"{call}/{peer}")] or self._peers
        seconds = time.monotonic() - began
        self._meeting.look(silent, seconds)
        if seconds >= self.timeout_seconds:
            raise self.silent(silent)

    def look_for_the_lost(self, call: str = "") -> None:
        """Raise if a rank of this host has ended, has left before this call, or noted that its connections broke."""
        with self._asking():
            if dead := [peer for peer in self._dead() if not self._has(f"left/{peer}")]:
                raise self.lost(dead, "the process ended without leaving the group")
            if left := [peer for peer in self._peers if self._has_left(peer, call)]:
                why = "closed the group while others still waited; its own error, if any, is the cause"
                raise self.lost(left, why)
            if any(self._has(f"broken/{peer}") for peer in self._peers):
                raise self.roll_call("another rank lost its connection")

    def silent(self, ranks: Sequence[int]) -> MemberLost:
        message = f"Waited {self.timeout_seconds:g} s for {name_ranks(ranks)}."
        return lost(ranks, message, why="did not arrive: stopped, stuck, cut off, or far behind", rank=self.rank)

    def roll_call(self, why: str) -> MemberLost:
        """After a failed call: who is missing? On this host the system knows; elsewhere, who does not answer."""
        deadline = time.monotonic() + _ROLL_CALL_SECONDS
        absent = self._peers
        try:
            self._store.set(f"broken/{self.rank}", "yes")
            while absent and time.monotonic() < deadline:
                if dead := self._dead():
                    return self.lost(dead, why)
                absent = [peer for peer in absent if not self._has(f"broken/{peer}")]
                time.sleep(0.02)
        except dist.DistError:
            return self.lost(self._dead() or [0], "the meeting point ended with its host")
        return self.lost(absent, why)

    def lost(self, ranks: Sequence[int], why: str) -> MemberLost:
        message = f"Lost {name_ranks(ranks)}." if ranks else "Lost a connection; every rank still answers."
        return lost(ranks, message, why=why, rank=self.rank)

    def leave(self, last_call: str) -> None:
        """Note that this rank is going, after taking part in `last_call`."""
        with contextlib.suppress(dist.DistError):
            self._store.set(f"left/{self.rank}", last_call)

    def _has_left(self, peer: int, call: str) -> bool:
        """Whether a peer left without this call. One that left after it has only finished earlier than we."""
        return self._has(key := f"left/{peer}") and self._store.get(key).decode() != call

    def _note(self, call: str, code: int) -> None:
        if self._noted != call:
            self._store.set(f"{call}/{self.rank}", str(code))
            self._noted = call

    def _compare_noted(self, call: str, code: int) -> None:
        for peer in self._peers:
            if self._has(key := f"{call}/{peer}") and (theirs := int(self._store.get(key))) != code:
                raise disagreement(self.rank, code, peer, theirs)

    def _has(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def _dead(self) -> list[int]:
        mine = self._processes[self.rank]
        near = [peer for peer in self._peers if on_one_host([mine, self._processes[peer]])]
        return [peer for peer in near if not is_running(self._processes[peer])]
