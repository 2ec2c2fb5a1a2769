"""The memory all ranks of a host can see: who has arrived where, when, and a few numbers from each.

Every word has one writer. A line of 64 bytes belongs to one rank and one channel:

    word  0     counter: only grows
          1, 2  time of arrival (monotonic ns), for even and odd counter values
          3, 4  what the rank called there (`Call.code`), for even and odd
          5, 6  where its tensor lives, for even and odd
          7     the core it last waited on

Even and odd, because a fast peer may already announce the next value while we still read about this one; it cannot
get two ahead of anyone who waits for it. What orders these accesses is in docs/communication.md.
"""

import ctypes
import math
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from time import monotonic, monotonic_ns
from typing import cast

import numpy as np
import numpy.typing as npt

from shoal.comm import futex
from shoal.comm.cores import current_core, is_any_idle, step_off
from shoal.comm.group import lost, name_ranks
from shoal.comm.memory import round_up
from shoal.spec.errors import MemberLost

NUM_CHANNELS = 16
COLLECTIVE, MAIL = NUM_CHANNELS, NUM_CHANNELS + 1
MAX_NUMBERS = 64
_LINE_WORDS = 8
_STAMP, CALL, PLACE, _CORE = 1, 3, 5, 7
_SPINS, _YIELDS = 40, 20
_NAP_SECONDS = 0.1
_STEP_SECONDS = 0.005

Numbers = npt.NDArray[np.float64] | npt.NDArray[np.int64]


def num_bytes(size: int) -> int:
    """Bytes of a board for `size` ranks: flags, a line per channel and rank, two per pair, mail."""
    return (_num_flag_words(size) + _LINE_WORDS * _num_lines(size) + 2 * size * MAX_NUMBERS) * 8


def _num_flag_words(size: int) -> int:
    return 2 * round_up(math.ceil(size / 8), _LINE_WORDS)


def _num_lines(size: int) -> int:
    return (NUM_CHANNELS + 2) * size + 2 * size * size


class Board:
    """One rank's hold on the board. `is_running(rank)` tells whether a peer's process still lives.

    `look(ranks, seconds)` is called ten times a second by whoever sleeps here for these ranks, and may raise.

    A wait spins for some 40 µs (hardly, where there are fewer cores than ranks), then sleeps in the kernel until the
    awaited rank signals: about 20 µs from signal to running again, no processor time meanwhile. Ten times a second
    a sleeper looks whether its peers are alive.
    """

    def __init__(
        self,
        memory: mmap.mmap,
        rank: int,
        size: int,
        timeout_seconds: float,
        is_running: Callable[[int], bool],
        look: Callable[[Sequence[int], float], None] = lambda ranks, seconds: None,
    ) -> None:
        self.rank, self.size, self.timeout_seconds = rank, size, timeout_seconds
        self.late_seconds = [0.0] * size
        self._is_running = is_running
        self._look = look
        self._peers = [peer for peer in range(size) if peer != rank]
        self._bytes = memoryview(memory)
        self.words = self._bytes.cast("Q")
        self._anchor = ctypes.c_char.from_buffer(memory)
        self._address = ctypes.addressof(self._anchor)
        flag_words = _num_flag_words(size)
        self._flag_words = range(math.ceil(size / 8))
        self._left_at = flag_words // 2 * 8
        self._lines_at = flag_words
        mail_at = flag_words + _LINE_WORDS * _num_lines(size)
        mail = np.frombuffer(memory, np.float64, 2 * size * MAX_NUMBERS, 8 * mail_at)
        self._mail = mail.reshape(2, size, MAX_NUMBERS)
        self._mine = [self.line(channel, rank) for channel in range(NUM_CHANNELS + 2)]
        self._others = [[(p, self.line(channel, p)) for p in self._peers] for channel in range(NUM_CHANNELS + 2)]
        self._num_asleep, self._asleep_lock = 0, threading.Lock()
        self._next_step = 0.0
        self._round = 0
        self._posted: Numbers | None = None
        self._spins = _SPINS if len(os.sched_getaffinity(0)) >= size else 1

    def line(self, channel: int, rank: int) -> int:
        """The first word of a rank's line on a channel."""
        return self._lines_at + (channel * self.size + rank) * _LINE_WORDS

    def pair_line(self, source: int, to: int, *, is_answer: bool) -> int:
        """The line on which `source` announces what it sends `to`, or on which `to` answers."""
        first = (NUM_CHANNELS + 2) * self.size
        return self._lines_at + (first + 2 * (source * self.size + to) + is_answer) * _LINE_WORDS

    def signal(self, channel: int, value: int) -> None:
        """Tell everyone that this rank has reached `value`. What it wrote before is visible to who sees the value."""
        self.raise_line(self._mine[channel], value)

    def raise_line(self, at: int, value: int) -> None:
        """`signal` on the line at word `at`, which must be ours. About 0.5 µs; 1.5 µs more where someone sleeps."""
        words = self.words
        words[at + _STAMP + (value & 1)] = monotonic_ns()
        if not futex.STORES_ARE_ORDERED:
            futex.fence()
        words[at] = value
        futex.fence()  # the counter must be out before we look for sleepers, or one could miss it
        for flags in self._flag_words:
            if words[flags]:
                futex.wake(self._address + 8 * at)
                return

    def wait(self, channel: int, value: int, ranks: Sequence[int] | None = None) -> int:
        """Return when the ranks (default: all others) have reached `value`: the rank that arrived last, maybe us.

        Time spent waiting is added to `late_seconds` of that rank. Raises MemberLost for the dead and the silent.
        """
        words = self.words
        lines = self._others[channel] if ranks is None else [(r, self.line(channel, r)) for r in ranks]
        began = 0.0
        for rank, at in lines:
            if words[at] < value:
                began = began or monotonic()
                self._spin(rank, at, value)
        if not futex.STORES_ARE_ORDERED:
            futex.fence()
        last, latest = self.rank, words[self._mine[channel] + _STAMP + (value & 1)]
        for rank, at in lines:
            stamp = words[at + _STAMP + (value & 1)]
            if stamp > latest:
                last, latest = rank, stamp
        if began:
            self.late_seconds[last] += monotonic() - began
        return last

    def arrivals(self, channel: int, value: int) -> list[int]:
        """When each rank reached `value`, in ns of the host's monotonic clock. Valid after `wait` for that value."""
        return [self.words[self.line(channel, r) + _STAMP + (value & 1)] for r in range(self.size)]

    def counters(self, channel: int) -> list[int]:
        """How far each rank has come on a channel. Of ranks that have ended, or wait, this is final."""
        if not futex.STORES_ARE_ORDERED:
            futex.fence()
        return [self.words[self.line(channel, rank)] for rank in range(self.size)]

    def wait_line(self, rank: int, at: int, value: int) -> None:
        """Return when `rank` has raised the line at word `at` to `value`, and all it wrote before is visible."""
        if self.words[at] < value:
            self._spin(rank, at, value)
        if not futex.STORES_ARE_ORDERED:
            futex.fence()

    def _spin(self, rank: int, at: int, value: int) -> None:
        words = self.words
        for turn in range(_YIELDS):
            for _ in range(self._spins):
                if words[at] >= value:
                    return
            if turn == 0:
                self._keep_apart()
            os.sched_yield()  # the one we wait for may be queued behind us on this very core
        self._sleep(rank, at, value)

    def _keep_apart(self) -> None:
        """Note our core; if a lower rank has noted the same one and another is idle, leave it to that rank."""
        core = self.words[self._mine[COLLECTIVE] + _CORE] = current_core()
        taken = [self.words[at + _CORE] for peer, at in self._others[COLLECTIVE] if peer < self.rank]
        if core in taken and self._spins > 1 and monotonic() >= self._next_step:
            self._next_step = monotonic() + _STEP_SECONDS
            if is_any_idle():
                step_off(taken)

    def _sleep(self, rank: int, at: int, value: int) -> None:
        words, address = self.words, self._address + 8 * at
        began = monotonic()
        next_look = began + _NAP_SECONDS
        self._count_asleep(1)
        try:
            while (seen := words[at]) < value:
                futex.wait(address, seen, _NAP_SECONDS)
                if (now := monotonic()) >= next_look:
                    self._look_for_the_lost(rank, at, value, now - began)
                    next_look = now + _NAP_SECONDS
        finally:
            self._count_asleep(-1)

    def _count_asleep(self, change: int) -> None:
        """Several threads of a rank may sleep; its flag is up while any does."""
        with self._asleep_lock:
            self._num_asleep += change
            self._bytes[self.rank] = self._num_asleep > 0

    def check_peers(self) -> None:
        """Raise MemberLost if a peer has ended, or has left."""
        dead, gone = self._ended()
        if dead or gone:
            raise self._lost(dead, gone)

    def _ended(self) -> tuple[list[int], list[int]]:
        """Who ended without leaving, and who left."""
        gone = [peer for peer in self._peers if self._bytes[self._left_at + peer] != 0]
        return [peer for peer in self._peers if peer not in gone and not self._is_running(peer)], gone

    def _lost(self, dead: Sequence[int], gone: Sequence[int]) -> MemberLost:
        if dead:
            why = "the process ended without leaving the group"
            return lost(dead, f"Lost {name_ranks(dead)}.", why=why, rank=self.rank)
        why = "it closed the group while others still waited for it; its own error, if any, is the cause"
        return lost(gone, f"Lost {name_ranks(gone)}.", why=why, rank=self.rank)

    def _look_for_the_lost(self, rank: int, at: int, value: int, seconds: float) -> None:
        self._look(self._missing(rank, at, value), seconds)
        dead, gone = self._ended()
        if self.words[at] >= value:
            return
        if dead or rank in gone:
            raise self._lost(dead, [rank])
        if seconds >= self.timeout_seconds:
            silent = self._missing(rank, at, value)
            raise lost(
                silent,
                f"Waited {self.timeout_seconds:g} s for {name_ranks(silent)}.",
                why="the process lives but did not arrive: stopped, stuck, or much slower than the others",
                rank=self.rank,
            )

    def _missing(self, rank: int, at: int, value: int) -> list[int]:
        """Everyone who is missing at the same place, not only the one we happen to wait for."""
        row = next((row for row in self._others if (rank, at) in row), [])
        return [peer for peer, line in row if self.words[line] < value] or [rank]

    def post(self, numbers: Numbers) -> None:
        """Show up to 64 numbers, float64 or int64, to all ranks, who all post equally many and then call `peers`."""
        assert self._posted is None, "post() was called twice without peers() between"
        self._round, self._posted = self._round + 1, numbers
        self._mail[self._round & 1, self.rank, : len(numbers)] = numbers.view(np.float64)
        self.signal(MAIL, self._round)

    def peers(self) -> Numbers:
        """Everyone's numbers, one row a rank, in the dtype we posted. About 3 µs with `post`."""
        posted, self._posted = self._posted, None
        assert posted is not None, "peers() was called without post() before"
        self.wait(MAIL, self._round)
        return cast(Numbers, self._mail[self._round & 1, :, : len(posted)].copy().view(posted.dtype))

    def close(self) -> None:
        """Raise our flag that says we left, wake whoever waits for us, and let go of the memory."""
        if self.size > 1:
            self._bytes[self._left_at + self.rank] = 1
            for at in self._mine:
                futex.wake(self._address + 8 * at)
        self.words.release()
        self._bytes.release()
        del self._mail, self._anchor
