"""Between the queue and a policy: what the policy is shown, and what of its decisions can be done at once. Pure."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shoal.place.cluster import Cluster, Node, Queued
from shoal.place.decision import Decision, Place, Stop, Wait
from shoal.service.job import FINISHED, OVER, WAITING, Job
from shoal.service.learned import with_data
from shoal.service.people import Person
from shoal.service.settings import Settings
from shoal.service.state import ask_of
from shoal.service.telling import decay
from shoal.service.transitions import kind_seconds_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Todo:
    """What to do with one job. `allocation` empty: stop it; else run it there, with a start or a change of size."""

    number: int
    allocation: Mapping[str, int] = field(default_factory=dict)
    devices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    why: str = ""


def queued(job: Job, blocked_by: str, now: float, most: int | None = None) -> Queued:
    """A job as policies see it. One that shrinks has what it will have; see `cluster_of` for those that stop."""
    asked = job.asked
    since = max(0.0, now - job.accrued_at) if job.is_active else 0.0
    return Queued(
        id=str(job.number),
        ask=ask_of(asked),
        min_workers=job.min_workers,
        max_workers=max(job.min_workers, min(job.max_workers, most if most is not None else job.max_workers)),
        owner=job.owner,
        account=job.account,
        job_class=asked.job_class,
        priority=asked.priority,
        partition=asked.partition,
        submitted_at=job.submitted_at,
        time_limit_seconds=asked.time_limit_seconds,
        allocation=job.allocation if job.target is None else job.target,
        devices=job.devices if job.target is None else job.target_devices,
        changed_at=job.changed_at,
        service_seconds=job.service_seconds + since * job.num_reserved,
        run_seconds=job.run_seconds + since,
        kind_seconds=kind_seconds_at(job, now),
        needs=frozenset(asked.data),
        num_stops=job.num_stops,
        stopped_at=job.stopped_at,
        # One that starts cannot be told anything yet.
        is_elastic=asked.is_elastic and job.state != "starting",
        is_preemptible=asked.is_preemptible and job.state != "starting",
        blocked_by=blocked_by,
    )


def cluster_of(
    jobs: Iterable[Job],
    nodes: Sequence[Node],
    settings: Settings,
    people: Mapping[str, Person],
    usage: Mapping[str, float],
    links: Mapping[tuple[str, str], float],
    states: Mapping[int, str],
    now: float,
    learned: Callable[[Job, Queued], Queued] = lambda job, shown: shown,
) -> Cluster:
    """Everything a policy decides by. `states` are those of jobs that others wait for, and `learned` adds to each job
    what is known of it besides what was asked.

    A job that is being stopped is left out, as if its nodes were free: they were taken away for somebody, who must
    get them again in this decision and the next, and not have others stopped for it. `can_do` knows better.
    """
    jobs = list(jobs)
    used: dict[str, int] = {}
    for job in jobs:
        used[job.owner] = used.get(job.owner, 0) + job.num_reserved
    shown = []
    for job in jobs:
        if job.wish:
            continue
        quota = people[job.owner].max_workers if job.owner in people else None
        room = None if quota is None else quota - used[job.owner] + job.num_reserved
        shown.append(learned(job, queued(job, blocked_by(job, states, room), now, room)))
    return Cluster(
        now=now,
        nodes=with_data(nodes, shown),
        jobs=tuple(shown),
        partitions=settings.partitions,
        shares=settings.shares,
        usage=usage,
        links=links,
        round_seconds=settings.round_seconds,
    )


def blocked_by(job: Job, states: Mapping[int, str], room: int | None) -> str:
    """Why a job cannot start whatever is free; empty where nothing stands in its way."""
    if job.is_active:
        return ""
    if job.is_held:
        return "held"
    first = [number for number in job.asked.after if states.get(number) != FINISHED]
    if first:
        return f"after job {', '.join(map(str, first[:5]))}"
    if room is not None and room < job.min_workers:
        return f"{job.owner} may use no more workers at once"
    return ""


def hopeless(jobs: Iterable[Job], states: Mapping[int, str]) -> list[tuple[int, int, str]]:
    """Jobs that wait for one that is over and did not finish: (job, the other, what became of that)."""
    found = []
    for job in jobs:
        for number in job.asked.after if job.state == WAITING else ():
            state = states.get(number, "is not known")
            if state in OVER and state != FINISHED:
                found.append((job.number, number, {"failed": "failed", "cancelled": "was cancelled"}[state]))
                break
    return found


def usage_of(rows: Iterable[Mapping[str, object]], now: float, half_life_seconds: float) -> dict[str, float]:
    """What accounts used lately, and what those above them did: `lab/alice` counts to `lab` too."""
    found: dict[str, float] = {}
    for row in rows:
        left = decay(float(row["lately"]), now - float(row["at"]), half_life_seconds)  # type: ignore[arg-type]
        parts = str(row["account"]).split("/")
        for depth in range(1, len(parts) + 1):
            name = "/".join(parts[:depth])
            found[name] = found.get(name, 0.0) + left
    return found


def over_bounds(jobs: Iterable[Job]) -> list[Decision]:
    """Running jobs that were told to have fewer workers than they have."""
    found: list[Decision] = []
    for job in jobs:
        if job.state == "running" and not job.wish and job.num_wanted > job.max_workers:
            found.append(cut(job, job.max_workers, f"resized to at most {job.max_workers} workers"))
    return found


def cut(job: Job, keep: int, why: str) -> Place:
    """Keep so many workers of a job, on the nodes where most of them are."""
    allocation: dict[str, int] = {}
    devices: dict[str, tuple[int, ...]] = {}
    current = job.allocation if job.target is None else job.target
    for name, workers in sorted(current.items(), key=lambda spot: (-spot[1], spot[0])):
        stay = min(keep, workers)
        keep -= stay
        if stay:
            allocation[name] = stay
            had = job.devices.get(name, ())
            devices |= {name: had[: len(had) // workers * stay]} if had else {}
    return Place(job=str(job.number), allocation=allocation, devices=devices, why=why)


@dataclass(slots=True)
class Room:
    """What nobody holds, node by node, in thousandths and bytes."""

    cores: dict[str, float]
    memory: dict[str, int]
    gpus: dict[str, float]

    def take(self, job: Job, allocation: Mapping[str, int], sign: int = 1) -> None:
        for name, workers in allocation.items():
            self.cores[name] = self.cores.get(name, 0.0) - sign * workers * job.asked.cores
            self.memory[name] = self.memory.get(name, 0) - sign * workers * job.asked.memory_bytes
            self.gpus[name] = self.gpus.get(name, 0.0) - sign * workers * job.asked.gpus

    def is_sound(self, names: Iterable[str]) -> bool:
        return all(
            self.cores.get(name, -1.0) > -1e-6
            and self.memory.get(name, -1) >= 0
            and self.gpus.get(name, -1.0) > -1e-6
            for name in names
        )


def room_of(nodes: Iterable[Node], jobs: Iterable[Job]) -> Room:
    """What is free in truth: what is being given up still counts as held."""
    nodes = list(nodes)
    room = Room(
        {node.name: node.cores for node in nodes},
        {node.name: node.memory_bytes for node in nodes},
        {node.name: float(node.gpus) for node in nodes},
    )
    for job in jobs:
        room.take(job, job.allocation)
    return room


def can_do(
    decisions: Iterable[Decision], jobs: Mapping[int, Job], nodes: Sequence[Node], people: Mapping[str, Person]
) -> tuple[list[Todo], dict[int, Wait]]:
    """What can be done now, and who waits for what. A start waits for nodes of a job that is still stopping."""
    room = room_of(nodes, jobs.values())
    used: dict[str, int] = {}
    for job in jobs.values():
        used[job.owner] = used.get(job.owner, 0) + job.num_reserved
    todo: list[Todo] = []
    waits: dict[int, Wait] = {}
    for decision in decisions:
        found = jobs.get(int(decision.job))
        if found is None or found.wish:
            continue
        if isinstance(decision, Wait):
            waits[found.number] = decision
        elif isinstance(decision, Stop):
            todo += [Todo(number=found.number, why=decision.why)] if found.is_active else []
        elif (done := _place(decision, found, room, people, used)) is not None:
            todo.append(done)
        elif found.state == WAITING:
            waits[found.number] = Wait(
                job=decision.job, why="its nodes are being made free", position=1, eta_seconds=None
            )
    return todo, waits


def _place(decision: Place, job: Job, room: Room, people: Mapping[str, Person], used: dict[str, int]) -> Todo | None:
    """A start, a growth where there is room, or a cut. One that runs is not moved: it is stopped, to start there."""
    todo = Todo(number=job.number, allocation=decision.allocation, devices=decision.devices, why=decision.why)
    current = job.allocation if job.target is None else job.target
    wanted, has = sum(decision.allocation.values()), sum(current.values())
    if job.is_active and wanted <= has:
        is_part = all(current.get(name, 0) >= workers for name, workers in decision.allocation.items())
        return todo if is_part and wanted < has and job.asked.is_elastic else None
    if job.is_active and not job.asked.is_elastic:
        return None
    quota = people[job.owner].max_workers if job.owner in people else None
    if quota is not None and used[job.owner] - job.num_reserved + wanted > quota:
        return None
    room.take(job, job.allocation, -1)
    room.take(job, decision.allocation)
    if room.is_sound(decision.allocation):
        used[job.owner] += wanted - job.num_reserved
        return todo
    room.take(job, decision.allocation, -1)
    room.take(job, job.allocation)
    return None
