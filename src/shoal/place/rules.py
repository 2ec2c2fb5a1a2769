"""What all policies share: classes, priorities, caps, gangs, who may stop whom, who waited too long, and why.

A policy says in which order peers go. `fill` does the rest, and keeps these promises whatever the order is:

- No node is given out twice, no cap is passed, and a job runs with `min_workers` or not at all.
- A job is stopped only for one of a higher class, or of the same class and a higher priority, or for one of the
  partition whose nodes it borrowed, or for a peer if it is due: after its k-th stop it runs `quantum_seconds * 2**k`
  before a peer may stop it again, and each time at least `quantum_seconds` at a stretch. So two jobs can never stop
  each other in turns, and the number of stops grows with the logarithm of the time a job ran.
- No job waits while there is room for it, with one exception that its reason names: the room is kept for a job that
  waited longer than `keep_seconds`.
"""

import heapq
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from shoal.place.cluster import CLASSES, Cluster, Queued
from shoal.place.decision import Decision, Wait
from shoal.place.draft import Draft, Held, Use, draft_of
from shoal.place.fit import Spots, could_ever_fit, zones_of
from shoal.place.space import Need, count_in
from shoal.place.waiting import KEPT, TOO_LARGE, TOO_LARGE_AT_HOME, estimate_starts, explain_room

CLASS_RANK = {name: number for number, name in enumerate(CLASSES)}
MAX_DOUBLINGS = 24
SHARES = "shares the GPUs of job "
PIECES = 8
"""In how many pieces a job grows to its largest size: a large cluster is not handed out worker by worker."""

Tier = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How patient the rules are.

    `quantum_seconds` is how long a job runs at least before a peer may stop it, doubled with every stop; and never
    less than `stop_costs` times what stopping it costs. After `patience_seconds` of waiting a job goes before its
    peers; after `keep_seconds` room is kept for it. A running job is not grown again within `grow_seconds`.
    """

    quantum_seconds: float = 60.0
    stop_costs: float = 10.0
    patience_seconds: float = 3600.0
    keep_seconds: float = 7200.0
    grow_seconds: float = 60.0


USUAL = Rules()


def tier_of(job: Queued) -> Tier:
    """Class, then priority: whoever has the higher one may stop the others."""
    return CLASS_RANK.get(job.job_class, 0), job.priority


def is_due(job: Queued, now: float, rules: Rules) -> bool:
    """Whether a peer may stop it: it had its turn, and was not just started or changed."""
    if now - job.changed_at < rules.quantum_seconds:
        return False
    quantum = max(rules.quantum_seconds, rules.stop_costs * job.stop_seconds)
    turns: float = 2.0 ** (min(job.num_stops, MAX_DOUBLINGS) + 1) - 1
    return job.is_preemptible and job.run_seconds >= quantum * turns


def waited_seconds(job: Queued, now: float) -> float:
    """How long it has been in the queue since it was submitted or last stopped; 0 while it runs."""
    if job.allocation:
        return 0.0
    return max(now - max(job.submitted_at, job.stopped_at or job.submitted_at), 0.0)


def fill(
    cluster: Cluster,
    order: Sequence[Queued],
    *,
    rules: Rules = USUAL,
    stops_peers: bool = True,
    elsewhere: Callable[[Queued], list[frozenset[str]]] | None = None,
    pairs: "Pairs | None" = None,
) -> list[Decision]:
    """Run the jobs of `order` from its front, as far as there is room, and say of the others why they wait.

    `order` is the policy's; class and priority go before it. Running jobs keep their place unless somebody before
    them needs it. With `stops_peers`, one that stands earlier stops peers behind it; without, only after it waited
    `patience_seconds`. `elsewhere` are kinds of nodes on which a job may run when there is no room on those it names.
    `pairs` says who of those who still wait shares the GPUs of whom.
    """
    walk = walk_through(cluster, order, rules, stops_peers, elsewhere, pairs)
    walk.grow()
    return walk.decisions()


def walk_through(
    cluster: Cluster,
    order: Sequence[Queued],
    rules: Rules,
    stops_peers: bool,
    elsewhere: Callable[[Queued], list[frozenset[str]]] | None,
    pairs: "Pairs | None" = None,
    like: Draft | None = None,
) -> "Walk":
    """As `fill`, up to where all who run have what they need at least. `like` is the draft of a walk through the same
    jobs and nodes, of which not all ran where they run now."""
    walk = Walk(cluster, order, rules, stops_peers, like)
    walk.serve_owners()
    walk.serve_borrowers()
    walk.retry()
    if pairs is not None:
        walk.pair_up(pairs)
    if elsewhere is not None:
        walk.spill(elsewhere)
    return walk


Pairs = Callable[[Sequence[Queued], Mapping[str, frozenset[str]]], Iterable[tuple[str, str]]]
"""(Those who wait, those who run alone and the kinds of their nodes) -> guest and host, the best first."""


class Walk:
    """One decision being made. Short-lived; everything it knows comes from the cluster."""

    def __init__(
        self, cluster: Cluster, order: Sequence[Queued], rules: Rules, stops_peers: bool, like: Draft | None = None
    ) -> None:
        self.cluster, self.rules, self.stops_peers = cluster, rules, stops_peers
        self.draft: Draft = draft_of(cluster, like)
        starving = {job.id for job in order if waited_seconds(job, cluster.now) > rules.patience_seconds}
        self.starving = starving
        # First come, first served already has those in front who waited long.
        place = {job.id: (stops_peers and job.id not in starving) for job in order}
        self.tiers = {job.id: tier_of(job) for job in order}
        self.order = sorted(order, key=lambda job: (_down(self.tiers[job.id]), place[job.id]))
        self.rank = {job.id: number for number, job in enumerate(self.order)}
        self.reasons: dict[str, str] = {}
        self.kept_for = ""
        self.num_dropped = 0
        self.is_lending = False
        self.zones: dict[tuple[str, bool], tuple[frozenset[str], frozenset[str]]] = {}

    # -- who goes where ------------------------------------------------------------------------------------------

    def serve_owners(self) -> None:
        """Every job on the nodes of its own partition; what others borrowed there is theirs to take."""
        draft = self.draft
        for job in self.order:
            if job.id in draft.held:
                mate = draft.mate(job.id)
                if job.is_preemptible and (mate is None or draft.jobs[mate].is_preemptible):
                    draft.expose(job.id, draft.held[job.id])
                elif job.is_elastic:
                    draft.expose(job.id, draft.split(job.id, job.min_workers)[1])
        self._serve_all()

    def serve_borrowers(self) -> None:
        """Those still waiting, on what other partitions leave idle or lend to somebody who stands behind."""
        draft = self.draft
        if len(draft.partitions) < 2:
            return
        self.is_lending = True
        for job_id in list(draft.exposed):
            if not self._is_away(job_id):
                draft.protect(job_id)
        self._serve_all()

    def _serve_all(self) -> None:
        draft = self.draft
        extras: list[Queued] = []
        last_class = -1
        for tier, members in groupby(self.order, key=lambda job: self.tiers[job.id]):
            peers = list(members)
            if tier[0] != last_class:
                self._hide(extras)
                extras, last_class = [], tier[0]
            extras += [job for job in peers if job.is_elastic and job.id in draft.held]
            hungry = 0 if self.stops_peers else sum(job.id in self.starving for job in peers)
            self._settle(peers, everyone=not self.stops_peers and not hungry)
            for job in peers:
                if job.id in draft.held:
                    self._keep(job)
                    continue
                self._serve(job, self._zone(job), self.stops_peers or not hungry or job.id in self.starving)
                if hungry and job.id in self.starving:
                    hungry -= 1
                    if not hungry:
                        self._settle(peers, everyone=True)

    def _zone(self, job: Queued) -> frozenset[str]:
        return self._zones(job)[self.is_lending]

    def _zones(self, job: Queued) -> tuple[frozenset[str], frozenset[str]]:
        key = job.partition, job.is_preemptible
        found = self.zones.get(key)
        if found is None:
            found = self.zones[key] = zones_of(job, self.draft.partitions)
        return found

    def retry(self) -> None:
        """Stops free more than they were made for: once more for those who wait."""
        if self.num_dropped:
            for job in self.order:
                if job.id not in self.draft.held:
                    self._serve(job, self._zones(job)[1], may_stop=False)

    def spill(self, elsewhere: Callable[[Queued], list[frozenset[str]]]) -> None:
        """What is free goes to those who still wait, though other kinds would suit them better."""
        draft = self.draft
        known: dict[tuple[Need, frozenset[str]], Need] = {}
        for job in self.order:
            if job.id in draft.held or job.blocked_by:
                continue
            told, zone = draft.needs[job.id], self._zones(job)[1]
            for kinds in elsewhere(job):
                need = known.get((told, kinds))
                if need is None:
                    need = known[told, kinds] = replace(told, kinds=kinds)
                draft.needs[job.id] = need
                self._serve(job, zone, may_stop=False)
                if job.id in draft.held:
                    break
                is_kept_from = draft.free.barred or job.id in self.reasons
                if is_kept_from and draft.free.row(need, zone).total >= job.min_workers:
                    # There is room that it is kept from: this is what it has to be told.
                    told = need
            else:
                draft.needs[job.id] = told

    def pair_up(self, pairs: Pairs) -> None:
        """Those who still wait share the GPUs of others, as far as that was asked for."""
        draft, nodes = self.draft, self.draft.free.space.nodes
        guests = [job for job in self.order if job.id not in draft.held and not job.blocked_by and can_pair(job)]
        hosts = {
            name: frozenset(nodes[at].kind for at in held)
            for name, held in draft.held.items()
            if held and draft.mate(name) is None and can_pair(draft.jobs[name])
        }
        for guest, host in pairs(guests, hosts) if guests and hosts else ():
            if guest not in draft.held and draft.mate(host) is None:
                self._pair(draft.jobs[guest], draft.jobs[host])

    def _pair(self, guest: Queued, host: Queued) -> None:
        draft, need = self.draft, self.draft.needs[guest.id].as_guest
        if tier_of(guest) != tier_of(host) or (guest.ask.gpus, guest.partition) != (host.ask.gpus, host.partition):
            return
        if guest.min_workers != draft.num_workers(host.id) or self._over_cap(guest, guest.min_workers):
            return
        counts = draft.free.row(need, frozenset({guest.partition})).counts
        if any(counts[at] < workers for at, (workers, _) in draft.held[host.id].items()):
            return
        draft.seat_guest(guest, host.id)
        self.reasons.pop(guest.id, None)
        draft.why[guest.id] = f"{SHARES}{host.id}"

    def grow(self, but: Container[str] = ()) -> None:
        """Give what is left to those who can use more: the smallest for its weight first, in pieces."""
        draft, now = self.draft, self.cluster.now
        heap = []
        for job in self.order:
            if job.id in but:
                continue
            workers = draft.num_workers(job.id) if job.max_workers > job.min_workers else 0
            can_change = not job.allocation or (job.is_elastic and now - job.changed_at >= self.rules.grow_seconds)
            if workers and workers < job.max_workers and can_change:
                heap.append((_down(tier_of(job))[0], workers / max(job.weight, 1e-9), self.rank[job.id]))
        heapq.heapify(heap)
        while heap:
            class_rank, _, number = heapq.heappop(heap)
            job = self.order[number]
            workers = draft.num_workers(job.id)
            piece = min(-(-(job.max_workers - job.min_workers) // PIECES), job.max_workers - workers)
            gained = self._grow(job, piece)
            if gained and workers + gained < job.max_workers:
                heapq.heappush(heap, (class_rank, (workers + gained) / max(job.weight, 1e-9), number))

    # -- the steps of it -----------------------------------------------------------------------------------------

    def _settle(self, peers: Iterable[Queued], everyone: bool) -> None:
        """Peers that are not due, or everyone, are out of their peers' reach from here on."""
        for job in peers:
            if job.id in self.draft.exposed and (everyone or not is_due(job, self.cluster.now, self.rules)):
                self._keep(job)

    def _keep(self, job: Queued) -> None:
        """It stays: what it borrowed from owners, and what it has beyond its smallest size, can still be taken. Who
        shares its GPUs stays, too."""
        mate = self.draft.mate(job.id)
        for each in (job,) if mate is None else (job, self.draft.jobs[mate]):
            self._keep_one(each)

    def _keep_one(self, job: Queued) -> None:
        draft = self.draft
        shown = draft.exposed.get(job.id)
        if not shown:
            return
        if not job.is_elastic and (self.is_lending or len(draft.partitions) < 2):
            draft.protect(job.id)
            return
        extra = draft.split(job.id, job.min_workers)[1] if job.is_elastic else {}
        part: Held = {}
        for at, (workers, devices) in shown.items():
            open_workers = workers if self._is_lent(job, at) else extra.get(at, (0, ()))[0]
            stays = max(workers - open_workers, 0)
            if stays:
                part[at] = (stays, devices[: stays * (len(devices) // workers)])
        draft.protect(job.id, part)

    def _hide(self, jobs: Iterable[Queued]) -> None:
        """A class is served: what its jobs have beyond their smallest size is not for lower classes."""
        for job in jobs:
            shown = self.draft.exposed.get(job.id, {})
            self.draft.protect(job.id, {at: part for at, part in shown.items() if not self._is_lent(job, at)})

    def _is_lent(self, job: Queued, at: int) -> bool:
        """Whether its workers on that node can be taken by the owners, who are being served."""
        return not self.is_lending and self.draft.free.space.nodes[at].partition != job.partition

    def _serve(self, job: Queued, zone: frozenset[str], may_stop: bool) -> None:
        """Start it if it can be started, or note why not."""
        draft = self.draft
        reason = job.blocked_by or self._over_cap(job, job.min_workers)
        if reason:
            self.reasons[job.id] = reason
            return
        need = draft.needs[job.id]
        spots = draft.free.pick(job, need, job.min_workers, zone)
        if spots is None and may_stop and draft.exposed:
            spots = self._make_room(job, zone)
        if spots is not None:
            draft.hold(job, spots)
            self.reasons.pop(job.id, None)
            draft.why[job.id] = "others needed its nodes" if job.allocation else "start"
            return
        if not self.kept_for and waited_seconds(job, self.cluster.now) > self.rules.keep_seconds:
            self._keep_room(job, zone)

    def _make_room(self, job: Queued, zone: frozenset[str]) -> Spots | None:
        """Nodes where there is room once others have gone, with those others stopped or made smaller."""
        draft = self.draft
        need = draft.needs[job.id]
        reach = draft.reach
        if not reach.has_room(need, job.min_workers, zone):
            return None
        free_now = np.minimum(draft.free.row(need, zone).counts, job.min_workers) / job.min_workers
        spots = reach.pick(job, need, job.min_workers, zone, favour=4.0 * free_now)
        if spots is None:
            return None
        for at, workers in spots.items():
            while count_in(draft.free.space.state(at), need) < workers:
                self._take_from(self._victim(at), at, job)
        return spots

    def _victim(self, at: int) -> str:
        """Whom to take from on this node: who is beyond its smallest size first, then the last in order."""
        draft = self.draft
        here = [
            name
            for name in draft.by_node.get(at, ())
            if at in draft.exposed.get(name, {}) and name not in draft.guests
        ]
        return min(here, key=lambda name: (not self._spare(name), -self._rank(name)))

    def _rank(self, name: str) -> int:
        """How far behind in the order it is, with who shares its GPUs."""
        mate = self.draft.hosts.get(name)
        return self.rank[name] if mate is None else min(self.rank[name], self.rank[mate])

    def _spare(self, name: str) -> int:
        """How many workers it can lose and go on."""
        job = self.draft.jobs[name]
        return max(self.draft.num_workers(name) - job.min_workers, 0) if job.is_elastic else 0

    def _take_from(self, name: str, at: int, job: Queued) -> None:
        """Make it smaller if that gives something here, else stop it."""
        draft, victim = self.draft, self.draft.jobs[name]
        self.num_dropped += 1
        shown, devices = draft.exposed[name][at]
        lost = min(shown, self._spare(name))
        if lost:
            draft.drop(name, {at: (lost, devices[len(devices) - lost * (len(devices) // shown) :])})
            draft.why[name] = f"job {job.id} needs room"
            return
        if name in draft.hosts:
            guest = draft.hosts[name]
            draft.drop(guest)
            draft.why[guest] = self.reasons[guest] = f"its GPUs are for job {job.id}"
        draft.drop(name)
        if tier_of(job) > tier_of(victim):
            reason = f"{job.job_class} job {job.id} goes first"
        elif job.partition != victim.partition:
            reason = f"its nodes were lent by partition {job.partition!r}, and job {job.id} needs them"
        else:
            reason = f"it is the turn of job {job.id}"
        draft.why[name] = self.reasons[name] = reason

    def _keep_room(self, job: Queued, zone: frozenset[str]) -> None:
        """Nobody else starts on the nodes where it could run soonest, until it does."""
        draft = self.draft
        need = draft.needs[job.id]
        row, whole = draft.free.row(need, zone), draft.empty.row(need, zone).counts
        left, barred = job.min_workers, []
        # Where most is free already, so that the choice stays the same while it drains.
        for at in np.lexsort((np.arange(len(whole)), -row.counts, -np.minimum(whole, left))).tolist():
            if left <= 0:
                break
            if whole[at]:
                barred.append(at)
                left -= int(whole[at])
        if left <= 0:
            draft.free.barred = frozenset(barred)
            self.kept_for = job.id

    def _grow(self, job: Queued, more: int) -> int:
        """Give it up to so many workers; returns how many. Who is to be larger than it is gets that or none."""
        draft = self.draft
        least = max(job.min_workers - draft.num_workers(job.id), 1)
        more = max(more, least)
        while self._over_cap(job, more):
            if more == least:
                return 0
            more = max(more // 2, least)
        home, lent = self._zones(job)
        need = draft.needs[job.id]
        here = np.zeros(len(draft.free.space.nodes))
        here[list(draft.held[job.id])] = 8.0
        for zone in (home, lent):
            count = min(more, draft.free.most(need, zone))
            spots = draft.free.pick(job, need, count, zone, favour=here) if count >= least else None
            if spots:
                draft.hold(job, spots)
                if job.allocation and draft.num_workers(job.id) > job.num_workers:
                    draft.why[job.id] = "there is room"
                return count
        return 0

    def _is_away(self, job_id: str) -> bool:
        home, nodes = self.draft.jobs[job_id].partition, self.draft.free.space.nodes
        return any(nodes[at].partition != home for at in self.draft.held.get(job_id, {}))

    def _over_cap(self, job: Queued, more: int) -> str:
        """Which cap so many more workers would pass, in words; empty if none."""
        draft = self.draft
        rules = draft.partitions[job.partition]
        if job.job_class not in rules.classes:
            return f"partition {rules.name!r} takes no {job.job_class} jobs"
        cap = rules.max_workers_per_job
        if cap is not None and draft.num_workers(job.id) + more > cap:
            return f"partition {rules.name!r} allows a job {cap} workers"
        quota = self.cluster.quotas.get(job.owner)
        if quota is not None and draft.in_use.get(job.owner, 0) + more > quota:
            return f"{job.owner} may use no more workers at once"
        cap = rules.max_workers_per_user
        if cap is None and rules.max_user_share >= 1.0:
            return ""
        use = draft.uses.get((job.partition, job.owner), Use())
        if cap is not None and use.workers + more > cap:
            allowed = f"the {cap} workers that {rules.name!r} allows a person"
            return f"{job.owner or 'its owner'} has {use.workers} of {allowed}"
        if rules.max_user_share < 1.0:
            need = draft.needs[job.id]
            cores, gpus = draft.totals.get(job.partition, (0, 0))
            part = max(
                (use.cores + more * need.cores) / max(cores, 1),
                (use.gpus + more * need.gpu) / max(gpus, 1) if need.gpu else 0.0,
            )
            if part > rules.max_user_share + 1e-9:
                share = f"{rules.max_user_share:.0%} of {rules.name!r}"
                return f"{job.owner or 'its owner'} would have more than {share}, the most for one person"
        return ""

    # -- what is told ------------------------------------------------------------------------------------------

    def decisions(self) -> list[Decision]:
        return self.draft.decisions() + self.waits()

    def waits(self) -> list[Decision]:
        """A true reason, the position and, where it can be told, the time for everyone who waits."""
        draft = self.draft
        waiting = [job for job in self.order if job.id not in draft.held and not job.allocation]
        starts = estimate_starts(draft, [job for job in waiting if not job.blocked_by])
        decisions: list[Decision] = []
        position = 0
        shared: dict[object, str] = {}
        for job in waiting:
            position += not job.blocked_by
            decisions.append(
                Wait(
                    job=job.id,
                    why=self.reasons.get(job.id) or self._room_reason(job, shared),
                    position=0 if job.blocked_by else position,
                    eta_seconds=starts.get(job.id),
                )
            )
        return decisions

    def _room_reason(self, job: Queued, shared: dict[object, str]) -> str:
        draft = self.draft
        key = (draft.needs[job.id], job.min_workers, job.partition, job.is_preemptible)
        if key not in shared:
            never = None if self._fits_alone(job) else could_ever_fit(self.cluster, job)
            home, lent = self._zones(job)
            reason = explain_room(draft, job, lent, self.kept_for)
            if never is not None and not reason.startswith(KEPT):
                where = TOO_LARGE if home == lent else TOO_LARGE_AT_HOME
                reason = f"{where}: {never.message}"
            shared[key] = reason
        return shared[key]

    def _fits_alone(self, job: Queued) -> bool:
        """Whether it would fit into its partition as it is now, were nothing running."""
        need, zone = self.draft.needs[job.id], frozenset({job.partition})
        return self.draft.empty.row(need, zone).total >= job.min_workers


def can_pair(job: Queued) -> bool:
    """Whether it can share its GPUs: whole ones, always as many, and whoever shares them may be stopped with it."""
    is_rigid = job.min_workers == job.max_workers and not job.is_elastic
    return job.pair_rate is not None and is_rigid and job.ask.gpus >= 1.0 and job.is_preemptible


def _down(tier: Tier) -> Tier:
    return -tier[0], -tier[1]
