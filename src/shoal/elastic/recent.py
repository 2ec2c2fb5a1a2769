"""What has been usual lately: windows of durations, and limits that follow them."""

from collections import deque
from collections.abc import Iterable

WINDOW = 256
FEW = 8
"""Fewer durations than this say nothing yet."""


class Recent:
    """The last durations of one kind, in seconds. Adding costs nothing worth naming, a quantile sorts the window."""

    def __init__(self, window: int = WINDOW) -> None:
        self._values: deque[float] = deque(maxlen=window)

    def __len__(self) -> int:
        return len(self._values)

    def add(self, seconds: float) -> None:
        self._values.append(seconds)

    def extend(self, durations: Iterable[float]) -> None:
        self._values.extend(durations)

    def longest(self) -> float:
        return max(self._values, default=0.0)

    def quantile(self, share: float) -> float:
        """The smallest duration that is not exceeded by this share of them; 0 of none."""
        ordered = sorted(self._values)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


class Limit:
    """How long is unusual: three times what 99 of 100 took, and twice the longest of late; never under `floor`.

    Durations with heavy tails have outliers that no quantile of a short window knows. So what nearly reached the
    limit and then ended well raises it for a while: the next one may be longer still. Before there is enough to
    compare with, the limit is `unknown`.
    """

    NEAR = 0.5
    HALF_LIFE_SECONDS = 300.0

    def __init__(self, *, floor: float, unknown: float, window: int = WINDOW) -> None:
        self.recent = Recent(window)
        self._floor, self._unknown = floor, unknown
        self._near_miss, self._missed_at = 0.0, 0.0
        self._cached: float | None = None

    def add(self, seconds: float, now: float) -> None:
        """A duration that ended well at `now`."""
        if seconds > self._floor * self.NEAR:  # what is shorter can be no near miss of any limit
            if seconds > self.NEAR * self.seconds(now):
                self._near_miss, self._missed_at = max(2.0 * seconds, self._memory(now)), now
            self._cached = None
        self.recent.add(seconds)
        if len(self.recent) % 16 == 0 or len(self.recent) <= FEW:
            self._cached = None

    def seconds(self, now: float) -> float:
        """The limit at `now`."""
        if self._cached is None:
            self._cached = self._usual()
        return max(self._cached, self._memory(now))

    def _usual(self) -> float:
        if len(self.recent) < FEW:
            return max(self._unknown, self._floor)
        return max(self._floor, 3.0 * self.recent.quantile(0.99), 2.0 * self.recent.longest())

    def _memory(self, now: float) -> float:
        return float(self._near_miss * 0.5 ** (max(0.0, now - self._missed_at) / self.HALF_LIFE_SECONDS))


class Patience:
    """When a worker that waits for peers should say so. One for each kind of wait; `now` is monotonic seconds.

    `waited` takes every wait that ended well. `is_unusual` is asked while one lasts; it says yes at most four times
    a second, which is how often `waiting` is sent.
    """

    EVERY_SECONDS = 0.25

    def __init__(self, *, floor: float = 0.5, unknown: float = 2.0) -> None:
        self._limit = Limit(floor=floor, unknown=unknown)
        self._said_at = float("-inf")

    def waited(self, seconds: float, now: float) -> None:
        self._limit.add(seconds, now)

    def limit_seconds(self, now: float) -> float:
        return self._limit.seconds(now)

    def is_unusual(self, seconds: float, now: float) -> bool:
        """The wait has lasted `seconds` so far. True where that should be told now."""
        if seconds <= self.limit_seconds(now) or now - self._said_at < self.EVERY_SECONDS:
            return False
        self._said_at = now
        return True
