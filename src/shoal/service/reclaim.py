"""Memory that running jobs reserved and others wait for: who gives how much of it back. Pure."""

from collections.abc import Iterable, Mapping, Sequence

from shoal.place.cluster import Node
from shoal.place.decision import Decision, Place, Wait
from shoal.service.deciding import cut, room_of
from shoal.service.job import Job

IDLE_PART = 0.5
"""Whoever uses less than this part of what they reserved is asked first."""

SETTLED_SECONDS = 30.0
"""What a job uses is not known before it has trained for a while."""


def reclaim(
    decisions: Sequence[Decision],
    jobs: Mapping[int, Job],
    nodes: Sequence[Node],
    peaks: Mapping[int, int],
    now: float,
) -> list[Decision]:
    """Cuts of elastic jobs that make room for the first one that waits for memory and nothing else.

    `peaks` is the most memory one worker of a job has used, in bytes, where it is known. Jobs that use the least of
    what they reserved give first, then those that have most to spare; none goes below its least number of workers.
    Nothing is taken where it would not be enough.
    """
    touched = {decision.job for decision in decisions if not isinstance(decision, Wait)}
    waiting = [decision for decision in decisions if isinstance(decision, Wait) and decision.position]
    for wait in sorted(waiting, key=lambda wait: wait.position):
        job = jobs.get(int(wait.job))
        if job is None or job.is_active or not job.asked.memory_bytes:
            continue
        givers = [
            each
            for each in jobs.values()
            if each.state == "running"
            and not each.wish
            and each.target is None
            and str(each.number) not in touched
            and each.asked.is_elastic
            and each.num_reserved > each.min_workers
            and now - each.changed_at >= SETTLED_SECONDS
            and each.asked.priority <= job.asked.priority
        ]
        # Room that is being made already comes first: nobody is asked twice for the same need.
        if any(each.wish or each.target is not None for each in jobs.values()):
            return []
        return list(_make_room(job, sorted(givers, key=lambda each: _order(each, peaks)), jobs, nodes))
    return []


def _order(job: Job, peaks: Mapping[int, int]) -> tuple[bool, float, int]:
    """Who is asked first."""
    used = peaks.get(job.number, 0) / max(job.asked.memory_bytes, 1)
    is_idle = job.number in peaks and used < IDLE_PART
    return not is_idle, used if is_idle else -float(job.num_reserved - job.min_workers), job.number


def _make_room(job: Job, givers: Sequence[Job], jobs: Mapping[int, Job], nodes: Sequence[Node]) -> Iterable[Place]:
    """The fewest cuts, one worker at a time, after which the job fits on one node."""
    able = [node for node in nodes if not node.is_draining and node.partition == job.asked.partition]
    best: list[Place] | None = None
    for node in able:
        found = _on_node(job, givers, jobs, nodes, node.name)
        if found and (best is None or len(found) < len(best)):
            best = found
    return best or []


def _on_node(
    job: Job, givers: Sequence[Job], jobs: Mapping[int, Job], nodes: Sequence[Node], name: str
) -> list[Place] | None:
    room = room_of(nodes, jobs.values())
    room.take(job, {name: job.min_workers})
    if room.cores[name] < -1e-6 and not givers:
        return None
    cuts: list[Place] = []
    for giver in givers:
        here, given = giver.allocation.get(name, 0), 0
        while not room.is_sound((name,)) and given < min(here, giver.num_reserved - giver.min_workers):
            room.take(giver, {name: 1}, -1)
            given += 1
        if given:
            keep = {node: workers - (given if node == name else 0) for node, workers in giver.allocation.items()}
            why = f"{given} of its workers make room for job {job.number}, which waits for memory"
            if len(keep) == 1:
                cuts.append(cut(giver, giver.num_reserved - given, why))
            else:
                left = {node: workers for node, workers in keep.items() if workers}
                cuts.append(Place(job=str(giver.number), allocation=left, why=why))
        if room.is_sound((name,)):
            return cuts
    return None
