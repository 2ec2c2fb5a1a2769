"""The peers of Pollux's paper as policies of our simulator: Tiresias, and Optimus with an oracle's step times.

Written from their papers' rules and the order in which the authors' simulator goes through jobs and nodes, so that
they give the published numbers to the second. Unlike ours they keep state from one decision to the next.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shoal.place.cluster import Cluster, Node
from shoal.place.decision import Decision, Place, Stop
from shoal.place.traces.pollux import PolluxWork

DEMOTED_SECONDS = 16 * 3600.0


def emptiest_first(sizes: Mapping[str, int], kept: Mapping[str, Mapping[str, int]], nodes: Sequence[Node]) -> dict:
    """Those that are kept stay; the others, in this order, take from the node with most free GPUs, and so on."""
    free = {node.name: node.gpus for node in nodes}
    for allocation in kept.values():
        for name, workers in allocation.items():
            free[name] -= workers
    allocations = {name: dict(allocation) for name, allocation in kept.items()}
    for job, size in sizes.items():
        if job in allocations or not size:
            continue
        left, found = size, {}
        while left:
            name = max(free, key=lambda name: free[name])
            found[name] = min(free[name], left)
            free[name] -= found[name]
            left -= found[name]
        allocations[job] = found
    return allocations


def decisions_of(cluster: Cluster, allocations: Mapping[str, Mapping[str, int]]) -> list[Decision]:
    decisions: list[Decision] = []
    for job in cluster.jobs:
        wanted = allocations.get(job.id, {})
        if wanted and dict(wanted) != dict(job.allocation):
            decisions.append(Place(job=job.id, allocation=wanted))
        elif not wanted and job.allocation:
            decisions.append(Stop(job=job.id, why="others go first"))
    return decisions


@dataclass
class Tiresias:
    """Two queues, first come first served: a job whose GPU time passes 16 hours goes to the end of the second."""

    fresh: list[str] = field(default_factory=list)
    demoted: list[str] = field(default_factory=list)
    ran: dict[str, float] = field(default_factory=dict)
    checked_at: float = 0.0

    def __call__(self, cluster: Cluster) -> list[Decision]:
        jobs = {job.id: job for job in cluster.jobs}
        self.fresh = [name for name in self.fresh if name in jobs]
        self.demoted = [name for name in self.demoted if name in jobs]
        known = {*self.fresh, *self.demoted}
        self.fresh += [name for name in jobs if name not in known]
        for name, job in jobs.items():
            if job.allocation:
                self.ran[name] = self.ran.get(name, 0.0) + cluster.now - self.checked_at
                if name in self.fresh and self.ran[name] * job.max_workers >= DEMOTED_SECONDS:
                    self.fresh.remove(name)
                    self.demoted.append(name)
        self.checked_at = cluster.now
        left = sum(node.gpus for node in cluster.nodes)
        sizes = {}
        for name in self.fresh + self.demoted:
            if jobs[name].max_workers <= left:
                sizes[name] = jobs[name].max_workers
                left -= sizes[name]
        kept = {name: job.allocation for name, job in jobs.items() if job.allocation and name in sizes}
        return decisions_of(cluster, emptiest_first(sizes, kept, cluster.nodes))


@dataclass
class Optimus:
    """Everyone gets one GPU, then always who gains most time from one more, by its true step times and epochs."""

    works: Mapping[str, PolluxWork]

    def __call__(self, cluster: Cluster) -> list[Decision]:
        left = sum(node.gpus for node in cluster.nodes)
        sizes: dict[str, int] = {}
        gains: dict[str, float] = {}
        for job in cluster.jobs:
            sizes[job.id], gains[job.id] = int(left > 0), 0.0
            if left > 0:
                left -= 1
                gains[job.id] = self.gain(job.id, 1) if left else 0.0
        while left > 0 and gains and max(gains.values()) > 0:
            name = max(gains, key=lambda name: gains[name])
            sizes[name] += 1
            gains[name] = self.gain(name, sizes[name])
            left -= 1
        kept = {job.id: job.allocation for job in cluster.jobs if job.allocation and sizes[job.id] == job.num_workers}
        order = dict(sorted(sizes.items(), key=lambda item: item[1]))
        return decisions_of(cluster, emptiest_first(order, kept, cluster.nodes))

    def gain(self, name: str, workers: int) -> float:
        """Seconds that one worker more saves over the rest of the job."""
        work = self.works[name]
        app, batch = work.application, work.batch
        most = 1 if app.name == "ncf" else batch // app.smallest_micro
        if workers + 1 > most:
            return 0.0
        last = app.num_epochs - 1
        left = 1.0 if last <= work.epoch else app.iterations(batch, last) - app.iterations(batch, work.epoch)
        return (self.step_seconds(work, workers) - self.step_seconds(work, workers + 1)) * left

    def step_seconds(self, work: PolluxWork, workers: int) -> float:
        app = work.application
        placement = (4,) * (workers // 4) + ((workers % 4,) if workers % 4 else ())
        each = math.ceil(work.batch / workers - 1e-8)
        again = math.ceil(each / app.largest_micro - 1e-8) - 1
        if workers == 1:
            again = max(1, again)
        micro = math.ceil(each / (again + 1) - 1e-8)
        micro = min(micro, int(app.largest_batch / (workers * (again + 1))))
        step, sync = app.step_seconds(placement, micro)
        return step + (step - sync) * again
