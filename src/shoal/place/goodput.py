"""The goodput policy: who is closest to its end goes first, and elastic jobs have the sizes that pay.

Classes, priorities, caps, gangs and stops are those of all policies (`rules.Walk`). What is its own: elastic jobs
are made larger, smaller or moved as `sizing` says, before the others are served.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import numpy as np

from shoal.place.cluster import Cluster, Queued
from shoal.place.decision import Decision
from shoal.place.draft import Draft, Held
from shoal.place.kinds import fill_kinds
from shoal.place.rules import Rules, Walk, tier_of
from shoal.place.sizing import USUAL_TUNING, Member, Tuning, admit, choose_sizes, is_known, member_of, weigh
from shoal.place.space import Need
from shoal.place.waiting import seconds_left

GOODPUT_RULES = Rules()

Queue = dict[tuple[str, int, Need], int]
"""How many workers wait in each partition and class, for each need: as few as their jobs start with."""


def most_goodput(cluster: Cluster, rules: Rules = GOODPUT_RULES, tuning: Tuning = USUAL_TUNING) -> list[Decision]:
    """Elastic jobs get the workers that they make most of, those who are soon done first; the others as in `las`.

    A job is soon done if little is left of it; where nobody knows that, if it got little so far.
    """
    kinds = {node.kind for node in cluster.nodes}
    cluster = replace(cluster, jobs=tuple(_where_able(job, kinds) for job in cluster.jobs))
    order = sorted(cluster.jobs, key=lambda job: (_expected_left(job, tuning), job.submitted_at, job.id))
    if not any(job.is_elastic for job in order):
        return fill_kinds(cluster, order, rules=rules)
    walk = Walk(cluster, order, rules, stops_peers=True)
    shaped: set[str] = set()
    queue = _queue(walk)
    for members in _groups(walk):
        shaped |= _shape(walk, members, queue, tuning)
    walk.serve_owners()
    walk.serve_borrowers()
    walk.retry()
    walk.grow(but=shaped)
    return walk.draft.decisions() + walk.waits()


def _where_able(job: Queued, kinds: Collection[str]) -> Queued:
    """The job with the kinds of nodes on which it gets anything done, where that is not all of them."""
    if job.rate is None or len(kinds) < 2:
        return job
    able = frozenset(kind for kind in job.ask.kinds or kinds if job.rate(kind, 1, 1) > 0.0)
    return job.having(ask=job.ask.on(able)) if 0 < len(able) < len(kinds) else job


def _expected_left(job: Queued, tuning: Tuning) -> float:
    left = seconds_left(job)
    if left is not None:
        return left * max(job.max_workers, 1)
    return tuning.lindy * job.service_seconds + tuning.fresh_seconds


def _groups(walk: Walk) -> Iterator[list[Queued]]:
    """Jobs that can be given each other's workers: of one tier, partition and ask; the highest tier first."""
    draft, nodes = walk.draft, walk.draft.free.space.nodes
    groups: dict[object, list[Queued]] = {}
    for job in walk.order:
        if not job.is_elastic or not job.is_preemptible or job.blocked_by:
            continue
        # What lost nodes, or is made smaller as asked, has changed enough for one decision.
        if job.allocation and (job.rate is None or draft.num_workers(job.id) != job.num_workers):
            continue
        if job.job_class not in draft.partitions[job.partition].classes:
            continue
        held = draft.held.get(job.id, ())
        if any(nodes[at].is_draining or nodes[at].partition != job.partition for at in held):
            continue
        groups.setdefault((tier_of(job), job.partition, draft.needs[job.id]), []).append(job)
    yield from groups.values()


def _shape(walk: Walk, jobs: Sequence[Queued], queue: Queue, tuning: Tuning) -> set[str]:
    """Give these jobs their sizes in the draft; returns who they are."""
    draft = walk.draft
    first = jobs[0]
    zone, need = frozenset({first.partition}), draft.needs[first.id]
    row = draft.free.row(need, zone)
    per_node, kind = _usual_node(draft, need, zone)
    if not per_node:
        return set()
    room = int(row.counts.sum()) + sum(draft.num_workers(job.id) for job in jobs if job.allocation)
    room = max(room - _reserved(draft, jobs, queue), 0)
    cap = draft.partitions[first.partition].max_workers_per_job
    able = [job for job in jobs if cap is None or job.min_workers <= cap]
    # Those who run have their smallest size for sure; then come the others, as the order has them.
    able.sort(key=lambda job: not job.allocation)
    budgets = _budgets(walk, able)
    members = []
    for job in admit(able, room, budgets):
        largest = max(min(job.max_workers, cap or job.max_workers), job.min_workers)
        members.append(member_of(job, largest, per_node, kind, tuning))
    members = weigh(members, room, is_known(jobs), tuning)
    _apply(walk, members, choose_sizes(members, room, budgets), zone)
    return {job.id for job in able}


def _usual_node(draft: Draft, need: Need, zone: frozenset[str]) -> tuple[int, str]:
    """How many such workers an empty node of the largest sort takes, and its kind."""
    counts = draft.empty.row(need, zone).counts
    at = int(counts.argmax()) if len(counts) else 0
    return (int(counts[at]), draft.empty.space.nodes[at].kind) if len(counts) else (0, "")


def _queue(walk: Walk) -> Queue:
    queue: Queue = {}
    for job in walk.order:
        if not job.allocation and not job.blocked_by:
            key = job.partition, tier_of(job)[0], walk.draft.needs[job.id]
            queue[key] = queue.get(key, 0) + job.min_workers
    return queue


def _reserved(draft: Draft, jobs: Sequence[Queued], queue: Queue) -> int:
    """Workers' worth of room that waiting jobs of other sorts will take: those of the same class or a higher one."""
    first = jobs[0]
    need, own = draft.needs[first.id], tier_of(first)[0]
    # In GPUs, or in cores where none are asked for.
    total = -sum(job.min_workers for job in jobs if not job.allocation) * (need.gpu or need.cores)
    for (partition, rank, other), workers in queue.items():
        if partition == first.partition and rank >= own:
            total += workers * (other.gpu if need.gpu else other.cores)
    return -(-total // (need.gpu or max(need.cores, 1)))


def _budgets(walk: Walk, jobs: Sequence[Queued]) -> dict[str, int]:
    """How many workers each owner may have in all, less what others of their jobs have."""
    draft = walk.draft
    if not jobs:
        return {}
    first = jobs[0]
    rules, need = draft.partitions[first.partition], draft.needs[first.id]
    quotas = draft.cluster.quotas
    if rules.max_workers_per_user is None and rules.max_user_share >= 1.0 and not quotas:
        return {}
    own: dict[str, int] = {}
    for job in jobs:
        own[job.owner] = own.get(job.owner, 0) + job.num_workers
    cores, gpus = draft.totals.get(first.partition, (0, 0))
    budgets = {}
    for owner, has in own.items():
        use = draft.uses.get((first.partition, owner))
        limits = [10**9]
        if owner in quotas:
            limits.append(quotas[owner] - (draft.in_use.get(owner, 0) - has))
        if rules.max_workers_per_user is not None:
            limits.append(rules.max_workers_per_user - ((use.workers if use else 0) - has))
        if rules.max_user_share < 1.0:
            for total, used, each in (
                (cores, use.cores if use else 0, need.cores),
                (gpus, use.gpus if use else 0, need.gpu),
            ):
                if each:
                    limits.append(int((rules.max_user_share * total - (used - has * each)) // each))
        budgets[owner] = max(min(limits), 0)
    return budgets


def _apply(walk: Walk, members: Sequence[Member], sizes: dict[str, int], zone: frozenset[str]) -> None:
    """First everyone who changes lets go, then the largest are placed first, where whole nodes are still free."""
    draft = walk.draft
    changed = [member for member in members if sizes[member.job.id] != member.has]
    homes: dict[str, Held] = {}
    for member in changed:
        if member.has:
            homes[member.job.id] = dict(draft.held[member.job.id])
            draft.drop(member.job.id)
    changed.sort(key=lambda member: -sizes[member.job.id])
    for member in changed:
        job, size = member.job, sizes[member.job.id]
        need = draft.needs[job.id]
        favour = None
        if member.has:
            favour = np.zeros(len(draft.free.space.nodes))
            favour[list(homes[job.id])] = 0.5
        spots = draft.free.pick(job, need, size, zone, favour=favour)
        if spots is None:
            continue
        draft.hold(job, spots, homes.get(job.id))
        for at in spots:
            names = draft.by_node.setdefault(at, [])
            if job.id not in names:
                names.append(job.id)
        if member.has:
            draft.why[job.id] = "most comes of it"
        else:
            draft.why[job.id] = "start"
