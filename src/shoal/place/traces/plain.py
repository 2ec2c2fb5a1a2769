"""Our own trace format (docs/scheduling.md), and what its jobs do: a known amount of work at a known speed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shoal.place.cluster import CLASSES, Allocation, Ask, Node, Queued
from shoal.place.traces.table import Row, read_rows

REQUIRED = ("submitted_at", "seconds")
GIB = 2**30
MOST = 1e9
"""Workers, cores, GPUs and GiB are counted in 64 bits, with room for thousandths."""
MOST_SPEEDUP = 10.0


@dataclass(frozen=True, slots=True)
class Power:
    """`Rate` of a job that n workers make n ** `exponent` times as fast. 1: perfectly, 0: not at all."""

    exponent: float = 1.0

    def __call__(self, kind: str, workers: int, nodes: int) -> float:
        return float(workers**self.exponent) if workers > 0 else 0.0


@dataclass(slots=True)
class PlainWork:
    """A job that takes `seconds` on `asked` workers. After each start or change it pauses for its `stop_seconds`.

    Policies see how long it takes only if `is_length_known`.
    """

    queued: Queued
    seconds: float
    asked: int
    is_length_known: bool = True
    rate: Power = Power()
    workers: int = 0
    pause: float = 0.0
    left: float = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.seconds * self.rate("", self.asked, 1)

    def seen(self) -> Queued:
        if not self.is_length_known:
            return self.queued
        return self.queued.having(remaining_seconds=self.left / self.rate("", self.queued.max_workers, 1))

    def place(self, allocation: Allocation, nodes: Mapping[str, Node]) -> None:
        self.workers = sum(allocation.values())
        self.pause = self.queued.stop_seconds if self.workers else 0.0

    def work(self, seconds: float) -> float | None:
        waited = min(self.pause, seconds)
        self.pause -= waited
        speed = self.rate("", self.workers, 1)
        needed = waited + self.left / speed
        if needed <= seconds:
            self.left = 0.0
            return needed
        self.left -= (seconds - waited) * speed
        return None


def read_plain(path: Path, *, is_length_known: bool = True) -> list[PlainWork]:
    """Jobs of a trace in our own format."""
    return [_job(row, is_length_known) for row in read_rows(path, REQUIRED)]


def _job(row: Row, is_length_known: bool) -> PlainWork:
    workers = row.whole("workers", 1, least=1, most=MOST)
    smallest = row.whole("min_workers", workers, least=1, most=MOST)
    largest = row.whole("max_workers", max(workers, smallest), least=1, most=MOST)
    if smallest > largest:
        raise row.error("max_workers", f"{largest} is less than min_workers, {smallest}")
    job_class = row.text("class", "training")
    if job_class not in CLASSES:
        raise row.error("class", f"{job_class!r} is none of {', '.join(CLASSES)}")
    kinds = row.text("kinds", "").replace("|", " ").split()
    limit = row.number("time_limit_seconds", 0.0)
    is_elastic = smallest < largest
    rate = Power(row.number("speedup", 1.0, most=MOST_SPEEDUP))
    queued = Queued(
        id=row.text("id", f"job-{row.line}"),
        ask=Ask(
            cores=row.number("cores", 1.0, most=MOST),
            memory_bytes=int(row.number("memory_gib", 0.0, most=MOST) * GIB),
            gpus=row.number("gpus", 0.0, most=MOST),
            disk_bytes=int(row.number("disk_gib", 0.0, most=MOST) * GIB),
            kinds=frozenset(kinds),
        ),
        min_workers=smallest,
        max_workers=largest,
        owner=row.text("owner", ""),
        account=row.text("account", ""),
        job_class=job_class,
        priority=row.whole("priority", 0, least=-(10**9)),
        weight=row.number("weight", 1.0, above=0.0),
        partition=row.text("partition", "default"),
        submitted_at=row.number("submitted_at"),
        time_limit_seconds=limit or None,
        stop_seconds=row.number("restart_seconds", 0.0),
        is_elastic=is_elastic,
        rate=rate if is_elastic else None,
    )
    return PlainWork(queued, row.number("seconds", above=0.0), workers, is_length_known, rate)
