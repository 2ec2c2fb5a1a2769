"""Why a job waits and for how long: reasons that are true at this moment, and times where they can be told."""

import heapq
from collections.abc import Sequence

from shoal.place.cluster import Queued
from shoal.place.decision import Wait
from shoal.place.draft import Draft
from shoal.place.fit import describe
from shoal.place.space import Need

KEPT = "room is kept for job "
NEEDS = "needs "
TOO_LARGE, TOO_LARGE_AT_HOME = "it can never start", "it can run only where others lend"
SHORT_OF_MEMORY = "memory is in use"
DRAINED = "all nodes it may use are being drained"
WORDS = {"cores": "cores", "memory": "memory", "disk": "disk", "gpu": "GPUs"}


def explain_room(draft: Draft, job: Queued, zone: frozenset[str], kept_for: str) -> str:
    """What it needs, how much of that has room, and what is short."""
    need = draft.needs[job.id]
    row = draft.free.row(need, zone)
    fits = row.total
    wants = f"{job.min_workers} workers with {describe(job)} each" if job.min_workers > 1 else describe(job)
    if fits >= job.min_workers:
        return f"{KEPT}{kept_for}, which has waited longest" if kept_for else "it starts next"
    has = f", room for {fits} now" if job.min_workers > 1 else ""
    return f"{NEEDS}{wants}{has}: {short_of(draft, need, zone)}"


def short_of(draft: Draft, need: Need, zone: frozenset[str]) -> str:
    """The resource without which more workers would have room; where several are short, that is said."""
    mask = draft.free.mask(need.kinds, zone)
    if not mask.any():
        return DRAINED
    fits = draft.free.row(need, zone).total
    short = []
    for name, word in WORDS.items():
        less = Need(
            0 if name == "cores" else need.cores,
            0 if name == "memory" else need.memory,
            0 if name == "disk" else need.disk,
            0 if name == "gpu" else need.whole,
            0 if name == "gpu" else need.share,
            need.kinds,
        )
        if less != need and draft.free.row(less, zone).total > fits:
            short.append(word)
    if not short:
        return "several resources are in use at once"
    if short == ["memory"]:
        return SHORT_OF_MEMORY
    return f"{' and '.join(short)} {'are' if short[-1] in ('cores', 'GPUs') or len(short) > 1 else 'is'} in use"


def waits_for_room(wait: Wait) -> bool:
    """Whether more nodes would help it: nothing else stands in its way."""
    return wait.why.startswith((NEEDS, TOO_LARGE, TOO_LARGE_AT_HOME))


def waits_for_drained(wait: Wait) -> bool:
    """Whether it waits for nodes that are being drained: until people undo that, whoever else ends."""
    return wait.why.endswith(DRAINED)


def waits_for_memory(wait: Wait) -> bool:
    """Whether it is memory that is short, and nothing else stands in its way."""
    return wait.why.endswith(SHORT_OF_MEMORY)


def estimate_starts(draft: Draft, waiting: Sequence[Queued]) -> dict[str, float]:
    """Seconds until each job would start if all went in this order, and every job took as long as it is said to.

    Counts GPUs, or cores for jobs without, in each partition, and not how they lie. Jobs behind one that nobody knows
    the length of get no time.
    """
    if not waiting:
        return {}
    now = draft.cluster.now
    pools: dict[tuple[str, bool], list[tuple[float, int]]] = {}
    free: dict[tuple[str, bool], int] = {}
    space = draft.free.space
    for node, cores, gpus in zip(space.nodes, space.cores, space.gpu, strict=True):
        if not node.is_draining:
            free[node.partition, False] = free.get((node.partition, False), 0) + cores
            free[node.partition, True] = free.get((node.partition, True), 0) + sum(gpus)
    for name, held in draft.held.items():
        job, need = draft.jobs[name], draft.taken(name)
        kinds = {space.nodes[at].kind for at in held}
        left = seconds_left(job, sum(workers for workers, _ in held.values()), len(held), min(kinds, default=""))
        for at, (workers, _) in held.items():
            partition = space.nodes[at].partition
            for has_gpu, amount in ((False, need.cores), (True, need.gpu)):
                if amount and left is not None:
                    pools.setdefault((partition, has_gpu), []).append((now + left, workers * amount))
    for pool in pools.values():
        heapq.heapify(pool)
    starts: dict[str, float] = {}
    clocks: dict[tuple[str, bool], float] = {}
    closed: set[tuple[str, bool]] = set()
    for job in waiting:
        need = draft.needs[job.id]
        key = job.partition, bool(need.gpu)
        if key in closed:
            continue
        amount = (need.gpu or need.cores) * job.min_workers
        pool, clock = pools.setdefault(key, []), clocks.get(key, now)
        while free.get(key, 0) < amount and pool:
            end, given = heapq.heappop(pool)
            clock, free[key] = max(clock, end), free.get(key, 0) + given
        if free.get(key, 0) < amount:
            closed.add(key)
            continue
        free[key] -= amount
        clocks[key] = clock
        starts[job.id] = clock - now
        length = seconds_left(job, job.min_workers)
        if length is not None:
            heapq.heappush(pool, (clock + length, amount))
    return starts


def seconds_left(job: Queued, workers: int = 0, nodes: int = 1, kind: str = "") -> float | None:
    """How long it will still run, as far as that is known: an estimate, else its time limit.

    An estimate is for its largest size; with `workers` it is for so many, by its rate, or as if all were as useful.
    """
    if job.remaining_seconds is not None:
        left = max(job.remaining_seconds, 0.0)
        if not workers or workers == job.max_workers:
            return left
        if job.rate is None:
            return left * job.max_workers / workers
        most, here = job.rate(kind, job.max_workers, nodes), job.rate(kind, workers, nodes)
        return left * most / here if most > 0 and here > 0 else left
    if job.time_limit_seconds is not None:
        return max(job.time_limit_seconds - job.run_seconds, 0.0)
    return None
