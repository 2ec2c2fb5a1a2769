"""Between the queue and a policy: what the policy is shown, and what of its decisions can be done at once. Pure."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from shoal.place.cluster import Allocation, Ask, Cluster, Devices, Node, Partition, Queued, may_be_stopped
from shoal.place.decision import Decision, Lower, Place, Stop, Wait
from shoal.service.job import CANCELLED, FAILED, FINISHED, RUNNING, STARTING, WAITING, Job, ask_of
from shoal.service.learned import with_data
from shoal.service.people import Person
from shoal.service.settings import Settings
from shoal.service.telling import decay
from shoal.service.transitions import kind_seconds_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Todo:
    """What to do with one job. `allocation` empty: stop it; else run it there, with a start or a change of size.

    `memory_bytes`: what each worker has from this start on, where that is less than was asked for.
    """

    number: int
    allocation: Allocation = field(default_factory=dict)
    devices: Devices = field(default_factory=dict)
    why: str = ""
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """Where a job is to run as soon as others have left. To policies it runs there already, since `at`.

    A decision takes its time: whoever was stopped saves first. Were the next decision made as if nothing had been
    decided, it could give what gets free to somebody else, or to the one who was stopped for it.
    """

    place: Place
    at: float
    memory_bytes: int | None = None


Promises = Mapping[int, Promise]
_NO_PROMISES: Promises = MappingProxyType({})

_ANYBODY = Queued(id="")

USUAL_STOP_SECONDS = 5.0
"""What stopping a job and going on with it costs, until that was measured."""


def blocked_jobs(
    jobs: Iterable[Job], states: Mapping[int, str], people: Mapping[str, Person], promised: Promises = _NO_PROMISES
) -> dict[int, str]:
    """Jobs that cannot start whatever is free, and why. Nothing changes for others without them."""
    jobs = list(jobs)
    used = _workers_in_use(jobs)
    found = {}
    for job in jobs:
        if job.state == WAITING and job.number not in promised:
            why = blocked_by(job, states, _room_for(job, people, used))
            if why:
                found[job.number] = why
    return found


def _workers_in_use(jobs: Iterable[Job]) -> dict[str, int]:
    """How many workers are reserved for each person."""
    used: dict[str, int] = {}
    for job in jobs:
        if job.allocation:
            used[job.owner] = used.get(job.owner, 0) + job.num_reserved
    return used


def _room_for(job: Job, people: Mapping[str, Person], used: Mapping[str, int]) -> int | None:
    """How many workers it may have by the quota of its owner; None is any number."""
    quota = people[job.owner].max_workers if job.owner in people else None
    return None if quota is None else quota - used.get(job.owner, 0) + job.num_reserved


def queued(job: Job, blocked_by: str, now: float, most: int | None = None) -> Queued:
    """A job as policies see it. One that shrinks has what it will have; see `shown_as` for those that stop."""
    asked = job.asked
    allocation, devices = held_by(job)
    since = max(0.0, now - job.accrued_at) if job.is_active else 0.0
    # For thousands of jobs the usual way to make one takes as long as a decision about them.
    return _ANYBODY.having(
        id=str(job.number),
        ask=needs_of(job),
        min_workers=job.min_workers,
        max_workers=max(job.min_workers, min(job.max_workers, most if most is not None else job.max_workers)),
        owner=job.owner,
        account=job.account,
        job_class=asked.job_class,
        priority=asked.priority,
        partition=asked.partition,
        submitted_at=job.submitted_at,
        time_limit_seconds=asked.time_limit_seconds,
        allocation=allocation,
        devices=devices,
        changed_at=job.changed_at,
        service_seconds=job.service_seconds + (since * job.size if since else 0.0),
        run_seconds=job.run_seconds + since,
        kind_seconds=kind_seconds_at(job, now),
        needs=frozenset(asked.data),
        num_stops=job.num_stops,
        stopped_at=job.stopped_at,
        stop_seconds=USUAL_STOP_SECONDS if job.stop_seconds is None else job.stop_seconds,
        # One that starts cannot be told anything yet.
        is_elastic=asked.is_elastic and job.state != STARTING,
        is_preemptible=asked.is_preemptible and job.state != STARTING,
        blocked_by=blocked_by,
    )


def needs_of(job: Job) -> Ask:
    """What is reserved for each of its workers."""
    return ask_of(job.asked, job.memory_bytes)


def shown_as(job: Job, view: Queued, promise: Promise | None) -> Queued:
    """A job that is to run elsewhere as if it ran there; one that is being stopped as if it waited."""
    if job.wish:
        view = view.having(
            ask=ask_of(job.asked),
            allocation={},
            devices={},
            num_stops=job.num_stops + 1,
            stopped_at=job.changed_at,
            blocked_by="held" if job.is_held else "",
        )
    if promise is None:
        return view
    place = promise.place
    return view.having(
        ask=ask_of(job.asked, promise.memory_bytes),
        allocation=place.allocation,
        devices=place.devices,
        changed_at=promise.at,
        blocked_by="",
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
    promised: Promises = _NO_PROMISES,
    learned: Callable[[Job, Queued], Queued] = lambda job, shown: shown,
) -> Cluster:
    """Everything a policy decides by. `states` are those of jobs that others wait for, and `learned` adds to each job
    what is known of it besides what was asked.

    It shows what was decided, as if it had been done at once: a job that is being stopped holds nothing, one that is
    promised its nodes runs on them. So nobody else is given them meanwhile. `can_do` knows better.
    """
    jobs = list(jobs)
    used = _workers_in_use(jobs)
    ending = _workers_in_use(job for job in jobs if job.wish == "cancel")
    quotas = {name: person.max_workers for name, person in people.items() if person.max_workers is not None}
    shown = []
    for job in jobs:
        if job.wish == "cancel":
            continue
        room = _room_for(job, people, used)
        view = learned(job, queued(job, blocked_by(job, states, room), now, room))
        rules = settings.partitions.get(job.asked.partition, Partition())
        if not may_be_stopped(job.num_preempted, job.asked.max_preemptions, rules.max_preemptions):
            view = view.having(is_preemptible=False)
        shown.append(shown_as(job, view, promised.get(job.number)))
    return Cluster(
        now=now,
        nodes=with_data(nodes, shown),
        jobs=tuple(shown),
        partitions=settings.partitions,
        shares=settings.shares,
        usage=usage,
        quotas={name: quota - ending.get(name, 0) for name, quota in quotas.items()},
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
    """Jobs that wait for one that is over and did not finish, and those behind them: (job, the other, what became of
    that)."""
    followers: dict[int, list[int]] = {}
    for job in jobs:
        for number in job.asked.after if job.state == WAITING else ():
            followers.setdefault(number, []).append(job.number)
    ends = {FAILED: "failed", CANCELLED: "was cancelled"}
    ended = {number: ends[states[number]] for number in followers if states.get(number) in ends}
    found: dict[int, tuple[int, int, str]] = {}
    todo = list(ended)
    for number in todo:  # it grows while it is gone through
        for behind in followers.get(number, ()):
            if behind not in found:
                found[behind] = behind, number, ended.get(number, ends[CANCELLED])
                todo.append(behind)
    return list(found.values())


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


@dataclass(slots=True)
class Room:
    """What nobody holds, node by node; of GPUs also how much of each device."""

    cores: dict[str, float]
    memory: dict[str, int]
    disk: dict[str, int]
    gpus: dict[str, float]
    devices: dict[tuple[str, int], float] = field(default_factory=dict)

    def take(self, ask: Ask, allocation: Allocation, devices: Devices, sign: int = 1) -> None:
        """Reserve it, or with a `sign` of -1 give it back. Nodes that are gone have no room to speak of."""
        for name, workers in allocation.items():
            if name not in self.cores:
                continue
            self.cores[name] -= sign * workers * ask.cores
            self.memory[name] -= sign * workers * ask.memory_bytes
            self.disk[name] -= sign * workers * ask.disk_bytes
            self.gpus[name] -= sign * workers * ask.gpus
            for device in devices.get(name, ()):
                self.devices[name, device] = self.devices.get((name, device), 1.0) - sign * min(ask.gpus, 1.0)

    def is_sound(self, ask: Ask, allocation: Allocation, devices: Devices) -> bool:
        """Whether nothing of what this needs was given out twice."""
        return all(
            name in self.cores
            and (not ask.cores or self.cores[name] > -1e-6)
            and (not ask.memory_bytes or self.memory[name] >= 0)
            and (not ask.disk_bytes or self.disk[name] >= 0)
            and (not ask.gpus or self.gpus[name] > -1e-6)
            and all(self.devices.get((name, device), 1.0) > -1e-6 for device in devices.get(name, ()))
            for name in allocation
        )


def room_of(nodes: Iterable[Node], jobs: Iterable[Job]) -> Room:
    """What is free in truth: what is being given up still counts as held."""
    nodes = list(nodes)
    room = Room(
        {node.name: node.cores for node in nodes},
        {node.name: node.memory_bytes for node in nodes},
        {node.name: node.disk_bytes for node in nodes},
        {node.name: float(node.gpus) for node in nodes},
    )
    for job in jobs:
        if job.allocation:
            room.take(needs_of(job), job.allocation, job.devices)
    return room


@dataclass(slots=True)
class _Turn:
    """What can be done of one set of decisions, as far as it was looked at."""

    jobs: Mapping[int, Job]
    people: Mapping[str, Person]
    promised: dict[int, Promise]
    now: float
    room: Room
    used: dict[str, int]
    todo: list[Todo] = field(default_factory=list)
    waits: dict[int, Wait] = field(default_factory=dict)
    leaving: set[int] = field(default_factory=set)

    def stop(self, job: Job, why: str) -> None:
        self.promised.pop(job.number, None)
        if job.is_active and not job.wish:
            self.todo.append(Todo(number=job.number, why=why))
            self.leaving.add(job.number)

    def promise(self, job: Job, place: Place) -> None:
        """It is to run there as soon as those who are there have gone."""
        self.promised[job.number] = Promise(place=place, at=self.now)

    def change(self, job: Job, place: Place) -> None:
        """Another size for one that runs, as far as it can go on with it. Else it is stopped, to start there."""
        had, devices = held_by(job)
        # What it had on nodes that are gone, it has no more: others in their place are a growth.
        there = {name: workers for name, workers in had.items() if name in self.room.cores}
        both = _in_common(there, devices, place)
        is_more = sum(place.allocation.values()) > sum(there.values())
        if job.asked.is_elastic and both and both == there and is_more:
            self.grow(job, place)
        elif both == had:
            return
        elif job.asked.is_elastic and sum(both.values()) >= job.min_workers:
            # What it is to have elsewhere it gets by a later decision: it goes on meanwhile.
            smaller = Place(job=place.job, allocation=both, devices=_first(devices, had, both), why=place.why)
            self.todo.append(_todo(job, smaller))
            self.leaving.add(job.number)
        elif job.asked.is_preemptible and job.state == RUNNING:
            self.stop(job, place.why)
            self.promise(job, place)

    def lower(self, job: Job, lower: Lower) -> None:
        """It saves, and goes on where it is with less memory: that cannot be taken from processes that run."""
        allocation, devices = held_by(job)
        self.stop(job, lower.why)
        place = Place(job=lower.job, allocation=allocation, devices=devices, why=lower.why)
        self.promised[job.number] = Promise(place=place, at=self.now, memory_bytes=lower.memory_bytes)

    def grow(self, job: Job, place: Place) -> None:
        if job.target is None and not self.over_quota(job, place) and self.fits(job, place):
            devices = {
                name: _in_order(held_by(job)[1].get(name, ()), wanted) for name, wanted in place.devices.items()
            }
            self.todo.append(_todo(job, replace(place, devices=devices)))

    def begin(self, job: Job, promise: Promise) -> None:
        """Start it where it was promised to, or say for whom it waits."""
        place = promise.place
        if self.over_quota(job, place):
            why = f"{job.owner} may use no more workers at once"
        elif self.fits(job, place, promise.memory_bytes):
            why = ""
            self.todo.append(_todo(job, place, promise.memory_bytes))
        else:
            why = self.who_leaves(place)
            if why:
                self.waits[job.number] = Wait(job=place.job, why=why, position=1)
                return
            why = "its nodes are in use"
        del self.promised[job.number]
        if why:
            self.waits[job.number] = Wait(job=place.job, why=why, position=1)

    def over_quota(self, job: Job, place: Place) -> bool:
        quota = self.people[job.owner].max_workers if job.owner in self.people else None
        more = sum(place.allocation.values()) - job.num_reserved
        return quota is not None and self.used.get(job.owner, 0) + more > quota

    def fits(self, job: Job, place: Place, memory_bytes: int | None = None) -> bool:
        """Whether there is room for it in truth; if so, it is taken."""
        ask = ask_of(job.asked, job.lowered_bytes if memory_bytes is None else memory_bytes)
        self.room.take(needs_of(job), job.allocation, job.devices, -1)
        self.room.take(ask, place.allocation, place.devices)
        if self.room.is_sound(ask, place.allocation, place.devices):
            more = sum(place.allocation.values()) - job.num_reserved
            self.used[job.owner] = self.used.get(job.owner, 0) + more
            return True
        self.room.take(ask, place.allocation, place.devices, -1)
        self.room.take(needs_of(job), job.allocation, job.devices)
        return False

    def who_leaves(self, place: Place) -> str:
        """Who is still on those nodes and is going, in words; empty if nobody is."""
        going = [
            job.number
            for job in self.jobs.values()
            if (job.wish or job.target is not None or job.number in self.leaving)
            and any(name in job.allocation for name in place.allocation)
        ]
        if not going:
            return ""
        shown = ", ".join(map(str, going[:3])) + (f" and {len(going) - 3} more" if len(going) > 3 else "")
        return f"its nodes are being made free by job{'s' * (len(going) > 1)} {shown}"


def can_do(
    decisions: Iterable[Decision],
    jobs: Mapping[int, Job],
    nodes: Sequence[Node],
    people: Mapping[str, Person],
    promised: Promises = _NO_PROMISES,
    now: float = 0.0,
    lowers: Iterable[Lower] = (),
) -> tuple[list[Todo], dict[int, Wait], dict[int, Promise]]:
    """What can be done now, who waits for what, and who is promised nodes that others are still leaving.

    `lowers` are jobs that give memory back.
    """
    used = _workers_in_use(jobs.values())
    turn = _Turn(jobs, people, dict(promised), now, room_of(nodes, jobs.values()), used)
    for decision in decisions:
        found = jobs.get(int(decision.job))
        if found is None or found.wish == "cancel":
            continue
        if isinstance(decision, Wait):
            turn.waits |= {found.number: decision} if found.state == WAITING else {}
        elif isinstance(decision, Stop):
            turn.stop(found, decision.why)
        elif found.is_active and not found.wish:
            turn.change(found, decision)
        elif can_be_promised(found):
            turn.promise(found, decision)
    for lower in lowers:
        found = jobs.get(int(lower.job))
        if found is not None and found.state == RUNNING:
            turn.lower(found, lower)
    for number, promise in list(turn.promised.items()):
        if jobs[number].state == WAITING:
            turn.begin(jobs[number], promise)
    return turn.todo, turn.waits, turn.promised


def still_promised(promised: Promises, jobs: Mapping[int, Job], nodes: Sequence[Node]) -> dict[int, Promise]:
    """The promises that can still be kept: not to jobs that are over, held or resized, nor of nodes that are gone."""
    able = {node.name for node in nodes if not node.is_draining}
    return {
        number: promise
        for number, promise in promised.items()
        if number in jobs
        and can_be_promised(jobs[number])
        and can_have(jobs[number], promise.place.allocation)
        and able >= set(promise.place.allocation)
    }


def can_be_promised(job: Job) -> bool:
    """Whether it may start as soon as there is room: it waits, or is being stopped to go on later."""
    return not job.is_held and (job.state == WAITING or job.wish == "preempt")


def can_have(job: Job, allocation: Allocation) -> bool:
    """Whether these are as many workers as it asks for by now: it may have been resized since that was decided."""
    return job.min_workers <= sum(allocation.values()) <= job.max_workers


def held_by(job: Job) -> tuple[Allocation, Devices]:
    """What it has, or will have once it has shrunk."""
    return (job.allocation, job.devices) if job.target is None else (job.target, job.target_devices)


def _todo(job: Job, place: Place, memory_bytes: int | None = None) -> Todo:
    return Todo(
        number=job.number,
        allocation=place.allocation,
        devices=place.devices,
        why=place.why,
        memory_bytes=memory_bytes,
    )


def _first(devices: Devices, had: Allocation, keep: Allocation) -> dict[str, tuple[int, ...]]:
    """The GPUs of the first workers on each node: the last ones are those that go."""
    return {
        name: devices[name][: len(devices[name]) // had[name] * workers]
        for name, workers in keep.items()
        if devices.get(name)
    }


def _in_common(had: Allocation, devices: Devices, place: Place) -> dict[str, int]:
    """How many of its first workers on each node a job keeps there, with the GPUs they have."""
    common = {}
    for name, workers in place.allocation.items():
        count, own = min(had.get(name, 0), workers), devices.get(name, ())
        while count and not _is_within(own[: len(own) // had[name] * count], place.devices.get(name, own)):
            count -= 1
        if count:
            common[name] = count
    return common


def _in_order(had: Sequence[int], wanted: Sequence[int]) -> tuple[int, ...]:
    """GPUs of which workers that run have the first: they found them in this order, and keep them."""
    left = list(wanted)
    for device in had:
        left.remove(device)
    return (*had, *left)


def _is_within(part: Sequence[int], whole: Sequence[int]) -> bool:
    left = list(whole)
    for device in part:
        if device not in left:
            return False
        left.remove(device)
    return True
