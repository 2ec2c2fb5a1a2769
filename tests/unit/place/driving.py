"""A small cluster to which random things happen, and what must be true of every decision about it.

It counts by itself, in plain Python: what the policies count with arrays is checked, not repeated.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from shoal.place.cluster import CLASSES, Ask, Cluster, Node, Partition, Queued, guests_of
from shoal.place.decision import Decision, Place, Stop, Wait
from shoal.place.policies import Policy

QUANTUM = 60.0
KEEP = 1800.0
GIB = 2**30

KEPT = "room is kept for job "


@dataclass
class Drive:
    """The state that events and decisions change."""

    policy: Policy
    seed: int
    is_mild: bool = False
    """Mild: no caps, one partition, so that every property of order can be checked."""
    is_shared: bool = False
    """Jobs want whole GPUs, and most of them may share them."""
    num_pairs: int = 0
    dice: random.Random = field(init=False)
    now: float = 0.0
    nodes: dict[str, Node] = field(default_factory=dict)
    all_nodes: dict[str, Node] = field(default_factory=dict)
    partitions: dict[str, Partition] = field(default_factory=dict)
    jobs: dict[str, Queued] = field(default_factory=dict)
    work: dict[str, float] = field(default_factory=dict)
    peer_stops: dict[str, int] = field(default_factory=dict)
    count: int = 0

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        pick = self.dice
        names = ["default"] if self.is_mild else ["default", "gpu", "private"]
        for number in range(pick.randint(2, 7)):
            gpus = pick.choice((0, 1, 2, 4, 8))
            node = Node(
                name=f"n{number}",
                kind=pick.choice(("a", "b")),
                cores=float(pick.choice((4, 8, 16, 6.5))),
                memory_bytes=pick.choice((8, 16, 64)) * GIB,
                gpus=gpus,
                disk_bytes=100 * GIB,
                partition=pick.choice(names),
                holds=frozenset(pick.sample(("m1", "m2", "d1"), pick.randint(0, 2))),
            )
            self.nodes[node.name] = node
        self.all_nodes = dict(self.nodes)
        if not self.is_mild:
            self.partitions = {
                "default": Partition(name="default", max_workers_per_user=pick.choice((None, 6))),
                "gpu": Partition(name="gpu", max_user_share=pick.choice((1.0, 0.5)), max_workers_per_job=4),
                "private": Partition(name="private", lends=pick.random() < 0.5, classes=frozenset(CLASSES[:3])),
            }

    # -- what happens --------------------------------------------------------------------------------------------

    def event(self) -> None:
        """One random thing: mostly a job comes, time passes or a job ends."""
        what = self.dice.random()
        if what < 0.45 and len(self.jobs) < 40:
            self.submit()
        elif what < 0.80:
            self.pass_time(self.dice.choice((1.0, 20.0, 60.0, 300.0, 3000.0)))
        elif what < 0.84 and self.jobs:
            self.jobs.pop(self.dice.choice(sorted(self.jobs)))
        elif what < 0.88:
            self.lose_or_join()
        elif what < 0.91:
            self.resize()
        elif what < 0.93:
            self.change_quotas()
        elif what < 0.95:
            name = self.dice.choice(sorted(self.nodes))
            self.nodes[name] = replace(self.nodes[name], is_draining=not self.nodes[name].is_draining)
        elif what < 0.98 and self.jobs:
            job = self.jobs[self.dice.choice(sorted(self.jobs))]
            if not job.allocation:
                self.jobs[job.id] = replace(job, blocked_by="" if job.blocked_by else "held")
        elif self.jobs:
            job = self.jobs[self.dice.choice(sorted(self.jobs))]
            self.jobs[job.id] = replace(job, priority=self.dice.randint(0, 2))

    def lose_or_join(self) -> None:
        """A node is gone, with what ran there; or one that was gone is back."""
        gone = sorted(set(self.all_nodes) - set(self.nodes))
        if gone and (len(self.nodes) < 2 or self.dice.random() < 0.6):
            name = self.dice.choice(gone)
            self.nodes[name] = self.all_nodes[name]
        elif len(self.nodes) > 1:
            del self.nodes[self.dice.choice(sorted(self.nodes))]

    def resize(self) -> None:
        """Somebody asks for other sizes: of a waiting job any, of a running one the largest, down to the smallest."""
        if not self.jobs:
            return
        job = self.jobs[self.dice.choice(sorted(self.jobs))]
        if not job.allocation:
            smallest = self.dice.choice((1, 2, 4))
            self.jobs[job.id] = replace(job, min_workers=smallest, max_workers=smallest * self.dice.choice((1, 2)))
        elif job.is_elastic:
            self.jobs[job.id] = replace(job, max_workers=self.dice.randint(job.min_workers, 2 * job.max_workers))

    def change_quotas(self) -> None:
        for name, rules in self.partitions.items():
            self.partitions[name] = replace(
                rules,
                lends=self.dice.random() < 0.5,
                max_workers_per_user=self.dice.choice((None, 3, 8)),
                max_workers_per_job=self.dice.choice((None, 2, 4)),
                max_user_share=self.dice.choice((1.0, 0.5)),
            )

    def submit(self) -> None:
        pick = self.dice
        self.count += 1
        smallest = pick.choice((1, 1, 1, 2, 4))
        length = pick.expovariate(1 / pick.choice((60.0, 600.0, 6000.0)))
        job = Queued(
            id=f"j{self.count}",
            ask=Ask(
                cores=pick.choice((0.5, 1.0, 2.0, 4.0)),
                memory_bytes=pick.choice((0, 1, 4)) * GIB,
                gpus=pick.choice((0.0, 0.0, 0.25, 0.3, 0.5, 1.0, 1.0, 2.0)),
                disk_bytes=pick.choice((0, 0, 10)) * GIB,
                kinds=frozenset(pick.choice(("", "", "", "a", "b"))),
            ),
            min_workers=smallest,
            max_workers=smallest * pick.choice((1, 1, 2, 4)),
            owner=pick.choice(("alice", "bob", "carol")),
            account=pick.choice(("lab/alice", "lab/bob", "other", "")),
            job_class=pick.choice(CLASSES),
            priority=pick.choice((0, 0, 0, 1)),
            partition="default" if self.is_mild else pick.choice(("default", "default", "gpu", "private")),
            submitted_at=self.now,
            remaining_seconds=length if pick.random() < 0.8 else None,
            time_limit_seconds=pick.choice((None, 7200.0)),
            stop_seconds=pick.choice((0.0, 2.0, 30.0)),
            is_elastic=pick.random() < 0.4,
            is_preemptible=pick.random() < 0.85,
            is_spread=pick.random() < 0.1,
            needs=frozenset(pick.choice(((), (), ("m1",), ("m2", "d1")))),
        )
        if self.is_shared:
            job = self.shared(job)
        self.jobs[job.id] = job
        self.work[job.id] = length

    def shared(self, job: Queued) -> Queued:
        """One that wants whole GPUs, and most often shares them."""
        pick = self.dice
        return replace(
            job,
            ask=replace(job.ask, gpus=float(pick.choice((1, 1, 1, 2))), cores=0.5, kinds=frozenset()),
            min_workers=(workers := pick.choice((1, 1, 2))),
            max_workers=workers,
            is_elastic=False,
            job_class=pick.choice(("training", "training", "training", "serving")),
            priority=int(pick.random() < 0.1),
            partition="default" if self.is_mild else pick.choice(("default", "default", "gpu")),
            pair_rate=together if pick.random() < 0.8 else None,
        )

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for job in list(self.jobs.values()):
            if job.allocation:
                left = self.work[job.id] = self.work[job.id] - seconds
                if left <= 0:
                    del self.jobs[job.id]
                    continue
                self.jobs[job.id] = replace(
                    job,
                    run_seconds=job.run_seconds + seconds,
                    service_seconds=job.service_seconds + seconds * job.num_workers,
                    remaining_seconds=None if job.remaining_seconds is None else left,
                )

    def cluster(self) -> Cluster:
        return Cluster(
            now=self.now,
            nodes=tuple(self.nodes.values()),
            jobs=tuple(self.jobs.values()),
            partitions=self.partitions,
            shares={"lab": 2.0, "lab/alice": 1.0},
            usage={"lab": 50.0, "other": 20.0},
        )

    def decide(self, check: Callable[["Drive", list[Decision], dict[str, Queued]], None]) -> list[Decision]:
        before = dict(self.jobs)
        decisions = self.policy(self.cluster())
        for decision in decisions:
            job = self.jobs[decision.job]
            if isinstance(decision, Stop):
                self.jobs[job.id] = replace(
                    job, allocation={}, devices={}, stopped_at=self.now, num_stops=job.num_stops + 1
                )
            elif isinstance(decision, Place):
                was_moved = bool(job.allocation) and not is_resize(job, decision)
                self.jobs[job.id] = replace(
                    job,
                    allocation=decision.allocation,
                    devices=decision.devices,
                    changed_at=self.now,
                    num_stops=job.num_stops + was_moved,
                )
        check(self, decisions, before)
        return decisions


def together(other: Queued, kind: str) -> tuple[float, float] | None:
    """How fast two jobs are on the same GPUs: on one kind both gain, on the other it was never measured."""
    return (0.9, 0.8) if kind == "a" else None


def is_resize(job: Queued, place: Place) -> bool:
    """An elastic job that keeps at least one of its workers where it is goes on without a restart."""
    return job.is_elastic and bool(set(job.allocation) & set(place.allocation))


# -- what must be true -------------------------------------------------------------------------------------------


def check_all(drive: Drive, decisions: list[Decision], before: dict[str, Queued]) -> None:
    check_shape(drive, decisions, before)
    free = check_capacity(drive)
    check_caps(drive, decisions, before)
    check_stops(drive, decisions, before)
    check_nobody_waits_beside_room(drive, decisions, free)


def check_shape(drive: Drive, decisions: list[Decision], before: dict[str, Queued]) -> None:
    names = [decision.job for decision in decisions]
    assert len(names) == len(set(names)), "one decision a job"
    waiting = {decision.job for decision in decisions if isinstance(decision, Wait)}
    for job in drive.jobs.values():
        if job.allocation:
            assert job.min_workers <= job.num_workers <= job.max_workers, ("gang", job)
        elif not before[job.id].allocation:
            assert job.id in waiting, ("nobody says why it waits", job)
    for decision in decisions:
        job = before[decision.job]
        if isinstance(decision, Wait):
            assert decision.why
            assert not job.allocation
        elif isinstance(decision, Place):
            assert not job.blocked_by or job.allocation, ("blocked, and started", job)
            if job.allocation and not job.is_preemptible and not lost_nodes(drive, job):
                assert is_resize(job, decision), ("it must not be stopped, and was moved", job, decision)
            for name, workers in decision.allocation.items():
                if workers > job.allocation.get(name, 0):
                    assert not drive.nodes[name].is_draining, ("started on a node that is drained", decision)
                assert not job.ask.kinds or drive.nodes[name].kind in job.ask.kinds
    positions = [decision.position for decision in decisions if isinstance(decision, Wait) and decision.position]
    assert positions == list(range(1, len(positions) + 1))


def check_capacity(drive: Drive) -> dict[str, dict[str, object]]:
    """Nothing is given out twice; returns what is free."""
    free: dict[str, dict[str, object]] = {}
    guests = guests_of(drive.jobs.values())
    for node in drive.nodes.values():
        free[node.name] = {
            "cores": round(node.cores * 1000),
            "memory": node.memory_bytes,
            "disk": node.disk_bytes,
            "gpus": [1000] * node.gpus,
        }
    for job in drive.jobs.values():
        for name, workers in job.allocation.items():
            room = free[name]
            room["cores"] -= workers * round(job.ask.cores * 1000)
            room["memory"] -= workers * job.ask.memory_bytes
            room["disk"] -= workers * job.ask.disk_bytes
            devices = job.devices.get(name, ())
            each = max(int(job.ask.gpus), 1) if job.ask.gpus else 0
            assert len(devices) == workers * each, ("devices", job)
            if job.id in guests:
                check_pair(drive, job, drive.jobs[guests[job.id]])
                continue
            for device in devices:
                room["gpus"][device] -= min(round(job.ask.gpus * 1000), 1000)
    for name, room in free.items():
        assert room["cores"] >= 0, name
        assert room["memory"] >= 0, name
        assert room["disk"] >= 0, name
        assert min(room["gpus"], default=0) >= 0, name
    return free


def check_pair(drive: Drive, guest: Queued, host: Queued) -> None:
    """Two share GPUs only if both may, and where that was measured."""
    drive.num_pairs += 1
    assert guest.pair_rate, ("shares and was not asked", guest)
    assert host.pair_rate, ("shares and was not asked", host)
    assert guest.ask.gpus == host.ask.gpus >= 1
    assert guest.partition == host.partition
    assert all(drive.nodes[name].kind == "a" for name in guest.allocation), ("never measured there", guest)


def check_caps(drive: Drive, decisions: list[Decision], before: dict[str, Queued]) -> None:
    started = {decision.job for decision in decisions if isinstance(decision, Place)}
    for name, rules in drive.partitions.items():
        inside = [job for job in drive.jobs.values() if job.partition == name]
        gpus = sum(node.gpus for node in drive.nodes.values() if node.partition == name)
        cores = sum(node.cores for node in drive.nodes.values() if node.partition == name)
        for job in inside:
            if job.id in started and job.num_workers > before[job.id].num_workers:
                assert job.job_class in rules.classes
                assert job.num_workers <= (rules.max_workers_per_job or 10**9)
                mine = [other for other in inside if other.owner == job.owner]
                assert sum(other.num_workers for other in mine) <= (rules.max_workers_per_user or 10**9)
                if rules.max_user_share < 1:
                    used = sum(other.num_workers * other.ask.cores for other in mine)
                    assert used <= rules.max_user_share * cores + 1e-6
                    if job.ask.gpus:
                        used = sum(other.num_workers * other.ask.gpus for other in mine)
                        assert used <= rules.max_user_share * gpus + 1e-6


def tier(job: Queued) -> tuple[int, int]:
    return CLASSES.index(job.job_class), job.priority


def check_stops(drive: Drive, decisions: list[Decision], before: dict[str, Queued]) -> None:
    """Whoever lost workers lost them to somebody who may take them."""
    gained = [
        drive.jobs[decision.job]
        for decision in decisions
        if isinstance(decision, Place) and drive.jobs[decision.job].num_workers > before[decision.job].num_workers
    ]
    # Whose turn it is: who waited, and who was a guest and has GPUs of its own now.
    moved = {item.job for item in decisions if isinstance(item, Place)}
    guests, still = guests_of(before.values()), guests_of(drive.jobs.values())
    left = {name for name in guests if name in moved or name not in still}
    starts = [job for job in gained if not before[job.id].allocation]
    starts += [drive.jobs[name] for name in left if drive.jobs[name].allocation]
    for decision in decisions:
        job = before[decision.job]
        stopped = isinstance(decision, Stop) or (
            isinstance(decision, Place) and bool(job.allocation) and not is_resize(job, decision)
        )
        if isinstance(decision, Place) and job.allocation and not stopped:
            after = drive.jobs[job.id]
            if after.num_workers < job.num_workers:
                assert job.is_elastic
                is_asked = after.num_workers >= job.max_workers
                assert starts or is_asked or lost_nodes(drive, job), ("made smaller for nobody", job, decision)
        if not stopped or lost_nodes(drive, job):
            continue
        if job.id in left and drive.now - job.changed_at >= max(QUANTUM, 10 * job.stop_seconds):
            # A guest that moves gains: GPUs of its own, or a better host.
            continue
        assert job.is_preemptible, ("stopped what must not be stopped", job)
        higher = any(tier(other) > tier(job) for other in starts)
        owners = any(
            drive.all_nodes[name].partition == other.partition != job.partition
            for other in starts
            for name in job.allocation
        )
        quantum = max(QUANTUM, 10 * job.stop_seconds)
        due = job.run_seconds >= quantum * (2 ** (job.num_stops + 1) - 1) and drive.now - job.changed_at >= QUANTUM
        assert higher or owners or (due and starts), ("stopped for nobody", decision, job, starts)
        if not higher and not owners:
            stops = drive.peer_stops[job.id] = drive.peer_stops.get(job.id, 0) + 1
            assert stops <= math.log2(job.run_seconds / QUANTUM + 1) + 1e-9, ("stopped again and again", job)


def lost_nodes(drive: Drive, job: Queued) -> set[str]:
    """Nodes on which it ran and that are gone."""
    return set(job.allocation) - set(drive.nodes)


def check_nobody_waits_beside_room(
    drive: Drive, decisions: list[Decision], free: dict[str, dict[str, object]]
) -> None:
    for decision in decisions:
        if not isinstance(decision, Wait):
            continue
        job = drive.jobs[decision.job]
        if job.blocked_by:
            assert decision.why == job.blocked_by
            continue
        if room_for(drive, job, free) < job.min_workers:
            continue
        if decision.why.startswith(KEPT):
            other = drive.jobs[decision.why.removeprefix(KEPT).split(",")[0]]
            assert drive.now - max(other.submitted_at, other.stopped_at or 0.0) > KEEP
            continue
        assert is_capped(drive, job), ("waits beside room", decision, job, free)


def room_for(drive: Drive, job: Queued, free: dict[str, dict[str, object]]) -> int:
    """How many workers of it would fit into what is free."""
    total = 0
    for node in drive.nodes.values():
        lends = drive.partitions.get(node.partition, Partition()).lends and job.is_preemptible
        if node.is_draining or not (node.partition == job.partition or lends):
            continue
        if job.ask.kinds and node.kind not in job.ask.kinds:
            continue
        room = free[node.name]
        fits = room["cores"] // round(job.ask.cores * 1000)
        if job.ask.memory_bytes:
            fits = min(fits, room["memory"] // job.ask.memory_bytes)
        if job.ask.disk_bytes:
            fits = min(fits, room["disk"] // job.ask.disk_bytes)
        if job.ask.gpus >= 1:
            fits = min(fits, sum(device == 1000 for device in room["gpus"]) // int(job.ask.gpus))
        elif job.ask.gpus:
            fits = min(fits, sum(device // round(job.ask.gpus * 1000) for device in room["gpus"]))
        total += int(fits)
    return total


def is_capped(drive: Drive, job: Queued) -> bool:
    rules = drive.partitions.get(job.partition, Partition())
    mine = [other for other in drive.jobs.values() if (other.partition, other.owner) == (job.partition, job.owner)]
    nodes = [node for node in drive.nodes.values() if node.partition == job.partition]
    used = sum(other.num_workers for other in mine)
    cores = sum(other.num_workers * other.ask.cores for other in mine) + job.min_workers * job.ask.cores
    gpus = sum(other.num_workers * other.ask.gpus for other in mine) + job.min_workers * job.ask.gpus
    return (
        job.job_class not in rules.classes
        or job.min_workers > (rules.max_workers_per_job or 10**9)
        or used + job.min_workers > (rules.max_workers_per_user or 10**9)
        or (rules.max_user_share < 1 and cores > rules.max_user_share * sum(node.cores for node in nodes) - 1e-6)
        or (
            rules.max_user_share < 1
            and job.ask.gpus > 0
            and gpus > rules.max_user_share * sum(node.gpus for node in nodes) - 1e-6
        )
    )


def drive(policy: Policy, seed: int, num_events: int, is_mild: bool = False, is_shared: bool = False) -> Drive:
    """So many events, a decision after each, everything checked."""
    run = Drive(policy=policy, seed=seed, is_mild=is_mild, is_shared=is_shared)
    for number in range(num_events):
        run.event()
        try:
            run.decide(check_all)
            if number % 8 == 0:
                again = run.decide(check_all)
                assert not [decision for decision in again if isinstance(decision, Stop)], "decided, and decided anew"
        except AssertionError as problem:
            raise AssertionError(f"seed {seed}, event {number}: {problem}") from problem
    return run
