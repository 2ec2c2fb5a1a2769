"""In which order jobs go: a policy is a function from what is to what is to be done; `fill_kinds` does the rest."""

import functools
import gc
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shoal.place.cluster import Cluster, Queued
from shoal.place.decision import Decision
from shoal.place.finish import finish_fair
from shoal.place.goodput import most_goodput
from shoal.place.kinds import fill_kinds
from shoal.place.rules import USUAL, Rules, tier_of
from shoal.place.waiting import seconds_left

Policy = Callable[[Cluster], list[Decision]]

GPU_HOURS = 3600.0
LAS_THRESHOLDS = (16 * GPU_HOURS,)
"""Where Tiresias splits its queues, in worker-seconds."""


FIFO_RULES = Rules(patience_seconds=600.0, keep_seconds=1800.0)


def first_come(cluster: Cluster, rules: Rules = FIFO_RULES) -> list[Decision]:
    """In the order they came; later ones fill gaps, and give them back to one that has waited `patience_seconds`."""
    order = sorted(cluster.jobs, key=lambda job: (job.submitted_at, job.id))
    return fill_kinds(cluster, order, rules=rules, stops_peers=False)


def shortest_first(cluster: Cluster, rules: Rules = USUAL) -> list[Decision]:
    """The shortest that waits goes next; none is stopped for it. Of unknown length means last."""
    return fill_kinds(cluster, sorted(cluster.jobs, key=_by_length), rules=rules, stops_peers=False)


def shortest_remaining_first(cluster: Cluster, rules: Rules = USUAL) -> list[Decision]:
    """Run the jobs closest to done; stop those that would make them wait."""
    return fill_kinds(cluster, sorted(cluster.jobs, key=_by_length), rules=rules)


def least_attained_first(
    cluster: Cluster, rules: Rules = USUAL, thresholds: Sequence[float] = LAS_THRESHOLDS
) -> list[Decision]:
    """Those who got least go first, in queues split at `thresholds` worker-seconds; in each the narrow, as they came.

    Needs to know nothing about jobs: what runs long sinks, so short jobs pass. Of two that got alike, the one that
    asks for less has less to do, for all that is known.
    """

    def key(job: Queued) -> tuple[int, float, float, str]:
        queue = sum(job.service_seconds >= threshold for threshold in thresholds)
        return queue, job.min_workers * job.ask.size, job.submitted_at, job.id

    return fill_kinds(cluster, sorted(cluster.jobs, key=key), rules=rules)


def weighted_fair(cluster: Cluster, rules: Rules = USUAL) -> list[Decision]:
    """Every account gets its part, by weight, level by level: labs share the cluster, people share their lab's part.

    What an account does not use goes to the others and comes back when it wants it: those above their part are
    stopped for those below, when they are due.
    """
    return fill_kinds(cluster, fair_order(cluster), rules=rules)


def _at_once(policy: Policy) -> Policy:
    """The same, with nobody looking for garbage before it is done: all that it makes is needed until then."""

    @functools.wraps(policy)
    def decide(cluster: Cluster) -> list[Decision]:
        is_collecting = gc.isenabled()
        gc.disable()
        try:
            return policy(cluster)
        finally:
            if is_collecting:
                gc.enable()

    return decide


_POLICIES: dict[str, Policy] = {
    "fifo": first_come,
    "sjf": shortest_first,
    "srtf": shortest_remaining_first,
    "las": least_attained_first,
    "fair": weighted_fair,
    "finish": finish_fair,
    "goodput": most_goodput,
}
POLICIES = {name: _at_once(policy) for name, policy in _POLICIES.items()}


def _by_length(job: Queued) -> tuple[float, float, str]:
    left = seconds_left(job)
    return (float("inf") if left is None else left), job.submitted_at, job.id


@dataclass(slots=True)
class _Account:
    """One level of the tree of accounts: jobs of its own, and accounts below it."""

    weight: float = 1.0
    used: float = 0.0
    jobs: list[Queued] = field(default_factory=list)
    below: dict[str, "_Account"] = field(default_factory=dict)
    heap: list[tuple[float, str]] = field(default_factory=list)

    @property
    def debt(self) -> float:
        return self.used / max(self.weight, 1e-9)


def fair_order(cluster: Cluster) -> list[Queued]:
    """The order in which an empty cluster would be filled: always the account next that has least for its weight.

    Running jobs stand first in their account, so that equals do not take turns for nothing. What accounts used lately
    counts as much as one round of it at once.
    """
    demand = max(sum(job.num_workers for job in cluster.jobs), 1)
    recent = max(sum(used for name, used in cluster.usage.items() if "/" not in name), 1e-9)
    root = _Account()
    for job in sorted(cluster.jobs, key=lambda job: (not job.allocation, job.submitted_at, job.id)):
        account, path = root, ""
        for part in (job.account or job.owner or "nobody").split("/"):
            path = f"{path}/{part}" if path else part
            if part not in account.below:
                lately = cluster.usage.get(path, 0.0) / recent * demand
                account.below[part] = _Account(weight=cluster.shares.get(path, 1.0), used=lately)
            account = account.below[part]
        account.jobs.append(job)
    order: list[Queued] = []
    _prepare(root)
    while (found := _next(root)) is not None:
        order.append(found[0])
    return order


def _prepare(account: _Account) -> None:
    account.jobs.sort(key=lambda job: (tuple(-part for part in tier_of(job)), not job.allocation))
    account.jobs.reverse()
    for child in account.below.values():
        _prepare(child)
    account.heap = [(child.debt, name) for name, child in account.below.items()]
    heapq.heapify(account.heap)


def _next(account: _Account) -> tuple[Queued, float] | None:
    """The next job of this account or of one below, and its size, charged to all on the way."""
    if account.jobs:
        job = account.jobs.pop()
        size = _size(job)
        account.used += size
        return job, size
    while account.heap:
        _, name = heapq.heappop(account.heap)
        child = account.below[name]
        found = _next(child)
        if found is not None:
            account.used += found[1]
            heapq.heappush(account.heap, (child.debt, name))
            return found
    return None


def _size(job: Queued) -> float:
    """What it weighs in the shares: its workers, by the GPUs each has where it has more than one."""
    return max(job.num_workers, job.min_workers) * job.ask.size / max(job.weight, 1e-9)
