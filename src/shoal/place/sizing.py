"""How large elastic jobs should be: whoever gains most from the next workers gets them, by its measured rate.

Each job's value at each size is how fast it would come closer to its end, with what a change of its size costs taken
off, times what an end of it is worth. Of each job only the concave hull of (workers, value) counts, so the steepest
next piece of all hulls is the best use of the next workers, and a heap finds it: a decision costs n log n.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shoal.place.cluster import Queued, Rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What the sizes weigh.

    Where most lengths are known or learned, what a job's progress is worth follows from who ends before whom, and
    speed is thought to grow with the `power` of its workers (`worths`): twice as fast on four times as many.

    Elsewhere it is (what is thought to be left)^-`urgency`, in seconds on one worker: `lindy` times as much as the
    job got so far, and `fresh_seconds`, as jobs are of all lengths and one that ran long will run long. `bend` below
    1 makes further workers of one job worth less there, for fairness among those of whom nothing is known.

    A change of size must pay for its pause within `horizon_seconds`, or `known_horizon_seconds` where lengths are
    known, about as long as a size lasts (both chosen on drawn workloads); or before the job ends if that is sooner.
    """

    power: float = 0.5
    urgency: float = 0.25
    lindy: float = 1.0
    fresh_seconds: float = 600.0
    horizon_seconds: float = 300.0
    known_horizon_seconds: float = 600.0
    bend: float = 0.5


USUAL_TUNING = Tuning()


@dataclass(frozen=True, slots=True)
class Member:
    """An elastic job whose size is to be chosen. `speeds` are workers -> speed, in those of one worker; `bend` is the
    power of them that counts, and `horizon_seconds` the time in which a change must pay."""

    job: Queued
    has: int
    left_seconds: float
    speeds: Mapping[int, float]
    worth: float = 1.0
    bend: float = 1.0
    horizon_seconds: float = 0.0


def sizes_between(smallest: int, largest: int, per_node: int) -> list[int]:
    """The sizes that are thought of: halves of a node, then 1, 2, 3, 4, 6, 8, 12, 16, ... whole nodes."""
    sizes, size = {smallest}, 1
    while size < per_node:
        sizes.add(size)
        size *= 2
    size = per_node
    while size <= largest:
        sizes |= {size, size + size // 2 // per_node * per_node}
        size *= 2
    return sorted(size for size in sizes if smallest <= size <= largest)


def is_known(jobs: Sequence[Queued]) -> bool:
    """Whether lengths decide: one rule for all who are compared, or the unknown would pass all others."""
    return 2 * sum(job.remaining_seconds is not None for job in jobs) > len(jobs)


def weigh(members: Sequence[Member], room: int, by_length: bool, tuning: Tuning) -> list[Member]:
    """The members with what their progress is worth, `by_length` or by how little they got so far."""
    if by_length:
        found = zip(members, worths(members, room, tuning.power), strict=True)
        return [replace(member, worth=worth, horizon_seconds=tuning.known_horizon_seconds) for member, worth in found]
    return [
        replace(
            member,
            worth=member.job.weight * member.left_seconds**-tuning.urgency,
            bend=tuning.bend,
            horizon_seconds=tuning.horizon_seconds,
        )
        for member in members
    ]


def worths(members: Sequence[Member], room: int, power: float) -> list[float]:
    """How much waiting a second of work less in each job saves all of them together, up to one factor.

    Where speed grows with that power of the workers, completion times are least in sum if the j-th job from the end
    counts (j^q - (j-1)^q)^(1/q), q = 1 / (1 - power), whatever the lengths are: heSRPT (Berg, Vesilo and
    Harchol-Balter, 2020). Here weights are summed in place of jobs, and each has its own speeds.
    """
    share = max(room // max(len(members), 1), 1)

    def seconds(number: int) -> float:
        speeds = members[number].speeds
        fair = max((size for size in speeds if size <= share), default=min(speeds))
        return members[number].left_seconds / max(speeds[fair], 1e-9)

    found, behind, q = [0.0] * len(members), 0.0, 1.0 / (1.0 - power)
    for number in sorted(range(len(members)), key=seconds, reverse=True):
        member = members[number]
        size = max(member.speeds, key=lambda size: (member.speeds[size], -size))
        with_it = behind + member.job.weight
        scale = max(member.speeds[size], 1e-9) / size**power
        found[number] = (with_it**q - behind**q) ** (1.0 / q) / scale
        behind = with_it
    return found


def member_of(job: Queued, largest: int, per_node: int, kind: str, tuning: Tuning) -> Member:
    has = job.num_workers
    sizes = sizes_between(job.min_workers, largest, per_node)
    if has and has not in sizes and has <= largest:
        sizes = sorted([*sizes, has])
    rate: Rate = job.rate if job.rate is not None else _linear
    one = max(rate(kind, 1, 1), 1e-12)
    speeds = {size: rate(kind, size, -(-size // per_node)) / one for size in sizes}
    if job.remaining_seconds is not None:
        most = rate(kind, job.max_workers, -(-job.max_workers // per_node)) / one
        left = max(job.remaining_seconds * most, 1.0)
    else:
        left = tuning.lindy * job.service_seconds + tuning.fresh_seconds
    return Member(job, has, left, speeds)


def _linear(kind: str, workers: int, nodes: int) -> float:
    return float(workers)


def value_of(member: Member, size: int) -> float:
    """What that size is worth: the speed, less the pause if it is a change, over the time until the next one."""
    speed = member.speeds[size]
    if member.bend != 1.0:
        speed = speed**member.bend
    if size == member.has or not speed:
        return member.worth * speed
    seconds = min(member.left_seconds / member.speeds[size], member.horizon_seconds)
    job = member.job
    pause = job.stop_seconds if job.resize_seconds is None else job.resize_seconds
    return member.worth * speed * seconds / (seconds + pause)


def admit(jobs: Iterable[Queued], room: int, budgets: dict[str, int]) -> list[Queued]:
    """Those who can have their smallest size, in this order, while there is `room`.

    `budgets` are how many workers each owner may have; those who are not named have no limit.
    """
    left, admitted = dict(budgets), []
    for job in jobs:
        smallest = job.min_workers
        if smallest <= room and smallest <= left.get(job.owner, smallest):
            admitted.append(job)
            room -= smallest
            if job.owner in left:
                left[job.owner] -= smallest
    return admitted


def choose_sizes(members: Sequence[Member], room: int, budgets: Mapping[str, int]) -> dict[str, int]:
    """Workers for each of those who were admitted to this `room` and these `budgets`: the smallest size or more."""
    left = dict(budgets)
    sizes: dict[str, int] = {}
    hulls: list[list[tuple[int, float]]] = []
    heap: list[tuple[float, int, int]] = []
    for number, member in enumerate(members):
        smallest = sizes[member.job.id] = member.job.min_workers
        room -= smallest
        if member.job.owner in left:
            left[member.job.owner] -= smallest
        hulls.append(_hull([(size, value_of(member, size)) for size in sorted(member.speeds)]))
        _push(heap, number, hulls[number], 0)
    while heap and room:
        _, number, at = heapq.heappop(heap)
        member, hull = members[number], hulls[number]
        more = hull[at + 1][0] - hull[at][0]
        allowed = min(room, left.get(member.job.owner, room))
        if more > allowed:
            # What is left may still do for a smaller step of the same job.
            size, value = hull[at]
            fits = [k for k in sorted(member.speeds) if size < k <= size + allowed]
            rest = [(k, value_of(member, k)) for k in fits]
            hulls[number] = [*hull[: at + 1], *_hull([(size, value), *rest])[1:]]
            _push(heap, number, hulls[number], at)
            continue
        sizes[member.job.id] = hull[at + 1][0]
        room -= more
        if member.job.owner in left:
            left[member.job.owner] -= more
        _push(heap, number, hull, at + 1)
    return sizes


def _push(heap: list[tuple[float, int, int]], number: int, hull: list[tuple[int, float]], at: int) -> None:
    if at + 1 < len(hull):
        slope = (hull[at + 1][1] - hull[at][1]) / (hull[at + 1][0] - hull[at][0])
        heapq.heappush(heap, (-slope, number, at))


def _hull(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """The concave, rising part above these points."""
    hull: list[tuple[int, float]] = []
    for x, y in points:
        if hull and y <= hull[-1][1]:
            continue
        while len(hull) > 1:
            (x0, y0), (x1, y1) = hull[-2], hull[-1]
            if (y1 - y0) * (x - x1) > (y - y1) * (x1 - x0):
                break
            hull.pop()
        hull.append((x, y))
    return hull
