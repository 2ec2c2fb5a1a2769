"""Which kind of node each job goes to, where kinds differ: those who gain most from the fast ones get them.

A policy says in which order jobs go. Who is in front runs; where, is decided by what each would lose elsewhere, so
that the jobs that run get the most done together: one that is twice as fast on a V100 leaves it to one that is ten
times as fast there.
"""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shoal.place.cluster import Ask, Cluster, Node, Queued, Rate, guests_of
from shoal.place.decision import Decision, Place
from shoal.place.draft import Draft
from shoal.place.rules import SHARES, USUAL, Pairs, Rules, fill, is_due, tier_of, waited_seconds, walk_through
from shoal.place.space import Space, need_of
from shoal.place.waiting import seconds_left

Floats = NDArray[np.float64]

MOVE_GAIN = 1.1
"""A running job moves to another kind only where it is so much faster, if stopping it costs anything."""

LEAST_GAIN = 0.2
"""Two jobs share GPUs where, together, they get so much more done than the one that has them does alone."""

SLOWED = 0.95
"""Who keeps so much of its speed is not slowed down."""

SLOWEST = 0.01
"""No kind counts as slower than that, as a part of the fastest."""

BACKLOG = 1.5
"""From so many times what has room on, each kind first takes the jobs that are best off there; with less waiting, it
is better to keep everyone running."""

LATE = 2.0
"""More than anybody's loss of speed: who would be late elsewhere chooses first."""

NUM_PRICES = 60
MAX_TRIES = 3


def fill_kinds(
    cluster: Cluster,
    order: Sequence[Queued],
    *,
    rules: Rules = USUAL,
    stops_peers: bool = True,
    sorts: "Sorts | None" = None,
    within: float = math.inf,
) -> list[Decision]:
    """As `fill`, on the kinds of nodes where the jobs of `order` get the most done together.

    Where all nodes are alike or nobody knows rates it is `fill`. Running jobs move to a better kind when they are due
    and have not just been moved. Needs `Queued.rate`, and nothing of how long jobs are.

    Who would not be done `within` so many seconds elsewhere chooses before the others.

    Jobs that may share their GPUs do where that gains. A guest looks for GPUs of its own, or for a better host, as
    often as others move.
    """
    shares = any(job.pair_rate is not None for job in order)
    is_mixed = len({node.kind for node in cluster.nodes}) > 1 and any(job.rate is not None for job in order)
    if not is_mixed and not shares:
        return fill(cluster, order, rules=rules, stops_peers=stops_peers)
    sorts = sorts or Sorts(cluster.nodes)
    guests = guests_of(cluster.jobs)
    leaving = {job.id for job in order if job.id in guests and can_move(cluster, job, rules) and sorts.kind_now(job)}
    alone = [job for job in order if job.id not in guests or job.id in leaving]
    kinds: dict[str, str] = {}
    if is_mixed:
        kinds = choose_kinds(cluster, alone, rules=rules, stops_peers=stops_peers, sorts=sorts, within=within)
        leaving &= kinds.keys()
    pairs = pairs_by_gain(cluster, sorts, within) if shares else None
    # Who has a kind goes before who has none: else those who are left out would hold what others were given.
    order = sorted(order, key=lambda job: job.id not in kinds)
    here = {job.id: sorts.kind_now(job) for job in order if job.allocation}
    asked = {job.id: job for job in order}
    elsewhere = functools.cache(lambda name: sorts.elsewhere(asked[name]))
    views = {job.id: _bound(sorts, job, kinds.get(job.id, "")) if is_mixed else job for job in order}
    stay: set[str] = set()
    like: Draft | None = None
    nowhere = {"allocation": {}, "devices": {}, "stopped_at": cluster.now}
    for attempt in range(MAX_TRIES + 1):
        # Whose nodes are all gone is on no kind: it does not move, it starts anew.
        moving = {name for name, now in here.items() if now and kinds.get(name, now) != now} | leaving
        moving -= stay
        if attempt == MAX_TRIES:
            moving = set()
        seen = [view.having(**nowhere) if name in moving else view for name, view in views.items()]
        shown = replace(cluster, jobs=tuple(seen))
        find = (lambda job: elsewhere(job.id)) if is_mixed else None
        walk = walk_through(shown, seen, rules, stops_peers, find, pairs, like)
        # Who was to move and found no room keeps its place, and all is looked at again.
        lost = {name for name in moving if name not in walk.draft.held}
        if not lost:
            break
        stay |= lost
        like = walk.draft
    walk.grow()
    told = [_told(item, asked[item.job], sorts) if item.job in moving else item for item in walk.decisions()]
    return [item for item in told if item is not None]


def _told(item: Decision, job: Queued, sorts: "Sorts") -> Decision | None:
    """What becomes of a running job that looked for other nodes; None: it is where it was."""
    if not isinstance(item, Place):
        return item
    if item.allocation == job.allocation and item.devices == job.devices:
        return None
    if item.why.startswith(SHARES):
        return item
    before, after = sorts.kind_now(job), sorts.kind_now(job.having(allocation=item.allocation))
    if before == after:
        return replace(item, why="GPUs of its own are free")
    return replace(item, why=f"moved from {before} to {after} nodes: it gains most there")


class Sorts:
    """What kinds of nodes there are, looked up once for all jobs; lives as long as one decision."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        nodes = tuple(nodes)
        self.kind_of = {node.name: node.kind for node in nodes}
        self.kinds = sorted(set(self.kind_of.values()))
        self.spaces = {
            name: Space([node for node in nodes if node.partition == name]) for name in {n.partition for n in nodes}
        }
        self.tables = {name: space.table() for name, space in self.spaces.items()}
        self.known: dict[tuple[Ask, str, int], frozenset[str]] = {}
        self.speeds: dict[tuple[str, int], dict[str, float]] = {}
        self.bound: dict[tuple[Ask, str], Ask] = {}
        self.alike: dict[tuple[str, frozenset[str]], dict[str, float]] = {}
        self.widths: dict[str, dict[str, tuple[int, int]]] = {}
        """Partition -> kind -> GPUs and cores of its largest node."""
        for node in nodes:
            kinds = self.widths.setdefault(node.partition, {})
            gpus, cores = kinds.get(node.kind, (0, 0))
            kinds[node.kind] = max(gpus, node.gpus), max(cores, int(node.cores))

    def kind_now(self, job: Queued) -> str:
        """The kind of nodes it runs on; the one with most of its workers where there are several."""
        if len(job.allocation) == 1:
            ((name, workers),) = job.allocation.items()
            return self.kind_of.get(name, "") if workers else ""
        kinds: dict[str, int] = {}
        for name, workers in job.allocation.items():
            if workers and name in self.kind_of:
                kinds[self.kind_of[name]] = kinds.get(self.kind_of[name], 0) + workers
        return max(kinds, key=lambda kind: (kinds[kind], kind), default="")

    def on(self, ask: Ask, kind: str) -> Ask:
        """The same on nodes of this kind."""
        key = ask, kind
        found = self.bound.get(key)
        if found is None:
            found = self.bound[key] = ask.on(frozenset({kind}))
        return found

    def alone(self, job: Queued) -> frozenset[str]:
        """Kinds of its partition on which all its workers would fit together, were nothing else running."""
        key = (job.ask, job.partition, job.min_workers)
        if key not in self.known:
            space = self.spaces.get(job.partition)
            found = set()
            if space is not None:
                table = self.tables[job.partition]
                counts = table.counts(need_of(job.ask), slice(None))
                rooms = np.bincount(table.kind, counts, len(space.kinds))
                found = {kind for kind, room in zip(space.kinds, rooms, strict=True) if room >= job.min_workers}
            self.known[key] = frozenset(kind for kind in found if not job.ask.kinds or kind in job.ask.kinds)
        return self.known[key]

    def elsewhere(self, job: Queued) -> list[frozenset[str]]:
        """Where else it may run if there is no room on the kind that suits it: one kind after the other, the fastest
        first; all of them together if it has one worker, or if none alone has room for all of its workers."""
        rates = {
            kind: 1.0 if job.rate is None else job.rate(kind, job.min_workers, 1)
            for kind in self.kinds
            if not job.ask.kinds or kind in job.ask.kinds
        }
        able = sorted((kind for kind, rate in rates.items() if rate > 0), key=lambda kind: -rates[kind])
        if job.max_workers == 1 or not self.alone(job):
            return [frozenset(able)] if able else []
        return [frozenset({kind}) for kind in able]

    def speeds_of(self, job: Queued) -> dict[str, float]:
        """How fast it is on each kind it may use in its partition, as a part of the fastest; 1 where nobody knows."""
        if job.rate is None:
            key = job.partition, job.ask.kinds
            alike = self.alike.get(key)
            if alike is None:
                alike = self.alike[key] = dict.fromkeys(self._able(job), 1.0)
            return alike
        workers = max(job.num_workers, job.min_workers)
        found = self.speeds.get((job.id, workers))
        if found is None:
            found = self.speeds[job.id, workers] = self._speeds(job, job.rate, workers)
        return found

    def _able(self, job: Queued) -> list[str]:
        return [kind for kind in self.widths.get(job.partition, {}) if not job.ask.kinds or kind in job.ask.kinds]

    def _speeds(self, job: Queued, rate: Rate, workers: int) -> dict[str, float]:
        here = self.widths.get(job.partition, {})
        per_worker = max(job.ask.gpus or job.ask.cores, 1e-9)
        rates = {}
        for kind in self._able(job):
            width = here[kind][0 if job.ask.gpus else 1]
            rates[kind] = rate(kind, workers, max(-(-workers // max(int(width / per_worker), 1)), 1))
        top = max(rates.values(), default=0.0)
        return {kind: rate / top if top > 0 else 0.0 for kind, rate in rates.items()}


def can_move(cluster: Cluster, job: Queued, rules: Rules) -> bool:
    """Whether a running job may be taken to other nodes now."""
    pause = max(rules.quantum_seconds, rules.stop_costs * job.stop_seconds)
    return job.is_preemptible and cluster.now - job.changed_at >= pause


def _bound(sorts: Sorts, job: Queued, kind: str) -> Queued:
    """The job as `fill` shall see it: bound to its kind.

    Who was left out runs where it runs, or may start on any kind; several workers of one job stay on one kind, if
    there is one that has room for all.
    """
    if kind:
        return job.having(ask=sorts.on(job.ask, kind))
    speeds = sorts.speeds_of(job)
    able = {name for name, speed in speeds.items() if speed > 0}
    if job.allocation or not able:
        able &= {sorts.kind_now(job)}
    elif job.max_workers > 1 and able & sorts.alone(job):
        able = {max(able & sorts.alone(job), key=lambda name: (speeds[name], name))}
    return job.having(ask=job.ask.on(frozenset(able))) if able else job


def pairs_by_gain(cluster: Cluster, sorts: Sorts, within: float = math.inf) -> Pairs:
    """The pairs that gain most first. What a job gets done counts what it would cost where it costs least, so that
    GPUs which others need more are not spent on it."""

    def choose(guests: Sequence[Queued], hosts: Mapping[str, frozenset[str]]) -> Iterable[tuple[str, str]]:
        jobs = {job.id: job for job in cluster.jobs}
        # As they were asked for: what a policy is shown here is bound to kinds.
        able = [jobs[name] for name in (*(guest.id for guest in guests), *hosts)]
        costs, speeds = costs_of(cluster, sorts), {job.id: sorts.speeds_of(job) for job in able}
        work = dict(zip((job.id for job in able), _work(able).tolist(), strict=True))
        by_size: dict[int, list[Queued]] = {}
        for guest in guests:
            by_size.setdefault(guest.min_workers, []).append(guest)
        found: list[tuple[float, str, str]] = []
        for host_id, kinds in hosts.items():
            host, kind = jobs[host_id], min(kinds)
            fast = speeds[host_id].get(kind, 0.0)
            alone = costs.get(host_id, 0.0) * fast
            for guest in by_size.get(host.min_workers, ()) if len(kinds) == 1 else ():
                parts = guest.pair_rate(host, kind) if guest.pair_rate is not None else None
                if parts is None:
                    continue
                mine, theirs = parts
                speed = speeds[guest.id].get(kind, 0.0)
                gain = costs.get(guest.id, 0.0) * speed * mine - alone * (1.0 - theirs)
                is_late = mine < SLOWED and work[guest.id] > within * speed * mine
                is_late |= theirs < SLOWED and work[host_id] > within * fast * theirs
                if gain > LEAST_GAIN * alone and not is_late:
                    found.append((-gain, guest.id, host_id))
        return [(guest, host) for _, guest, host in sorted(found)]

    return choose


def costs_of(cluster: Cluster, sorts: Sorts) -> dict[str, float]:
    """What a second of each job on the kind that suits it best costs where it costs least, at prices that keep all
    kinds busy for equally long."""
    found: dict[str, float] = {}
    for jobs, room in _pools(cluster, cluster.jobs):
        kinds = list(room)
        speeds = np.array([[sorts.speeds_of(job).get(kind, 0.0) for kind in kinds] for job in jobs])
        sizes = np.array([_size(job) for job in jobs])
        able = speeds.max(axis=1, initial=0.0) > 0
        if not able.any():
            continue
        prices = balance(speeds[able], sizes[able], _work(jobs)[able], np.array(list(room.values())))
        with np.errstate(divide="ignore"):
            costs = np.exp((prices - np.log(speeds[able])).min(axis=1)) * sizes[able]
        found.update(zip((job.id for job, can in zip(jobs, able, strict=True) if can), costs.tolist(), strict=True))
    return found


# -- who goes where ------------------------------------------------------------------------------------------------


def choose_kinds(
    cluster: Cluster,
    order: Sequence[Queued],
    *,
    rules: Rules = USUAL,
    stops_peers: bool = True,
    sorts: Sorts | None = None,
    within: float = math.inf,
) -> dict[str, str]:
    """Job -> kind for those who can run, in `order`, class and priority before it. Others are left out."""
    ranked = sorted(order, key=lambda job: (_down(job), stops_peers and not _is_starving(cluster, job, rules)))
    chosen: dict[str, str] = {}
    sorts = sorts or Sorts(cluster.nodes)
    for jobs, room in _pools(cluster, ranked):
        chosen.update(_Pool(cluster, sorts, jobs, room).share_out(rules, stops_peers, within))
    return chosen


def outlook(cluster: Cluster, left: Mapping[str, float], sorts: Sorts) -> tuple[float, dict[str, float]]:
    """Seconds until all could be done, were everyone on the kind where it costs least; and how long each takes there.

    `left` is how long each job would still take on the kind that suits it best.
    """
    end, lengths = 0.0, dict(left)
    for jobs, room in _pools(cluster, cluster.jobs):
        kinds = list(room)
        known = [sorts.speeds_of(job) for job in jobs]
        speeds = np.array([[each.get(kind, 0.0) for kind in kinds] for each in known])
        sizes, work = np.array([_size(job) for job in jobs]), np.array([left[job.id] for job in jobs])
        amounts = np.array([room[kind] for kind in kinds])
        able = speeds.max(axis=1, initial=0.0) > 0
        if not able.any():
            continue
        prices = balance(speeds[able], sizes[able], work[able], amounts)
        with np.errstate(divide="ignore"):
            choice = (prices - np.log(speeds[able])).argmin(axis=1)
        taken = work[able] / speeds[able][np.arange(len(choice)), choice]
        end = max(
            end, float((np.bincount(choice, taken * sizes[able], len(kinds)) / amounts).max()), work[able].max()
        )
        lengths.update(zip((job.id for job, can in zip(jobs, able, strict=True) if can), taken.tolist(), strict=True))
    return end, lengths


def _pools(cluster: Cluster, jobs: Iterable[Queued]) -> list[tuple[list[Queued], dict[str, float]]]:
    """Jobs of one partition that want the same resource, with how much of it each kind has."""
    found: dict[tuple[str, bool], list[Queued]] = {}
    for job in jobs:
        if not job.blocked_by:
            found.setdefault((job.partition, job.ask.gpus > 0), []).append(job)
    pools = []
    for (partition, has_gpus), members in found.items():
        room: dict[str, float] = {}
        for node in cluster.nodes:
            amount = float(node.gpus if has_gpus else node.cores)
            if amount > 0 and node.partition == partition and not node.is_draining:
                room[node.kind] = room.get(node.kind, 0.0) + amount
        if room:
            pools.append((members, dict(sorted(room.items()))))
    return pools


@dataclass(slots=True)
class _Pool:
    """Jobs of one partition that want the same resource, and how much of it each kind has."""

    cluster: Cluster
    sorts: Sorts
    jobs: list[Queued]
    room: dict[str, float]

    def share_out(self, rules: Rules, stops_peers: bool, within: float) -> dict[str, str]:
        kinds = list(self.room)
        room = np.array([self.room[kind] for kind in kinds])
        placed: dict[str, str] = {}
        free: list[Queued] = []
        here: dict[str, str] = {}
        for job in self.jobs:
            kind = here[job.id] = self.sorts.kind_now(job) if job.allocation else ""
            if kind and not can_move(self.cluster, job, rules):
                placed[job.id] = kind
                if kind in self.room:  # else it is on a borrowed node, of a kind that its partition does not have
                    room[kinds.index(kind)] -= _size(job)
            else:
                free.append(job)
        # Who may not be stopped runs whatever the order is; where, is open.
        now = self.cluster.now
        free.sort(key=lambda job: not (job.allocation and not (stops_peers and is_due(job, now, rules))))
        speeds = np.array([self._row(job, kinds, here[job.id]) for job in free]).reshape(len(free), len(kinds))
        sizes = np.array([_size(job) for job in free])
        picks = pick_kinds(speeds, sizes, _work(free), room, within)
        placed.update({job.id: kinds[at] for job, at in zip(free, picks, strict=True) if at >= 0})
        return placed

    def _row(self, job: Queued, kinds: Sequence[str], now: str) -> list[float]:
        alone, speeds = self.sorts.alone(job), self.sorts.speeds_of(job)
        row = [speeds.get(kind, 0.0) if kind in alone else 0.0 for kind in kinds]
        if now in kinds and job.stop_seconds > 0:
            row[kinds.index(now)] *= MOVE_GAIN
        return row


def pick_kinds(speeds: Floats, sizes: Floats, work: Floats, room: Floats, within: float = math.inf) -> list[int]:
    """The number of a kind for each job, -1 without room. Jobs are the rows of `speeds`; the first goes first."""
    able = speeds.max(axis=1, initial=0.0) > 0
    room = np.maximum(room, 0.0)
    picks = np.full(len(sizes), -1)
    if sizes[able].sum() >= BACKLOG * room.sum() and able.any():
        costs = np.where(speeds > 0, np.log(np.maximum(speeds, 1e-12)), -np.inf)
        liked = np.argsort(balance(speeds[able], sizes[able], work[able], room) - costs, axis=1, kind="stable")
        for at in np.flatnonzero(able).tolist():
            _take(picks, at, liked[at, :1], speeds, sizes, room)
    else:
        late = work[:, None] / np.maximum(speeds, SLOWEST) > within
        share_out(picks, np.flatnonzero(able), speeds, sizes, late, room)
        liked = np.argsort(-speeds, axis=1, kind="stable")
    for at in np.flatnonzero(able & (picks < 0)).tolist():
        _take(picks, at, liked[at], speeds, sizes, room)
    return [int(pick) for pick in picks]


def share_out(
    picks: NDArray[np.int64],
    order: NDArray[np.int64],
    speeds: Floats,
    sizes: Floats,
    late: NDArray[np.bool_],
    room: Floats,
) -> None:
    """Those in front who have room together, each on the kind where they lose least in sum: who has most to lose by
    the second best, for its size, chooses first, and before all others who would be `late` there."""
    total = float(room.sum())
    todo: list[int] = []
    for at in order.tolist():
        if sizes[at] <= total:
            todo.append(at)
            total -= float(sizes[at])
    chosen: set[int] = set()
    while todo := [at for at in todo if at not in chosen]:
        rows = np.array(todo)
        fits = np.where(room[None, :] >= sizes[rows, None], speeds[rows], 0.0)
        best = fits.argmax(axis=1)
        ranked = np.sort(fits, axis=1)
        second = ranked[:, -2] if fits.shape[1] > 1 else 0.0
        regret = (ranked[:, -1] - second) / sizes[rows]
        # Who would be late on the second best goes before all who would not.
        if fits.shape[1] > 1:
            regret += np.where(late[rows, fits.argsort(axis=1)[:, -2]], LATE, 0.0)
        todo = [at for at, value in zip(todo, ranked[:, -1].tolist(), strict=True) if value > 0]
        widest = float(sizes[rows].max())
        for number in np.argsort(-regret, kind="stable").tolist():
            at, kind = int(rows[number]), int(best[number])
            if ranked[number, -1] <= 0:
                continue
            room[kind] -= sizes[at]
            picks[at] = kind
            chosen.add(at)
            if room[kind] < widest:
                # Somebody's second best may have changed.
                break


def balance(speeds: Floats, sizes: Floats, work: Floats, room: Floats) -> Floats:
    """Logarithms of prices for the kinds such that, when each job goes where it costs least, all kinds are busy for
    equally long."""
    amounts = np.where(speeds > 0, (sizes * np.maximum(work, 1.0))[:, None] / np.maximum(speeds, 1e-12), np.inf)
    rows, logs = np.arange(len(sizes)), np.log(amounts)
    prices = np.log(speeds.mean(axis=0) + 1e-9)
    best, longest, step = prices, np.inf, 0.5
    for _ in range(NUM_PRICES):
        choice = (logs + prices).argmin(axis=1)
        busy = np.bincount(choice, amounts[rows, choice], len(room)) / np.maximum(room, 1e-9)
        if busy.max() < longest:
            best, longest = prices, float(busy.max())
        mean = max(float(busy.sum()) / len(busy), 1e-9)
        prices = prices + step * np.minimum((busy - mean) / mean, 1.0)
        step *= 0.93
    return np.asarray(best)


def _take(
    picks: NDArray[np.int64], at: int, liked: NDArray[np.int64], speeds: Floats, sizes: Floats, room: Floats
) -> None:
    for kind in liked.tolist():
        if speeds[at, kind] > 0 and room[kind] >= sizes[at]:
            room[kind] -= sizes[at]
            picks[at] = kind
            return


def _work(jobs: Sequence[Queued]) -> Floats:
    """Seconds that are left of each; what is usual where nobody knows."""
    left = [seconds_left(job) for job in jobs]
    known = [length for length in left if length is not None]
    usual = sum(known) / len(known) if known else 1.0
    return np.array([usual if length is None else max(length, 1.0) for length in left])


def _size(job: Queued) -> float:
    return max(job.num_workers, job.min_workers) * (job.ask.gpus or job.ask.cores or 1.0)


def _down(job: Queued) -> tuple[int, int]:
    tier = tier_of(job)
    return -tier[0], -tier[1]


def _is_starving(cluster: Cluster, job: Queued, rules: Rules) -> bool:
    return waited_seconds(job, cluster.now) > rules.patience_seconds
