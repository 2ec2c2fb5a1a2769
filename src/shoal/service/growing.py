"""A cluster that Ray's autoscaler makes larger: what it is asked for, so that jobs that wait get room. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from shoal.place.cluster import Ask, Cluster, Node
from shoal.place.decision import Wait
from shoal.spec import amounts

if TYPE_CHECKING:
    from shoal.place.draft import Draft
    from shoal.place.fit import Finder

PATIENCE_SECONDS = 600.0
"""How long a cluster is asked for the same machines before it is left alone for as long: it may not have them."""
MAX_JOBS = 100
"""How many jobs that wait, the first ones, machines are asked for at once."""

Bundle = Mapping[str, float]
"""What Ray is asked to have together on one machine, in its own words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Machines that may be added: up to `most` like `node`, counting those of this group that are there."""

    node: Node
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is missing: machines by group, for the workers that `asks` lists; and the same job by job."""

    nodes: Mapping[str, int] = field(default_factory=dict)
    asks: tuple[Ask, ...] = ()
    jobs: Mapping[int, Mapping[str, int]] = field(default_factory=dict)


NOTHING = Wanted()


@dataclass(frozen=True, slots=True, kw_only=True)
class Hope:
    """What has been wanted since when."""

    wanted: Wanted = NOTHING
    since: float = 0.0

    def is_asked(self, now: float) -> bool:
        """Whether the cluster is asked now. When its time is over it is left alone for as long, and asked again."""
        return bool(self.wanted.nodes) and (now - self.since) % (2 * PATIENCE_SECONDS) < PATIENCE_SECONDS


def may_be_there(growth: Mapping[str, Growth], present: Mapping[str, int]) -> tuple[tuple[str, Node], ...]:
    """The machines that could still come, each with its group. `present` counts those that are there, by group."""
    return tuple(
        (group, replace(each.node, name=f"{group}+{number}"))
        for group, each in growth.items()
        for number in range(1, each.most - present.get(group, 0) + 1)
    )


def find_wanted(
    cluster: Cluster, waits: Mapping[int, Wait], growth: Mapping[str, Growth], present: Mapping[str, int]
) -> Wanted:
    """The machines without which jobs that wait have no room, and with which they do: as few as they need to begin.

    Jobs that wait for something else get nothing; nor do those that would not fit with all that may come.
    """
    from shoal.place.draft import draft_of
    from shoal.place.waiting import waits_for_room

    extra = may_be_there(growth, present)
    first = sorted((wait.position, number) for number, wait in waits.items() if waits_for_room(wait))[:MAX_JOBS]
    if not extra or not first:
        return NOTHING
    numbers = {str(number): number for _, number in first}
    shown = tuple(job for job in cluster.jobs if job.allocation or job.id in numbers)
    draft = draft_of(replace(cluster, nodes=(*cluster.nodes, *(node for _, node in extra)), jobs=shown))
    there = len(cluster.nodes)
    later = range(there, there + len(extra))
    on_present = _finder_without(draft, later)
    # Those with GPUs only where it cannot be without, as Ray does.
    on_later = (
        _finder_without(draft, range(there)),
        _finder_without(draft, [*range(there), *(at for at in later if draft.free.space.nodes[at].gpus)]),
    )
    used: dict[int, set[int]] = {}
    asks: list[Ask] = []
    for name, number in numbers.items():
        if name in draft.jobs and (spots := _find_room(draft, name, on_present, on_later)):
            used[number] = set(spots)
            asks += [draft.jobs[name].ask] * sum(spots.values())
    groups = [group for group, _ in extra]
    return Wanted(
        nodes=Counter(groups[at - there] for at in set().union(*used.values())),
        asks=tuple(asks),
        jobs={number: Counter(groups[at - there] for at in spots) for number, spots in used.items()},
    )


def _finder_without(draft: "Draft", barred: Iterable[int]) -> "Finder":
    """One for the nodes of the draft on which nothing is found on these."""
    finder = draft.free.over(draft.free.space)
    finder.barred = frozenset(barred)
    return finder


def _find_room(
    draft: "Draft", name: str, on_present: "Finder", on_later: "tuple[Finder, Finder]"
) -> Mapping[int, int]:
    """Seat a job: as many workers as can be on what is there, the others on what may come; returns those. `on_later`
    finds nodes for whoever needs GPUs, and for others.

    Where that is not enough, none is seated.
    """
    from shoal.place.fit import zones_of

    job, need = draft.jobs[name], draft.needs[name]
    zone = zones_of(job, draft.partitions)[1]
    here = min(on_present.most(need, zone), job.min_workers)
    if here and (spots := on_present.pick(job, need, here, zone)):
        draft.hold(job, spots)
    if here == job.min_workers:
        return {}
    rest = None
    for finder in on_later[:1] if job.ask.gpus else reversed(on_later):
        rest = rest or finder.pick(job, need, job.min_workers - here, zone)
    if rest is not None:
        draft.hold(job, rest)
    elif here:
        draft.drop(name)
    return rest or {}


def go_on(hope: Hope, wanted: Wanted, now: float) -> Hope:
    """What is hoped for after another look. The time runs anew where other machines are wanted, or fewer."""
    return Hope(wanted=wanted, since=hope.since if wanted.nodes == hope.wanted.nodes else now)


def bundles_of(wanted: Wanted, growth: Mapping[str, Growth], present: Sequence[Bundle]) -> list[dict[str, float]]:
    """What to ask Ray for: it wants to hear of all that is to fit at once, as if nothing were in use.

    So what is there is named whole, machine by machine, and the workers that have no room after that.
    """
    has_memory = any(each.node.memory_bytes for each in growth.values())
    asked = [
        {"CPU": ask.cores, "GPU": ask.gpus, "memory": float(ask.memory_bytes) if has_memory else 0.0}
        for ask in wanted.asks
    ]
    filled = [{name: amount for name, amount in each.items() if amount} for each in (*present, *asked)]
    return [bundle for bundle in filled if bundle]


def tell_waits(waits: Mapping[int, Wait], hope: Hope, growth: Mapping[str, Growth], now: float) -> dict[int, Wait]:
    """Reasons of those for whom machines are wanted."""
    told = dict(waits)
    minutes = f"{PATIENCE_SECONDS / 60:.0f} minutes"
    for number, nodes in hope.wanted.jobs.items():
        what = " and ".join(_describe(group, count, growth[group].node) for group, count in sorted(nodes.items()))
        why = f"asked the cluster for {what}"
        if not hope.is_asked(now):
            why = f"the cluster was asked for {what}, and did not add them within {minutes}; it is asked again later"
        told[number] = replace(waits[number], why=why, eta_seconds=None)
    return told


def _describe(group: str, count: int, node: Node) -> str:
    has = [amounts.cores(node.cores)]
    has += [amounts.gpus(node.gpus)] if node.gpus else []
    has += [f"{amounts.gib(node.memory_bytes)} of memory"] if node.memory_bytes else []
    return f"{count} more node{'s' * (count != 1)} of {group!r} ({', '.join(has)})"
