"""The queue of a service to which random things happen: policy, deciding, reclaim and jobs together, as in a service.

Keepers take their time: what is to stop, to start or to shrink does so some looks later. What must be true is asked
of what is reserved in truth, and of what was decided.
"""

import math
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

from driving import GIB, QUANTUM, check_capacity, check_nobody_waits_beside_room

from shoal.place.batching import Batching, LearnedRate
from shoal.place.cluster import CLASSES, Ask, Cluster, Node, Partition, Queued, Rate, may_be_stopped
from shoal.place.kinds import Sorts
from shoal.place.policies import POLICIES
from shoal.place.reclaim import reclaim
from shoal.place.throughput import Observation, fit
from shoal.service import transitions
from shoal.service.deciding import Promise, Todo, can_do, cluster_of, still_promised
from shoal.service.job import RUNNING, STARTING, STOPPING, WAITING, Asked, Job
from shoal.service.orders import Seen
from shoal.service.people import Person
from shoal.service.settings import Settings

KINDS = ("a", "b")
MAX_JOBS = 14
SETTLE_ROUNDS = 24
MOVED = "moved"


def learned(seed: int) -> LearnedRate:
    """A rate fitted to steps that a random job took on both kinds."""
    dice = random.Random(seed)
    a, b, sync = dice.uniform(0.01, 0.1), dice.uniform(0.001, 0.01), dice.uniform(0.001, 0.2)
    factors = dict(zip(KINDS, (1.0, dice.choice((0.2, 0.7, 1.0, 3.0))), strict=True))
    seen = [
        Observation(
            kind=kind,
            nodes=nodes,
            workers=workers,
            micro_batch=16.0,
            step_seconds=(a + 16 * b) / factors[kind] + (sync * math.log2(workers) if workers > 1 else 0.0),
        )
        for kind in KINDS
        for nodes, workers in ((1, 1), (1, 2), (2, 4))
    ]
    batching = Batching(initial=16.0, largest=128.0, largest_micro=32.0, noise=dice.uniform(10.0, 1000.0))
    return LearnedRate(throughput=fit(seen, kinds=KINDS), batching=batching, most_workers=16)


def plain(on_a: float, on_b: float) -> Rate:
    return lambda kind, workers, nodes: (on_a if kind == "a" else on_b) * workers**0.8


RATES: tuple[Rate | None, ...] = (
    *map(learned, range(4)),
    plain(1.0, 0.5),
    plain(0.1, 1.0),
    plain(1.0, 1.0),
    plain(1.0, 0.0),
)


@dataclass
class Service:
    """Jobs, nodes and settings; what happens to them, what is decided, and whether that may be."""

    policy: str
    seed: int
    dice: random.Random = field(init=False)
    now: float = 0.0
    has_rates: bool = False
    nodes: dict[str, Node] = field(default_factory=dict)
    all_nodes: dict[str, Node] = field(default_factory=dict)
    settings: Settings = field(default_factory=Settings)
    people: dict[str, Person] = field(default_factory=dict)
    links: dict[tuple[str, str], float] = field(default_factory=dict)
    jobs: dict[int, Job] = field(default_factory=dict)
    left: dict[int, float] = field(default_factory=dict)
    rates: dict[int, Rate | None] = field(default_factory=dict)
    uses: dict[int, float] = field(default_factory=dict)
    promised: dict[int, Promise] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    turns: Counter[int] = field(default_factory=Counter)
    count: int = 0

    def __post_init__(self) -> None:
        pick = self.dice = random.Random(self.seed)
        self.has_rates = pick.random() < 0.6
        is_mild = pick.random() < 0.3
        names = ["default"] if is_mild else ["default", "gpu", "private"]
        for number in range(pick.randint(2, 6)):
            node = Node(
                name=f"n{number}",
                kind=pick.choice(KINDS),
                cores=float(pick.choice((4, 8, 16, 6.5))),
                memory_bytes=pick.choice((8, 16, 64)) * GIB,
                gpus=pick.choice((0, 1, 2, 4, 8)),
                disk_bytes=100 * GIB,
                partition=pick.choice(names),
            )
            self.nodes[node.name] = node
        self.all_nodes = dict(self.nodes)
        if not is_mild:
            self.change_settings()
        if pick.random() < 0.5:
            pairs = [(one, other) for one in self.nodes for other in self.nodes if one < other]
            self.links = {pair: pick.choice((1e8, 1e9, 1e10)) for pair in pairs}

    # -- what happens --------------------------------------------------------------------------------------------

    def event(self) -> None:
        what, pick = self.dice.random(), self.dice
        waiting = [job for job in self.jobs.values() if job.state == WAITING]
        if what < 0.36 and len(self.jobs) < MAX_JOBS:
            self.submit()
        elif what < 0.74:
            self.pass_time(pick.choice((1.0, 20.0, 60.0, 300.0, 3000.0)))
        elif what < 0.80:
            self.fail()
        elif what < 0.83:
            self.lose_or_join()
        elif what < 0.86:
            self.resize()
        elif what < 0.88:
            self.change_settings()
        elif what < 0.90:
            name = pick.choice(sorted(self.nodes))
            self.nodes[name] = replace(self.nodes[name], is_draining=not self.nodes[name].is_draining)
        elif what < 0.94 and waiting:
            job = pick.choice(waiting)
            self.put(transitions.release(job) if job.is_held else transitions.hold(job))
        elif self.jobs:
            job = self.jobs[pick.choice(sorted(self.jobs))]
            if what < 0.97:
                self.put(transitions.cancel(job, "so it is wished", self.now, 0.0))
            elif job.is_active:
                self.put(transitions.requeue(job, self.now))

    def put(self, job: Job) -> None:
        if not job.is_over:
            self.jobs[job.number] = job
            return
        assert not job.allocation, ("over, and holds nodes", job)
        for known in (self.jobs, self.left, self.rates, self.uses):
            known.pop(job.number, None)  # type: ignore[attr-defined]
        self.counts[job.state] += 1

    def submit(self) -> None:
        pick = self.dice
        self.count += 1
        least = pick.choice((1, 1, 1, 2, 4))
        is_elastic = pick.random() < 0.4
        most = least * pick.choice((1, 2, 4)) if is_elastic else least
        asked = Asked(
            run_args=("t.py",),
            name="t",
            working_dir="/",
            min_workers=least,
            max_workers=most,
            is_elastic=is_elastic,
            job_class=pick.choice(CLASSES),
            priority=pick.choice((0, 0, 0, 1)),
            partition=pick.choice(sorted({node.partition for node in self.all_nodes.values()})),
            account=pick.choice(("lab/ann", "lab/ben", "other", "")),
            cores=pick.choice((0.5, 1.0, 2.0, 4.0)),
            memory_bytes=pick.choice((0, 1, 4)) * GIB,
            disk_bytes=pick.choice((0, 0, 10)) * GIB,
            gpus=pick.choice((0.0, 0.25, 0.3, 0.5, 1.0, 2.0) if most == 1 else (0.0, 1.0, 1.0, 2.0)),
            kinds=pick.choice(((), (), (), ("a",), ("b",))),
            time_limit_seconds=pick.choice((None, 7200.0)),
            is_preemptible=pick.random() < 0.85,
            max_preemptions=pick.choice((None, None, 1, 3)),
        )
        owner = pick.choice(("ann", "ben", "eve"))
        job = transitions.submit(self.count, owner, asked, self.now, 0.0)
        self.jobs[job.number] = replace(job, stop_seconds=pick.choice((None, 2.0, 30.0)))
        self.left[job.number] = pick.expovariate(1 / pick.choice((60.0, 600.0, 6000.0)))
        self.rates[job.number] = pick.choice(RATES) if self.has_rates else None
        self.uses[job.number] = pick.choice((0.1, 0.3, 0.9))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for number, job in list(self.jobs.items()):
            if job.state == RUNNING:
                self.left[number] -= seconds
                if self.left[number] <= 0:
                    self.see(job, Seen(state="ended", cause="finished"))

    def fail(self) -> None:
        """An attempt ends by itself: it fails, is lost, or needs more memory than it has."""
        active = [job for job in self.jobs.values() if job.is_active]
        if active:
            job = self.dice.choice(active)
            self.see(job, Seen(state="ended", cause=self.dice.choice(("failed", "lost", "lost", "out_of_memory"))))

    def lose_or_join(self) -> None:
        gone = sorted(set(self.all_nodes) - set(self.nodes))
        if gone and (len(self.nodes) < 2 or self.dice.random() < 0.6):
            name = self.dice.choice(gone)
            self.nodes[name] = self.all_nodes[name]
        elif len(self.nodes) > 1:
            name = self.dice.choice(sorted(self.nodes))
            del self.nodes[name]
            for job in list(self.jobs.values()):
                # Elastic ones may go on with what is left; the attempts of others end with their node.
                if name in job.allocation and not job.asked.is_elastic and self.dice.random() < 0.5:
                    self.see(job, Seen(state="ended", cause="lost"))

    def resize(self) -> None:
        # With a part of a GPU a job has one worker.
        able = [job for job in self.jobs.values() if not 0 < job.asked.gpus < 1]
        able = [job for job in able if not job.is_active or job.asked.is_elastic]
        if able:
            job = self.dice.choice(able)
            least = self.dice.choice((1, 2, 4))
            most = 2 * max(job.max_workers, least)
            if job.span and job.is_active and not job.wish:
                most = job.span[1]
                least = self.dice.randint(job.span[0], most)
            self.put(transitions.resize(job, least, self.dice.randint(least, most)))

    def change_settings(self) -> None:
        pick = self.dice

        def rules(name: str) -> Partition:
            return Partition(
                name=name,
                lends=pick.random() < 0.6,
                max_workers_per_user=pick.choice((None, None, 4, 8)),
                max_workers_per_job=pick.choice((None, None, 2, 4)),
                max_user_share=pick.choice((1.0, 1.0, 0.5)),
                max_preemptions=pick.choice((None, None, 2)),
                classes=frozenset(pick.choice((CLASSES, CLASSES[:3]))),
            )

        names = {node.partition for node in self.all_nodes.values()}
        self.settings = Settings(partitions={name: rules(name) for name in sorted(names)})
        self.people = {"eve": Person(name="eve", max_workers=pick.choice((None, 3, 6)))}

    # -- what keepers do -----------------------------------------------------------------------------------------

    def see(self, job: Job, seen: Seen) -> None:
        self.put(transitions.see(job, seen, self.now, 0.0))

    def look(self, haste: float = 1.0) -> None:
        """Each keeper that was asked for something has done it, with this probability."""
        for job in list(self.jobs.values()):
            is_done = self.dice.random() < haste
            if job.state == STOPPING and is_done:
                self.see(job, Seen(state="ended", cause="cancelled" if job.wish == "cancel" else "preempted", step=9))
            elif (job.state == STARTING or job.target is not None) and is_done:
                self.see(job, Seen(state="running", num_workers=job.num_wanted, step=10 * job.token))

    # -- what is decided -----------------------------------------------------------------------------------------

    def shown(self) -> Cluster:
        cluster = cluster_of(
            self.jobs.values(),
            tuple(self.nodes.values()),
            self.settings,
            self.people,
            {"lab": 50.0, "other": 20.0},
            self.links,
            {},
            self.now,
            self.promised,
        )
        if not self.has_rates:
            return cluster
        return replace(cluster, jobs=tuple(view.having(rate=self.rates[int(view.id)]) for view in cluster.jobs))

    def peaks(self) -> dict[str, int]:
        return {
            str(job.number): int(job.asked.memory_bytes * self.uses[job.number])
            for job in self.jobs.values()
            if job.state == RUNNING and job.asked.memory_bytes and not job.keeps_memory and not job.lowered_bytes
        }

    def decide(self) -> list[Todo]:
        """One decision, done as the service does it, and checked."""
        nodes = tuple(self.nodes.values())
        self.promised = still_promised(self.promised, self.jobs, nodes)
        before, known = self.shown(), self.promised
        policy = POLICIES[self.policy]
        decisions, lowers = reclaim(before, policy(before), self.peaks(), policy)
        todo, self.waits, self.promised = can_do(
            decisions, self.jobs, nodes, self.people, self.promised, self.now, lowers
        )
        assert len({each.number for each in todo}) == len(todo), "one thing to do for a job"
        self.counts["reclaims"] += len(lowers)
        for each in todo:
            self.do(each)
        # With nothing done and nothing promised, what is shown is what was shown.
        self.check(before, before if not todo and self.promised == known else self.shown())
        return todo

    def do(self, todo: Todo) -> None:
        job = self.jobs[todo.number]
        if not todo.allocation:
            self.check_stop(job, todo.why)
            self.put(transitions.preempt(job, todo.why, self.now, 0.0))
        elif job.is_active:
            assert job.state == RUNNING, ("resized before it ran", job)
            assert job.asked.is_elastic, ("resized, and is not elastic", job)
            self.counts["resizes"] += 1
            self.put(transitions.change_size(job, todo.allocation, todo.devices, self.now, 0.0, todo.why))
        else:
            assert not job.is_held, ("held, and started", job)
            self.counts["starts"] += 1
            after = transitions.start(job, todo.allocation, todo.devices, self.now, 0.0, todo.why, todo.memory_bytes)
            assert after.token == job.token + 1
            self.put(after)

    # -- what must be true ---------------------------------------------------------------------------------------

    def check_stop(self, job: Job, why: str) -> None:
        is_lost = any(name not in self.nodes for name in job.allocation)
        self.counts["stops"] += 1
        if is_lost:
            return
        rules = self.settings.partitions.get(job.asked.partition, Partition())
        assert job.state == RUNNING, ("stopped before it ran", job)
        assert job.asked.is_preemptible, ("must not be stopped", job)
        assert may_be_stopped(job.num_preempted, job.asked.max_preemptions, rules.max_preemptions), ("budget", job)
        assert why
        self.counts["moves"] += why.startswith(MOVED)
        if "it is the turn of" in why:
            self.turns[job.number] += 1
            ran = job.run_seconds + self.now - job.accrued_at
            assert self.turns[job.number] <= math.log2(ran / QUANTUM + 1) + 1e-9, ("stopped again and again", job)

    def check(self, before: Cluster, after: Cluster) -> None:
        for cluster in (self.truth(after), after):
            check_capacity(self.as_drive(cluster))
        held = {view.id: view for view in before.jobs}
        for view in after.jobs:
            if view.num_workers > held[view.id].num_workers:
                self.check_gain(view, held[view.id], after)

    def check_gain(self, job: Queued, before: Queued, cluster: Cluster) -> None:
        """Who got more than it had may have it."""
        nodes = {node.name: node for node in cluster.nodes}
        rules = self.settings.partitions.get(job.partition, Partition(name=job.partition))
        mine = [other for other in cluster.jobs if (other.partition, other.owner) == (job.partition, job.owner)]
        assert before.min_workers <= job.num_workers <= before.max_workers, ("gang", job)
        assert job.job_class in rules.classes, ("class", job)
        assert job.num_workers <= (rules.max_workers_per_job or 10**9), ("cap of a job", job)
        assert sum(other.num_workers for other in mine) <= (rules.max_workers_per_user or 10**9), ("cap", job)
        if rules.max_user_share < 1.0:
            cores = sum(node.cores for node in cluster.nodes if node.partition == job.partition)
            used = sum(other.num_workers * other.ask.cores for other in mine)
            assert used <= rules.max_user_share * cores + 1e-6, ("share", job)
        for name, workers in job.allocation.items():
            if workers > before.allocation.get(name, 0):
                node = nodes[name]
                assert not node.is_draining, ("draining", job)
                assert not job.ask.kinds or node.kind in job.ask.kinds, ("kind", job)
                lends = self.settings.partitions.get(node.partition, Partition()).lends
                assert node.partition == job.partition or lends, ("not lent", job)
        quota = self.people[job.owner].max_workers if job.owner in self.people else None
        if quota is not None and int(job.id) not in self.promised and job.changed_at == self.now:
            used = sum(each.num_reserved for each in self.jobs.values() if each.owner == job.owner)
            assert used <= max(quota, job.min_workers), ("quota", job)

    def truth(self, shown: Cluster) -> Cluster:
        """What is reserved, whatever was decided about it."""
        views = []
        for view in shown.jobs:
            job = self.jobs[int(view.id)]
            held = {name: workers for name, workers in job.allocation.items() if name in self.nodes}
            is_same = view.ask.memory_bytes == job.memory_bytes
            ask = view.ask if is_same else replace(view.ask, memory_bytes=job.memory_bytes)
            views.append(view.having(ask=ask, allocation=held, devices=job.devices))
        return replace(shown, jobs=tuple(views))

    def as_drive(self, cluster: Cluster) -> SimpleNamespace:
        """In the form in which the checks of `driving` take it; what is on nodes that are gone is left out."""
        jobs = {
            view.id: view.having(allocation={n: w for n, w in view.allocation.items() if n in self.nodes})
            for view in cluster.jobs
        }
        return SimpleNamespace(nodes=self.nodes, partitions=self.settings.partitions, jobs=jobs, now=self.now)

    def settle(self) -> None:
        """When nothing happens, all comes to rest, and then nobody waits beside room."""
        for _ in range(SETTLE_ROUNDS):
            self.now += 0.1
            self.look()
            # One that cannot be kept, where a quota was lowered, was shown as kept: others start with the next look.
            was_promised, todo = self.promised, self.decide()
            is_quiet = not (todo or self.promised or was_promised)
            is_quiet &= not any(job.wish or job.target for job in self.jobs.values())
            if is_quiet and not any(job.state == STARTING for job in self.jobs.values()):
                break
        else:
            raise AssertionError(("it does not come to rest", todo, self.promised, self.waits))
        cluster = self.shown()
        for view in cluster.jobs:
            assert view.allocation or int(view.id) in self.waits, ("nobody says why it waits", view)
        drive = self.as_drive(cluster)
        free = check_capacity(drive)
        for wait in self.waits.values():
            view = drive.jobs[wait.job]
            for ask in self.asks_of(view):
                drive.jobs[wait.job] = view.having(ask=ask)
                check_nobody_waits_beside_room(drive, [wait], free)
            drive.jobs[wait.job] = view

    def asks_of(self, job: Queued) -> list[Ask]:
        """What there must be no room for while it waits: for any of its workers on nodes where it gets anything done,
        or where all its workers can be on one kind of nodes, for all of them on any one kind."""
        if not self.has_rates or len({node.kind for node in self.nodes.values()}) < 2:
            return [job.ask]
        rate = job.rate
        able = [kind for kind in sorted(job.ask.kinds or KINDS) if rate is None or rate(kind, job.min_workers, 1) > 0]
        if job.max_workers > 1 and Sorts(tuple(self.nodes.values())).alone(job):
            return [job.ask.on(frozenset({kind})) for kind in able]
        return [job.ask.on(frozenset(able))] if able else []

    def rest(self, rounds: int = 40) -> None:
        """While nothing but time happens, nobody is stopped again and again."""
        stops: Counter[int] = Counter()
        for number in self.left:
            self.left[number] = math.inf
        for _ in range(rounds):
            self.pass_time(61.0)
            self.look()
            for todo in self.decide():
                stops[todo.number] += not todo.allocation
        worst = max(stops.values(), default=0)
        assert worst <= math.log2(61.0 * rounds / QUANTUM + 1) + 1, ("stopped again and again", stops, self.jobs)


def drive_service(policy: str, seed: int, num_events: int) -> Counter[str]:
    """So many events, a decision after each; returns what was done."""
    service = Service(policy=policy, seed=seed)
    for number in range(num_events):
        try:
            service.event()
            service.look(0.6)
            service.decide()
            if number % 10 == 9:
                service.settle()
            if number % 200 == 199:
                service.rest()
        except Exception as problem:
            raise AssertionError(f"policy {policy}, seed {seed}, event {number}: {problem!r}") from problem
    service.counts["events"] = num_events
    return service.counts
