"""Memory that running jobs reserved and never used: who gives how much back, for one that waits. Pure."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from shoal.place.cluster import Cluster, Node, Partition, Queued
from shoal.place.decision import Decision, Lower, Stop, Wait
from shoal.place.fit import zones_of
from shoal.place.rules import USUAL, is_due, tier_of
from shoal.place.waiting import waits_for_memory
from shoal.spec.amounts import gib

IDLE_PART = 0.5
"""Whoever could do with less than this part of what they reserved is asked."""

MARGIN, SPARE_BYTES = 1.5, 256 << 20
"""What a worker keeps: so many times the most it has used, and this much beside it."""

LONG_SECONDS = 300.0
"""What a job uses is not known before it has trained for so long."""

MAX_TRIES = 3

Policy = Callable[[Cluster], list[Decision]]


def reclaim(
    cluster: Cluster, decisions: Sequence[Decision], peaks: Mapping[str, int], policy: Policy
) -> tuple[Sequence[Decision], list[Lower]]:
    """The decisions, or those with which a job starts on memory that others do not use; and who gives it.

    Elastic jobs that do not go before it are made smaller for it by the policy already. This is about memory that
    lies idle: `peaks` is the most that one worker of a job has used, in bytes, for those that may be asked. They must
    not go before the one that waits, may be stopped, and have run long enough for a peer to stop them. Where giving
    would not start that job nothing is given: the policy itself is asked, so no cap, kind or partition is passed.
    While anything else changes, nobody is asked.
    """
    if any(not isinstance(decision, Wait) for decision in decisions):
        return decisions, []
    views = {job.id: job for job in cluster.jobs}
    waiting = [each for each in decisions if isinstance(each, Wait) and each.position and waits_for_memory(each)]
    for wait in sorted(waiting, key=lambda wait: wait.position)[:MAX_TRIES]:
        job = views[wait.job]
        keeps = {each.id: keep for each in cluster.jobs if (keep := _keeps(cluster, each, job, peaks))}
        givers = _choose(cluster, job, keeps)
        if not givers:
            continue
        found = policy(replace(cluster, jobs=tuple(_with(each, givers, keeps) for each in cluster.jobs)))
        changes = [decision for decision in found if not isinstance(decision, Wait)]
        is_for_nothing = any(isinstance(each, Stop) or views[each.job].allocation for each in changes)
        if job.id in {each.job for each in changes} and not is_for_nothing:
            return found, [_lower(views[name], keeps[name], peaks[name], job) for name in givers]
    return decisions, []


def _lower(giver: Queued, keep: int, peak: int, job: Queued) -> Lower:
    used, had, left = map(gib, (peak, giver.ask.memory_bytes, keep))
    why = f"a worker of it uses {used} of {had}, and goes on with {left}: job {job.id} waits for memory"
    return Lower(job=giver.id, memory_bytes=keep, why=why)


def _with(job: Queued, givers: Sequence[str], keeps: Mapping[str, int]) -> Queued:
    return job.having(ask=replace(job.ask, memory_bytes=keeps[job.id])) if job.id in givers else job


def _keeps(cluster: Cluster, giver: Queued, job: Queued, peaks: Mapping[str, int]) -> int:
    """What memory its workers would keep, in whole MiB; 0 where it is not to be asked."""
    if not giver.allocation or giver.id not in peaks or not is_due(giver, cluster.now, USUAL):
        return 0
    if tier_of(giver) > tier_of(job) or cluster.now - giver.changed_at < LONG_SECONDS:
        return 0
    keep = (int(peaks[giver.id] * MARGIN) >> 20 << 20) + SPARE_BYTES
    return keep if keep <= giver.ask.memory_bytes * IDLE_PART else 0


def _choose(cluster: Cluster, job: Queued, keeps: Mapping[str, int]) -> list[str]:
    """As few as have enough together, who has most to give first; none where all of them have not enough."""
    names = {node.partition for node in cluster.nodes}
    zone = zones_of(job, {name: cluster.partitions.get(name, Partition(name=name)) for name in names})[1]
    able = [
        node
        for node in cluster.nodes
        if not node.is_draining and node.partition in zone and (not job.ask.kinds or node.kind in job.ask.kinds)
    ]
    able_names = {node.name for node in able}

    def gives(giver: Queued) -> int:
        here = sum(workers for name, workers in giver.allocation.items() if name in able_names)
        return here * (giver.ask.memory_bytes - keeps[giver.id])

    def is_enough(givers: Iterable[str]) -> bool:
        chosen = set(givers)
        jobs = [_with(each, list(chosen), keeps) for each in cluster.jobs]
        return sum(_room(node, job, jobs) for node in able) >= job.min_workers

    able_givers = [each for each in cluster.jobs if each.id in keeps and gives(each)]
    ranked = [each.id for each in sorted(able_givers, key=lambda each: (-gives(each), each.id))]
    if is_enough([]) or not is_enough(ranked):
        return []
    count = next(count for count in range(1, len(ranked) + 1) if is_enough(ranked[:count]))
    found = ranked[:count]
    for name in ranked[: count - 1]:
        rest = [other for other in found if other != name]
        if is_enough(rest):
            found = rest
    return found


def _room(node: Node, job: Queued, jobs: Sequence[Queued]) -> int:
    """How many workers of a job have room on a node beside those jobs. Of GPUs only their sum is looked at here."""
    free = [node.cores, float(node.memory_bytes), float(node.disk_bytes), float(node.gpus)]
    for other in jobs:
        workers = other.allocation.get(node.name, 0)
        if workers:
            free = [have - workers * each for have, each in zip(free, _parts(other), strict=True)]
    counts = [int((have + 1e-6) // each) for have, each in zip(free, _parts(job), strict=True) if each]
    return max(min(counts, default=job.min_workers), 0)


def _parts(job: Queued) -> list[float]:
    ask = job.ask
    return [ask.cores, float(ask.memory_bytes), float(ask.disk_bytes), ask.gpus]
