"""Gavel's policies, written anew from its paper and the behaviour of its simulator: their results say how ours stand.

Each computes what part of the time every job shall have on every kind (a linear program), and in every round runs
those who had least of it. New jobs wait for the next program, at most one in 1,920 s. Needs scipy.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shoal.place.cluster import Cluster, Queued
from shoal.place.decision import Decision, Place, Stop

Floats = NDArray[np.float64]
RESET_SECONDS = 1920.0


def _solve(gains: Floats, sizes: Floats, room: Floats, totals: Floats | None = None) -> Floats:
    """Shares of time x[job, kind] that maximise the least of sum(gains * x), or the sum of `totals * x`."""
    from scipy.optimize import linprog

    num_jobs, num_kinds = gains.shape
    width = num_jobs * num_kinds
    rows: list[Floats] = []
    limits: list[float] = []
    for job in range(num_jobs):
        row = np.zeros(width + 1)
        row[job * num_kinds : (job + 1) * num_kinds] = 1.0
        rows.append(row)
        limits.append(1.0)
        if totals is None:
            row = np.zeros(width + 1)
            row[job * num_kinds : (job + 1) * num_kinds] = -gains[job]
            row[-1] = 1.0
            rows.append(row)
            limits.append(0.0)
    for kind in range(num_kinds):
        row = np.zeros(width + 1)
        row[kind:width:num_kinds] = sizes
        rows.append(row)
        limits.append(room[kind])
    aim = np.zeros(width + 1)
    aim[-1] = -1.0 if totals is None else 0.0
    if totals is not None:
        aim[:width] = -totals.ravel()
    found = linprog(aim, A_ub=np.array(rows), b_ub=np.array(limits), bounds=(0, None), method="highs-ipm")
    return np.asarray(np.clip(found.x[:width].reshape(num_jobs, num_kinds), 0.0, 1.0))


def fair_blind(speeds: Floats, sizes: Floats, room: Floats, left: Floats) -> Floats:
    """Everyone the same time, weighed by workers; kinds are all alike to it."""
    return _solve(np.repeat(sizes[:, None], speeds.shape[1], axis=1), sizes, room)


def fair_aware(speeds: Floats, sizes: Floats, room: Floats, left: Floats) -> Floats:
    """The least progress, as a part of what the blind one gives, is as large as can be."""
    alone = (speeds * fair_blind(speeds, sizes, room, left)).sum(axis=1)
    return _solve(speeds / np.maximum(alone, 1e-12)[:, None] * sizes[:, None], sizes, room)


def early_end(speeds: Floats, sizes: Floats, room: Floats, left: Floats) -> Floats:
    """All done as early as can be. Knows the steps that are left."""
    return _solve(speeds / np.maximum(left, 1e-9)[:, None], sizes, room)


def most_steps(speeds: Floats, sizes: Floats, room: Floats, left: Floats) -> Floats:
    """The largest sum of steps a second."""
    return _solve(speeds, sizes, room, totals=speeds)


@dataclass(slots=True)
class Gavel:
    """One of them as a policy. It keeps what it computed between rounds, as the original does."""

    shares: Callable[[Floats, Floats, Floats, Floats], Floats]
    is_aware: bool = True
    seed: int = 0
    reset_at: float = 0.0
    must_solve: bool = True
    seen: frozenset[str] = frozenset()
    planned: dict[str, dict[str, float]] = field(default_factory=dict)
    spent: dict[tuple[str, str], float] = field(default_factory=dict)
    before: dict[tuple[str, str], float] = field(default_factory=dict)
    busy: dict[str, float] = field(default_factory=dict)
    debts: dict[tuple[str, str], float] = field(default_factory=dict)
    shuffler: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.shuffler = random.Random(self.seed + 5)

    def __call__(self, cluster: Cluster) -> list[Decision]:
        kinds = [kind for kind in ("v100", "p100", "k80") if any(node.kind == kind for node in cluster.nodes)]
        room = {kind: sum(node.gpus for node in cluster.nodes if node.kind == kind) for kind in kinds}
        first = cluster.round_seconds / 2
        for job in cluster.jobs:
            for kind in kinds:
                ran = job.kind_seconds.get(kind, 0.0) - self.before.get((job.id, kind), 0.0)
                self.spent[job.id, kind] = self.spent.get((job.id, kind), first) + ran
                self.busy[kind] = self.busy.get(kind, 0.0) + ran
                self.before[job.id, kind] = job.kind_seconds.get(kind, 0.0)
        names = frozenset(job.id for job in cluster.jobs)
        self.must_solve |= names != self.seen
        self.seen = names
        elapsed = cluster.now - self.reset_at
        if self.must_solve and (elapsed >= RESET_SECONDS or self.reset_at == 0.0 or not self.planned):
            self._plan(cluster, kinds, room, elapsed, first)
        return lay_out(cluster, self._rank(cluster, kinds, room))

    def _plan(self, cluster: Cluster, kinds: list[str], room: dict[str, int], elapsed: float, first: float) -> None:
        for kind in kinds:
            self.busy[kind] = first * len(cluster.jobs)
            for job in cluster.jobs:
                due = self.planned.get(job.id, {}).get(kind, 0.0) * elapsed
                debt = due - (self.spent[job.id, kind] - first)
                self.debts[job.id, kind] = self.debts.get((job.id, kind), 0.0) + debt
                self.spent[job.id, kind] = first
        speeds = np.array([[speed(job, kind) for kind in kinds] for job in cluster.jobs])
        sizes = np.array([float(job.min_workers) for job in cluster.jobs])
        left = np.array([(job.remaining_seconds or 0.0) for job in cluster.jobs]) * speeds.max(axis=1)
        shares = self.shares(speeds, sizes, np.array([float(room[kind]) for kind in kinds]), left)
        self.planned = {
            job.id: dict(zip(kinds, row, strict=True)) for job, row in zip(cluster.jobs, shares, strict=True)
        }
        self.reset_at, self.must_solve = cluster.now, False

    def _rank(self, cluster: Cluster, kinds: list[str], room: dict[str, int]) -> dict[str, str]:
        """Job -> kind for this round: kind by kind, who had least of its share of it first."""
        queue = list(kinds)
        if not self.is_aware:
            self.shuffler.shuffle(queue)
        chosen: dict[str, str] = {}
        free = dict(room)
        for kind in queue:
            ranked = []
            for number, job in enumerate(cluster.jobs):
                share = self.planned.get(job.id, {}).get(kind, 0.0)
                part = self.spent[job.id, kind] / self.busy[kind] if self.busy.get(kind) else 0.0
                priority = share / part if part > 0 else share * 1e9
                priority = priority if speed(job, kind) > 0 else 0.0
                ranked.append((priority, self.debts.get((job.id, kind), 0.0), share, -number, job))
            for *_, job in sorted(ranked, key=lambda entry: entry[:4], reverse=True):
                if job.id not in chosen and speed(job, kind) > 0 and job.min_workers <= free[kind]:
                    free[kind] -= job.min_workers
                    chosen[job.id] = kind
        return {name: kind for name, kind in chosen.items() if name in self.planned}


@dataclass(slots=True)
class BlindFifo:
    """Gavel's FIFO: in the order they came, on a kind drawn by lot; nobody passes the one in front, nobody moves."""

    seed: int = 0
    kinds: dict[str, str] = field(default_factory=dict)
    lots: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.lots = random.Random(self.seed)

    def __call__(self, cluster: Cluster) -> list[Decision]:
        free = dict.fromkeys(sorted({node.kind for node in cluster.nodes}), 0)
        for node in cluster.nodes:
            free[node.kind] += node.gpus
        self.kinds = {job.id: self.kinds[job.id] for job in cluster.jobs if job.id in self.kinds}
        for job in cluster.jobs:
            if job.id in self.kinds:
                free[self.kinds[job.id]] -= job.min_workers
        for job in sorted(cluster.jobs, key=lambda job: (job.submitted_at, int(job.id.split("-")[1]))):
            if job.id in self.kinds:
                continue
            able = [kind for kind, room in free.items() if room >= job.min_workers and speed(job, kind) > 0]
            if not able:
                break
            self.kinds[job.id] = able[self.lots.randrange(len(able))]
            free[self.kinds[job.id]] -= job.min_workers
        return lay_out(cluster, dict(self.kinds))


def speed(job: Queued, kind: str) -> float:
    return job.rate(kind, job.min_workers, 1) if job.rate else 1.0


def lay_out(cluster: Cluster, chosen: dict[str, str]) -> list[Decision]:
    """Stops for who is not chosen, places for the others; who stays on its kind stays where it is."""
    kind_of = {node.name: node.kind for node in cluster.nodes}
    free = {node.name: node.gpus for node in cluster.nodes}
    stops: list[Decision] = []
    starts = []
    for job in cluster.jobs:
        if job.allocation and chosen.get(job.id) == kind_of[next(iter(job.allocation))]:
            for name, workers in job.allocation.items():
                free[name] -= workers
        elif job.id in chosen:
            starts.append(job)
        elif job.allocation:
            stops.append(Stop(job=job.id, why="not in this round"))
    places: list[Decision] = []
    for job in sorted(starts, key=lambda job: -job.min_workers):
        left, allocation = job.min_workers, {}
        for name in sorted(free, key=lambda name: -free[name]):
            workers = min(free[name], left) if kind_of[name] == chosen[job.id] else 0
            if workers:
                allocation[name] = workers
                free[name] -= workers
                left -= workers
        places.append(Place(job=job.id, allocation=allocation))
    return stops + places
