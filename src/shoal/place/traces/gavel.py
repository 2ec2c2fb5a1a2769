"""Traces of Gavel (OSDI '20) and its table of throughputs: jobs of a known number of steps, faster on some kinds."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal.place.cluster import Allocation, Ask, Node, Queued
from shoal.place.traces.table import Row
from shoal.spec.errors import UserError

COLUMNS = {
    7: ("type", "command", "steps_argument", "needs_data", "steps", "submitted_at", "workers"),
    10: ("type", "command", "directory", "steps_argument", "needs_data", "steps", "workers", "weight", "slo")
    + ("submitted_at",),
    12: ("type", "command", "directory", "steps_argument", "needs_data", "steps", "workers", "mode", "weight", "slo")
    + ("seconds", "submitted_at"),
}
"""Columns of the three forms of these files, by how many there are. Commands are labels; nothing runs them."""

SPREAD = "_unconsolidated"
_KEY = re.compile(r"\('(.*)', (\d+)\)")


@dataclass(frozen=True, slots=True)
class Throughputs:
    """Steps a second by kind of node, type of job and workers. The others on its node have no part in it."""

    path: Path
    steps: Mapping[tuple[str, str, int], float]
    kinds: tuple[str, ...]
    pairs: Mapping[tuple[str, str, str, int], tuple[float, float]] = field(default_factory=dict)
    """Kind, two types of jobs, workers of each -> steps a second of both while they share their GPUs."""

    def speeds(self, job_type: str, workers: int) -> dict[str, float]:
        """Kind -> steps a second, 0 where it cannot run; empty where this type was never measured with so many."""
        found = {kind: self.steps.get((kind, job_type, workers)) for kind in self.kinds}
        return {kind: speed for kind, speed in found.items() if speed is not None}


@dataclass(frozen=True, slots=True)
class Speeds:
    """`Rate` of a job whose speed depends on the kind of node only; its number of workers does not change."""

    by_kind: Mapping[str, float]

    def __call__(self, kind: str, workers: int, nodes: int) -> float:
        return self.by_kind.get(kind, 0.0)


@dataclass(frozen=True, slots=True)
class PairSpeeds:
    """`PairRate` of a job of the table."""

    table: Throughputs
    job_type: str
    workers: int

    def __call__(self, other: Queued, kind: str) -> tuple[float, float] | None:
        if not isinstance(other.pair_rate, PairSpeeds) or other.pair_rate.workers != self.workers:
            return None
        table, job_type = self.table, other.pair_rate.job_type
        both = table.pairs.get((kind, self.job_type, job_type, self.workers))
        alone = [table.steps.get((kind, name, self.workers), 0.0) for name in (self.job_type, job_type)]
        if both is None or min(*both, *alone) <= 0:
            return None
        return both[0] / alone[0], both[1] / alone[1]


@dataclass(slots=True)
class StepsWork:
    """A job of `left` steps. After each start or change it pauses for its `stop_seconds`.

    `remaining_seconds`, where policies may know it, is on the kind that suits it best.
    """

    queued: Queued
    speeds: Mapping[str, float]
    left: float
    is_length_known: bool = True
    speed: float = 0.0
    pause: float = 0.0
    best: float = field(init=False)

    def __post_init__(self) -> None:
        self.best = max(self.speeds.values())

    def seen(self) -> Queued:
        return self.queued.having(remaining_seconds=self.left / self.best) if self.is_length_known else self.queued

    def place(self, allocation: Allocation, nodes: Mapping[str, Node]) -> None:
        # All workers wait for the slowest.
        self.speed = min((self.speeds.get(nodes[name].kind, 0.0) for name in allocation), default=0.0)
        self.pause = self.queued.stop_seconds if allocation else 0.0

    def work(self, seconds: float) -> float | None:
        waited = min(self.pause, seconds)
        self.pause -= waited
        if self.speed > 0 and waited + self.left / self.speed <= seconds:
            needed = waited + self.left / self.speed
            self.left = 0.0
            return needed
        self.left -= (seconds - waited) * self.speed
        return None


def read_throughputs(path: Path) -> Throughputs:
    """A table as Gavel and Shockwave publish it. Kinds of which only parts of a node are used are left out."""
    try:
        found = json.loads(path.read_text())
        steps = {
            (str(kind), *_key(path, key)): float(entry["null"])
            for kind, entries in found.items()
            if not kind.endswith(SPREAD)
            for key, entry in entries.items()
        }
        pairs = {
            (str(kind), *_pair(path, key, other)): (float(both[0]), float(both[1]))
            for kind, entries in found.items()
            if not kind.endswith(SPREAD)
            for key, entry in entries.items()
            for other, both in entry.items()
            if other != "null" and _key(path, key)[1] == _key(path, other)[1]
        }
    except OSError as error:
        raise UserError(f"{path} cannot be read.", why=error.strerror or str(error)) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is not a table of throughputs.",
            why=f"{type(error).__name__}: {error}",
            hint='it is JSON such as {"v100": {"(\'LM (batch size 5)\', 1)": {"null": 65.3}}}',
        ) from None
    return Throughputs(path, steps, tuple(sorted({kind for kind, _, _ in steps})), pairs)


def _pair(path: Path, one: str, other: str) -> tuple[str, str, int]:
    return _key(path, one)[0], *_key(path, other)


def _key(path: Path, key: str) -> tuple[str, int]:
    match = _KEY.fullmatch(key)
    if match is None:
        raise ValueError(f"{key!r} does not name a type of job and its workers")
    return match[1], int(match[2])


def read_gavel(
    path: Path,
    table: Throughputs,
    *,
    is_length_known: bool = True,
    skips_unmeasured: bool = False,
    shares_gpus: bool = False,
) -> list[StepsWork]:
    """Jobs of a trace. One that the table has no throughput for is an error, or left out with `skips_unmeasured`.

    `shares_gpus`: two of them may share the same GPUs, where the table has their speeds then.
    """
    rows = read_tabbed(path, (7, 10))
    if skips_unmeasured:
        rows = [row for row in rows if any(table.speeds(row.text("type"), row.whole("workers", least=1)).values())]
    return [_job(row, table, is_length_known, shares_gpus) for row in rows]


def read_tabbed(path: Path, forms: Sequence[int]) -> list[Row]:
    """Rows of a file without a header; what a column is follows from how many there are."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise UserError(f"{path} cannot be read.", why=error.strerror or str(error)) from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not text.", why=str(error)) from None
    rows = []
    for number, line in enumerate(lines, 1):
        cells = line.split("\t")
        if len(cells) not in forms:
            raise UserError(
                f"{path}, line {number}: {len(cells)} columns.",
                hint=f"its columns are separated by tabs, {' or '.join(map(str, forms))} of them",
            )
        rows.append(Row(path, number, dict(zip(COLUMNS[len(cells)], cells, strict=True))))
    if not rows:
        raise UserError(f"{path} has no jobs.")
    return rows


def speeds_for(row: Row, table: Throughputs, job_type: str, workers: int) -> dict[str, float]:
    speeds = table.speeds(job_type, workers)
    if max(speeds.values(), default=0.0) <= 0:
        raise UserError(
            f"{row.path}, line {row.line}, column 'type': no throughput of {job_type!r} with {workers} workers.",
            why=f"{table.path} has none",
            hint="`shoal simulate --skip-unmeasured` leaves such jobs out; --throughputs names another table",
        )
    return speeds


def queued_of(row: Row, rate: Speeds, stop_seconds: float = 0.0) -> Queued:
    workers = row.whole("workers", least=1)
    return Queued(
        id=f"job-{row.line}",
        ask=Ask(cores=0.0, gpus=1.0),
        min_workers=workers,
        max_workers=workers,
        weight=row.number("weight", 1.0, above=0.0),
        submitted_at=row.number("submitted_at"),
        stop_seconds=stop_seconds,
        rate=rate,
    )


def _job(row: Row, table: Throughputs, is_length_known: bool, shares_gpus: bool) -> StepsWork:
    job_type, workers = row.text("type"), row.whole("workers", least=1)
    speeds = speeds_for(row, table, job_type, workers)
    queued = queued_of(row, Speeds(speeds))
    if shares_gpus:
        queued = queued.having(pair_rate=PairSpeeds(table, job_type, workers))
    return StepsWork(queued, speeds, row.number("steps", least=1), is_length_known)
