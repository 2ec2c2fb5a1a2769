"""The cluster as it would be: policies place and stop in a draft, and what differs from now are the decisions."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.place.cluster import Ask, Cluster, Partition, Queued, guests_of
from shoal.place.decision import Decision, Place, Stop
from shoal.place.fit import Finder, Spots
from shoal.place.mix import mix_of
from shoal.place.space import MILLI, Need, Space, need_of

Held = dict[int, tuple[int, tuple[int, ...]]]
"""Number of a node -> workers there, and their GPUs one after the other."""


@dataclass(slots=True)
class Use:
    """What a person has in a partition."""

    workers: int = 0
    cores: int = 0
    gpus: int = 0


@dataclass(slots=True)
class Draft:
    """Who would hold what. `empty` are the nodes with nothing on them, `free` is what nobody has; `reach` adds what
    may be taken away for the job at hand, and is made when somebody first needs it. `adopted` is what jobs held
    before anything was decided, as far as that is what they were said to have.

    `uses` are what each person has in a partition, and `in_use` their workers in all of them.

    `exposed` says, job by job, what of it is in `reach` only. `why` are the reasons for changes, job by job.

    Two jobs can share the same GPUs: the host holds them, its guest only what it needs besides. `guests` are
    guest -> host, `hosts` the other way.
    """

    cluster: Cluster
    empty: Finder
    free: Finder
    jobs: Mapping[str, Queued]
    needs: dict[str, Need]
    partitions: Mapping[str, Partition]
    held: dict[str, Held] = field(default_factory=dict)
    exposed: dict[str, Held] = field(default_factory=dict)
    by_node: dict[int, list[str]] = field(default_factory=dict)
    uses: dict[tuple[str, str], Use] = field(default_factory=dict)
    in_use: dict[str, int] = field(default_factory=dict)
    totals: dict[str, tuple[int, int]] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    adopted: dict[str, Held] = field(default_factory=dict)
    guests: dict[str, str] = field(default_factory=dict)
    hosts: dict[str, str] = field(default_factory=dict)
    reached: Finder | None = None

    @property
    def reach(self) -> Finder:
        if self.reached is None:
            space = self.free.space.copy()
            for name, shown in self.exposed.items():
                for at, (workers, devices) in shown.items():
                    space.give_back(at, self.taken(name), workers, devices)
            self.reached = self.free.over(space)
            self.reached.barred = self.free.barred
        return self.reached

    def taken(self, job_id: str) -> Need:
        """What each of its workers takes from its node."""
        need = self.needs[job_id]
        return need.as_guest if job_id in self.guests else need

    def mate(self, job_id: str) -> str | None:
        """Who is on the same GPUs."""
        return self.guests.get(job_id) or self.hosts.get(job_id)

    def seat_guest(self, guest: Queued, host_id: str) -> None:
        """Let it share the GPUs of a job that holds some. There must be room for what it needs besides."""
        self.guests[guest.id], self.hosts[host_id] = host_id, guest.id
        self.held[guest.id] = dict(self.held[host_id])
        need = self.taken(guest.id)
        for at, (workers, devices) in self.held[guest.id].items():
            self.free.space.take(at, need, workers, devices)
            if self.reached is not None:
                self.reached.space.take(at, need, workers, devices)
        self._count(guest, self.num_workers(guest.id))

    def hold(self, job: Queued, spots: Spots, had: Held | None = None) -> None:
        """Give the job these workers as well, on the GPUs they `had` as far as they are free. There must be room."""
        need, space = self.needs[job.id], self.free.space
        held = self.held.setdefault(job.id, {})
        for at, workers in spots.items():
            devices = space.pick_devices(at, need, workers, had[at][1] if had and at in had else ())
            self._seat(held, at, workers, devices)
            space.take(at, need, workers, devices)
            if self.reached is not None:
                self.reached.space.take(at, need, workers, devices)
        self._count(job, sum(spots.values()))

    def adopt(self, job: Queued) -> None:
        """Take over what a running job has, before anything is decided. Nodes that are gone are left out."""
        need, space = self.needs[job.id], self.free.space
        held: Held = {}
        is_as_told = True
        for name, workers in job.allocation.items():
            at = space.index.get(name)
            if at is None or workers <= 0:
                is_as_told = False
                continue
            told = job.devices.get(name, ())
            devices = tuple(told)
            is_known = len(devices) == workers * (need.whole or (1 if need.share else 0))
            if not is_known or max(devices, default=-1) >= space.num_gpus[at]:
                devices = space.pick_devices(at, need, workers)
            is_as_told &= devices is told
            held[at] = (workers, devices)
            space.take(at, need, workers, devices)
            self.by_node.setdefault(at, []).append(job.id)
        self.held[job.id] = held
        if is_as_told:
            self.adopted[job.id] = dict(held)
        self._count(job, sum([workers for workers, _ in held.values()]))

    def expose(self, job_id: str, part: Held) -> None:
        """From here on, this part of a job may be taken away."""
        if self.reached is None and job_id not in self.exposed:
            self.exposed[job_id] = dict(part)
            return
        shown = self.exposed.setdefault(job_id, {})
        for at, (workers, devices) in part.items():
            if self.reached is not None:
                self.reached.space.give_back(at, self.taken(job_id), workers, devices)
            self._seat(shown, at, workers, devices)

    def protect(self, job_id: str, part: Held | None = None) -> None:
        """From here on, this part of a job stays; without `part`, all of it."""
        shown = self.exposed.get(job_id)
        if not shown:
            return
        if self.reached is None and (part is None or part == shown):
            del self.exposed[job_id]
            return
        part = dict(shown) if part is None else part
        for at, (workers, devices) in part.items():
            if at in shown:
                if self.reached is not None:
                    self.reached.space.take(at, self.taken(job_id), workers, devices)
                self._unseat(shown, at, workers, devices)
        if not shown:
            del self.exposed[job_id]

    def drop(self, job_id: str, part: Held | None = None) -> None:
        """Take this part of a job away; without `part`, all of it. A guest goes before its host does."""
        held, need = self.held[job_id], self.taken(job_id)
        part = dict(held) if part is None else part
        shown = self.exposed.get(job_id, {})
        for at, (workers, devices) in part.items():
            self.free.space.give_back(at, need, workers, devices)
            if at in shown:
                both = min(workers, shown[at][0])
                width = len(devices) // workers
                common = devices[len(devices) - both * width :]
                self._unseat(shown, at, both, common)
                rest, rest_devices = workers - both, devices[: len(devices) - both * width]
            else:
                rest, rest_devices = workers, devices
            if rest and self.reached is not None:
                self.reached.space.give_back(at, need, rest, rest_devices)
            self._unseat(held, at, workers, devices)
        if not shown:
            self.exposed.pop(job_id, None)
        if not held:
            del self.held[job_id]
            host = self.guests.pop(job_id, None)
            if host is not None:
                del self.hosts[host]
        self._count(self.jobs[job_id], -sum(workers for workers, _ in part.values()))

    def num_workers(self, job_id: str) -> int:
        return sum([workers for workers, _ in self.held.get(job_id, {}).values()])

    def split(self, job_id: str, keep: int) -> tuple[Held, Held]:
        """A job's workers in two parts: `keep` of them, on the nodes where most are, and the others."""
        kept: Held = {}
        rest: Held = {}
        for at, (workers, devices) in sorted(self.held[job_id].items(), key=lambda spot: (-spot[1][0], spot[0])):
            stay = min(keep, workers)
            cut = stay * (len(devices) // workers)
            keep -= stay
            if stay:
                kept[at] = (stay, devices[:cut])
            if workers > stay:
                rest[at] = (workers - stay, devices[cut:])
        return kept, rest

    def decisions(self) -> list[Decision]:
        """What differs from now: stops first, so that their nodes are free for the others."""
        nodes = self.free.space.nodes
        stops: list[Decision] = []
        places: list[Decision] = []
        for job in self.jobs.values():
            held = self.held.get(job.id)
            if not held:
                if job.allocation:
                    stops.append(Stop(job=job.id, why=self.why.get(job.id, "its nodes are gone")))
                continue
            if held == self.adopted.get(job.id) and len(job.devices) in (0, len(held)):
                continue
            allocation = {nodes[at].name: workers for at, (workers, _) in held.items()}
            devices = {nodes[at].name: devices for at, (_, devices) in held.items() if devices}
            if allocation != job.allocation or (job.devices and devices != job.devices):
                why = self._why(job, sum(allocation.values()))
                places.append(Place(job=job.id, allocation=allocation, devices=devices, why=why))
        return stops + places

    def _why(self, job: Queued, after: int) -> str:
        """What changes for a job, and for what reason: what took something from it, else what it gains by."""
        cause, before = self.why.get(job.id, ""), job.num_workers
        if not before:
            return cause
        return f"moved: {cause}" if before == after else f"{before} to {after} workers: {cause}"

    def _seat(self, held: Held, at: int, workers: int, devices: tuple[int, ...]) -> None:
        before = held.get(at, (0, ()))
        held[at] = (before[0] + workers, before[1] + devices)

    def _unseat(self, held: Held, at: int, workers: int, devices: tuple[int, ...]) -> None:
        before, had = held[at]
        if before == workers:
            del held[at]
            return
        left = list(had)
        for device in reversed(devices):
            # From the end: the last workers are the ones that go.
            place = len(left) - 1 - left[::-1].index(device)
            del left[place]
        held[at] = (before - workers, tuple(left))

    def _count(self, job: Queued, workers: int) -> None:
        need = self.needs[job.id]
        use = self.uses.setdefault((job.partition, job.owner), Use())
        use.workers += workers
        use.cores += workers * need.cores
        use.gpus += workers * need.gpu
        self.in_use[job.owner] = self.in_use.get(job.owner, 0) + workers


def draft_of(cluster: Cluster, like: Draft | None = None) -> Draft:
    """The cluster as it is now, nothing exposed.

    One that is `like` it is of the same nodes, and of the same jobs with the same asks: what is known of those holds.
    """
    asks: dict[Ask, tuple[Need, list[int]]] = {}
    needs: dict[str, Need] = {}
    for job in cluster.jobs:
        known = asks.get(job.ask)
        if known is None:
            known = asks[job.ask] = need_of(job.ask), []
        needs[job.id] = known[0]
        known[1].append(job.min_workers)
    if like is None:
        counts: dict[Need, int] = {}
        for need, workers in asks.values():
            counts[need] = counts.get(need, 0) + sum(workers)
        space = Space(cluster.nodes)
        empty = Finder(space, mix_of(counts, cluster.nodes, space.kinds), cluster.links)
    else:
        empty = like.empty
    free = empty.over(empty.space.copy())
    names = {node.partition for node in cluster.nodes} | {job.partition for job in cluster.jobs}
    partitions = {name: cluster.partitions.get(name, Partition(name=name)) for name in sorted(names)}
    draft = Draft(
        cluster=cluster,
        empty=empty,
        free=free,
        jobs={job.id: job for job in cluster.jobs},
        needs=needs,
        partitions=partitions,
    )
    for node in cluster.nodes:
        cores, gpus = draft.totals.get(node.partition, (0, 0))
        draft.totals[node.partition] = (cores + int(node.cores * MILLI), gpus + node.gpus * MILLI)
    guests = guests_of(cluster.jobs)
    for job in cluster.jobs:
        if job.allocation and job.id not in guests:
            draft.adopt(job)
            _mend(draft, job)
    for job_id, host_id in guests.items():
        job = draft.jobs[job_id]
        if draft.held[host_id]:
            for at in draft.held[host_id]:
                draft.by_node[at].append(job_id)
            draft.seat_guest(job, host_id)
        else:
            # It was on the same nodes, which are gone.
            draft.held[job_id], draft.why[job_id] = {}, draft.why[host_id]
    return draft


def _mend(draft: Draft, job: Queued) -> None:
    """What a job has left where nodes are gone, or where it was asked to be smaller: a whole gang, or nothing.

    With nothing left it is stopped, and starts anew at the next decision.
    """
    has = draft.num_workers(job.id)
    if has < job.num_workers:
        draft.why[job.id] = "some of its nodes are gone"
        if has < job.min_workers or not job.is_elastic:
            draft.why[job.id] = "its nodes are gone"
            draft.drop(job.id)
            draft.held[job.id] = {}
    elif job.is_elastic and has > job.max_workers:
        draft.drop(job.id, draft.split(job.id, job.max_workers)[1])
        draft.why[job.id] = "more are not asked for, or not allowed"
