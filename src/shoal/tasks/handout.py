"""Who is given which item, when it is tried again, which result counts. Pure: facts and times in, decisions out."""

import heapq
import math
from dataclasses import dataclass, field

from shoal.tasks.decision import Decision, Fail, Give, GiveUp, Kill, Retry, Start, TakeBack

BATCH_SECONDS = 0.01
"""Items that are quick are given in batches of about this much work: a message costs a tenth of a millisecond."""
MAX_BATCH, BATCH_BYTES = 4096, 2 << 20
SLOW_SECONDS = 0.05
"""Whoever is busy with one item for so long should not keep others waiting: neither items nor results."""
WORTH_SECONDS = 0.003
"""Work that is worth taking back from a busy worker for an idle one."""
START_SECONDS = 60.0
"""Until a worker's first word. It is waited for only where there is a limit for items too."""
BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.1, 5.0
"""Before an item that raised Retryable is tried again: this, doubled each time. A death needs no wait."""
MAX_IDLE_DEATHS = 3
"""Workers in a row that ended without having begun an item, and without any result in between."""


@dataclass(slots=True)
class Hand:
    """One worker and what it holds, in the order in which it was given: it works in that order.

    `running` is the item it is in, since `since`; where it is in none, `since` is when it was last given or said
    anything. What is held before `running` is done and not told; what comes after is not begun.
    """

    incarnation: int = -1
    is_alive: bool = False
    is_ready: bool = False
    is_given_up: bool = False
    held: dict[int, None] = field(default_factory=dict)
    running: int | None = None
    since: float = 0.0
    is_asked: bool = False

    @property
    def is_usable(self) -> bool:
        return self.is_alive and self.is_ready and not self.is_given_up

    def is_slow(self, now: float) -> bool:
        return self.running is not None and now - self.since > SLOW_SECONDS

    def count_around(self) -> tuple[int, int]:
        """How many items are done and not told, and how many not begun."""
        if self.running not in self.held:
            return 0, 0
        before = list(self.held).index(self.running)
        return before, len(self.held) - before - 1


class Handout:
    """Items of one map, numbered from zero, and the hands they are in.

    Every item that was `added` is in one place: waiting, put off, in one hand, or done. So a result counts where the
    item is in the hand of whoever sends it, and nowhere else: results that come late, twice, or from a process that
    was given up are dropped. An item that its worker died in, hung in, or raised Retryable in is tried again, up to
    `retries` times; others that were in that hand cost nothing. Call `decide` after every change and every 0.05 s.
    """

    def __init__(self, num_workers: int, *, retries: int = 2, timeout_seconds: float | None = None) -> None:
        self.num_workers = num_workers
        self.num_added = self.num_done = self.num_retries = 0
        self.is_complete = False
        self._max_batch = MAX_BATCH
        self._retries = retries
        self._timeout = math.inf if timeout_seconds is None else timeout_seconds
        self._hands = [Hand() for _ in range(num_workers)]
        self._waiting: list[int] = []
        self._put_off: list[tuple[float, int]] = []
        self._attempts: dict[int, int] = {}
        self._last_worker: dict[int, int] = {}
        self._seconds: float | None = None
        self._idle_deaths = 0
        self._decisions: list[Decision] = []

    # What happens.

    def added(self, count: int = 1) -> None:
        """So many further items are there."""
        # Larger than all before, so the heap stays one.
        self._waiting.extend(range(self.num_added, self.num_added + count))
        self.num_added += count

    def skipped(self, number: int) -> None:
        """An item that waits cannot be given to anybody: it is done."""
        self._waiting.remove(number)
        heapq.heapify(self._waiting)
        self._done(number)

    def limit_batch(self, mean_bytes: float) -> None:
        """Items are about so large: batches of them are not."""
        self._max_batch = int(max(1, min(MAX_BATCH, BATCH_BYTES / max(mean_bytes, 1.0))))

    def completed(self) -> None:
        """There are no further items."""
        self.is_complete = True

    def started(self, worker: int, incarnation: int, now: float) -> None:
        """A process was started for this worker."""
        self._hands[worker] = Hand(incarnation=incarnation, is_alive=True, since=now)

    def ready(self, worker: int, incarnation: int, now: float) -> None:
        """A worker has loaded the function and waits for items."""
        if (hand := self._hand(worker, incarnation)) is not None:
            hand.is_ready, hand.since = True, now

    def seen(self, worker: int, incarnation: int, running: int | None, since: float) -> None:
        """A worker is in this item since then, or in none."""
        hand = self._hand(worker, incarnation)
        if hand is None or (running, since) == (hand.running, hand.since):
            return
        running = running if running in hand.held else None
        if running is not None:
            hand.since = since
        hand.is_asked &= running == hand.running
        hand.running = running

    def worked(self, num_items: int, seconds: float) -> None:
        """So many items took so long: batches follow what they take."""
        if num_items > 0:
            mean = seconds / num_items
            self._seconds = mean if self._seconds is None else (self._seconds + mean) / 2

    def finished(self, worker: int, incarnation: int, number: int, now: float) -> bool:
        """A worker has a result (or an error) for an item; True where it counts, which it does once."""
        if not self._let_go(worker, incarnation, number, now):
            return False
        self._done(number)
        self._idle_deaths = 0
        return True

    def retryable(self, worker: int, incarnation: int, number: int, why: str, now: float) -> None:
        """An item failed in a way that may not happen again."""
        if self._let_go(worker, incarnation, number, now):
            self._idle_deaths = 0
            self._blame(number, worker, why, now, has_backoff=True)

    def returned(self, worker: int, incarnation: int, numbers: tuple[int, ...], now: float) -> None:
        """A worker gives back items it has not begun."""
        for number in numbers:
            if self._let_go(worker, incarnation, number, now):
                heapq.heappush(self._waiting, number)

    def exited(self, worker: int, incarnation: int, running: int | None, why: str, now: float) -> None:
        """A process has ended, in this item or in none, after all it said was heard."""
        hand = self._hands[worker]
        if hand.incarnation != incarnation or not hand.is_alive:
            return
        hand.is_alive = False
        if not hand.is_given_up:
            self._empty(worker, hand, running, why, now)

    # What is done about it.

    def decide(self, now: float) -> list[Decision]:
        """What is due now; carry it out in this order."""
        self._take_due(now)
        self._end_hung(now)
        self._start()
        self._give(now)
        self._take_back(now)
        decisions, self._decisions = self._decisions, []
        return decisions

    def room(self, num_kept: int) -> int:
        """How many further items are wanted, where so many are kept for any reason: bounded, and enough for all."""
        return max(0, self.num_workers * max(4, 3 * self._batch_size()) - num_kept)

    @property
    def num_open(self) -> int:
        """Items that are there and not done."""
        return self.num_added - self.num_done

    @property
    def is_over(self) -> bool:
        return self.is_complete and self.num_open == 0

    @property
    def num_usable(self) -> int:
        """Workers that work, or could."""
        return sum(hand.is_usable for hand in self._hands)

    def next_due(self) -> float:
        """When an item that was put off is due; infinity where none is."""
        return self._put_off[0][0] if self._put_off else math.inf

    def _hand(self, worker: int, incarnation: int) -> Hand | None:
        """The hand of a process, unless it is gone or given up."""
        hand = self._hands[worker]
        return hand if hand.incarnation == incarnation and hand.is_alive and not hand.is_given_up else None

    def _let_go(self, worker: int, incarnation: int, number: int, now: float) -> bool:
        hand = self._hand(worker, incarnation)
        if hand is None or number not in hand.held:
            return False
        del hand.held[number]
        if hand.running in (number, None):
            hand.running, hand.since = None, now
        return True

    def _done(self, number: int) -> None:
        self.num_done += 1
        self._attempts.pop(number, None)
        self._last_worker.pop(number, None)

    def _blame(self, number: int, worker: int, why: str, now: float, *, has_backoff: bool = False) -> None:
        attempt = self._attempts[number] = self._attempts.get(number, 0) + 1
        self._last_worker[number] = worker
        if attempt > self._retries:
            self._decisions.append(GiveUp(number, worker, attempt, why))
            self._done(number)
            return
        self.num_retries += 1
        self._decisions.append(Retry(number, worker, attempt, why))
        pause = min(BACKOFF_SECONDS * 2.0 ** (attempt - 1), MAX_BACKOFF_SECONDS) if has_backoff else 0.0
        heapq.heappush(self._put_off, (now + pause, number))

    def _empty(self, worker: int, hand: Hand, running: int | None, why: str, now: float) -> None:
        """Take everything out of a hand that will do nothing more; the item it was in is to blame, if any."""
        held, hand.held = hand.held, {}
        for number in held:
            if number == running:
                self._blame(number, worker, why, now)
            else:
                heapq.heappush(self._waiting, number)
        self._idle_deaths = 0 if running in held else self._idle_deaths + 1
        if self._idle_deaths >= MAX_IDLE_DEATHS:
            self._decisions.append(Fail(why))

    def _take_due(self, now: float) -> None:
        while self._put_off and self._put_off[0][0] <= now:
            heapq.heappush(self._waiting, heapq.heappop(self._put_off)[1])

    def _end_hung(self, now: float) -> None:
        for worker, hand in enumerate(self._hands):
            is_new = hand.is_alive and not hand.is_ready
            is_busy = bool(hand.held) or is_new
            limit = max(self._timeout, START_SECONDS) if is_new else self._timeout
            if hand.is_alive and not hand.is_given_up and is_busy and now - hand.since > limit:
                hand.is_given_up = True
                why = f"no result after {limit:g} s" if not is_new else f"not ready after {limit:g} s"
                self._decisions.append(Kill(worker, why))
                self._empty(worker, hand, hand.running, why, now)

    def _start(self) -> None:
        wanted = min(self.num_workers, self.num_open) if self.is_complete else self.num_workers
        alive = sum(hand.is_alive for hand in self._hands)
        for worker, hand in enumerate(self._hands):
            if alive < wanted and not hand.is_alive:
                self._decisions.append(Start(worker, hand.incarnation + 1))
                alive += 1

    def _batch_size(self) -> int:
        if self._seconds is None:
            return 1
        size = int(min(BATCH_SECONDS / max(self._seconds, 1e-9), self._max_batch))
        if self.is_complete:
            # The last ones are divided more and more finely, so that all end at about the same time.
            size = min(size, len(self._waiting) // (2 * self.num_workers))
        return max(1, size)

    def _give(self, now: float) -> None:
        """Fill the emptiest hands first: one batch to work on, and one for the time a message takes."""
        free = {worker for worker, hand in enumerate(self._hands) if hand.is_usable}
        while self._waiting and free:
            worker = min(free, key=lambda each: (len(self._hands[each].held), each))
            hand = self._hands[worker]
            size = 1 if hand.is_slow(now) else self._batch_size()
            numbers = self._pick(worker, size, free) if len(hand.held) <= size else []
            if not numbers:
                free.discard(worker)
                continue
            if not hand.held:
                hand.since = now
            hand.held |= dict.fromkeys(numbers)
            self._decisions.append(Give(worker, tuple(numbers)))

    def _pick(self, worker: int, size: int, free: set[int]) -> list[int]:
        """The first items that wait. One that failed here goes to another worker if one has nothing to do."""
        has_other = any(not self._hands[other].held for other in free if other != worker)
        picked: list[int] = []
        left: list[int] = []
        while self._waiting and len(picked) < size:
            number = heapq.heappop(self._waiting)
            is_avoided = has_other and self._last_worker.get(number) == worker
            (left if is_avoided else picked).append(number)
        for number in left:
            heapq.heappush(self._waiting, number)
        return picked

    def _take_back(self, now: float) -> None:
        usable = [(worker, hand) for worker, hand in enumerate(self._hands) if hand.is_usable]
        has_idle = not self._waiting and any(not hand.held for _, hand in usable)
        for worker, hand in usable:
            is_slow = hand.is_slow(now)
            if hand.is_asked or not (is_slow or has_idle):
                continue
            num_untold, num_left = hand.count_around()
            is_worth = num_left and (is_slow or num_left * (self._seconds or 0.0) > WORTH_SECONDS)
            if (has_idle and is_worth) or (is_slow and (num_untold or num_left > 1)):
                hand.is_asked = True
                self._decisions.append(TakeBack(worker))
