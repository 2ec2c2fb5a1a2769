"""Finish-time fair: everyone is slowed down alike by sharing, and the whole is done as early as it can be."""

import math

from shoal.place.cluster import Cluster, Queued
from shoal.place.decision import Decision
from shoal.place.kinds import Sorts, fill_kinds, outlook
from shoal.place.rules import Rules
from shoal.place.waiting import seconds_left

FINISH_RULES = Rules(patience_seconds=math.inf)
"""Waiting raises a job's slowdown and so its place: no patience is needed on top."""

GUESS_SECONDS = 900.0
"""What a job of unknown length is said to need, until it has run for longer: then as much again as it ran."""

LENGTH_POWER = 0.9
"""Below one, jobs twice as long may be slowed down a little less than alike: they are the ones that end last."""

RUNNING_BONUS = 1.1
"""How much further behind a waiting job must be, to go before a running one: turns for nothing cost restarts."""

LAST_PART = 0.95
"""A job that needs so much of the time until all could be done goes first: later it would be what all wait for."""

SHARED_PART = 0.7
"""A job shares its GPUs where it would still be done in so much of that time."""


def finish_fair(cluster: Cluster, rules: Rules = FINISH_RULES) -> list[Decision]:
    """Who is furthest behind goes first: slowdown is time since it was submitted, with what is left, by what it needs
    alone. Before them, jobs so long that the end of all would wait for them. Once nothing came for as long as all
    that is here still takes, those who would be late on other kinds have the kinds that suit them.

    Uses `remaining_seconds` (or time limits). Of unknown length: said to need as long again as it ran.
    """
    left = {job.id: _left(job) for job in cluster.jobs}
    sorts = Sorts(cluster.nodes)
    end, lengths = outlook(cluster, left, sorts)
    hurried = {job.id for job in cluster.jobs if lengths[job.id] >= LAST_PART * end}

    def key(job: Queued) -> tuple[bool, float, float, str]:
        need = left[job.id]
        alone = max(_done(sorts, job) + need, 1.0)
        behind = (cluster.now - job.submitted_at + need) / alone**LENGTH_POWER
        bonus = RUNNING_BONUS if job.allocation else 1.0
        return job.id not in hurried, -behind * bonus * max(job.weight, 1e-9), job.submitted_at, job.id

    order = sorted(cluster.jobs, key=key)
    # What nothing was added to for long is thought to stay so for as long again. Then the end of all is what counts.
    quiet = cluster.now - max((job.submitted_at for job in cluster.jobs), default=cluster.now)
    return fill_kinds(cluster, order, rules=rules, sorts=sorts, within=end if quiet >= end else math.inf)


def _left(job: Queued) -> float:
    known = seconds_left(job)
    return max(job.run_seconds, GUESS_SECONDS) if known is None else known


def _done(sorts: Sorts, job: Queued) -> float:
    """How long it would have taken for what it did on the nodes that suit it best."""
    if job.rate is None or not job.kind_seconds:
        return job.run_seconds
    speeds = sorts.speeds_of(job)
    return sum(seconds * speeds.get(kind, 1.0) for kind, seconds in job.kind_seconds.items())
