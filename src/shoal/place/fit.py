"""Where workers go: where least is lost for what is usually asked for; near data, over fast links, or spread."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from shoal.place.cluster import Cluster, Node, Partition, Queued
from shoal.place.mix import Floats, Mix
from shoal.place.space import (
    MILLI,
    Bools,
    Ints,
    Need,
    Space,
    State,
    Table,
    count_in,
    mask_of,
    need_of,
    state_after,
)
from shoal.place.states import Numbered, States
from shoal.spec import amounts
from shoal.spec.errors import UserError

Links = Mapping[tuple[str, str], float]
Spots = dict[int, int]
"""Number of a node -> how many workers there."""

DATA_WEIGHT = 4.0
"""A node that holds all of a job's data goes before every fit: copying takes longer than a gap costs."""

SCARCE_WEIGHT = 0.5
"""What a GPU costs that others ask for by its kind, against one that is lost."""
FIT_WEIGHT = 0.001
"""Best fit only decides between nodes that lose the same."""

NEVER = np.inf
DIGITS = 12
FEW = 16
"""So many states are looked at one by one; numpy pays for more."""

MAX_SEEDS = 8
MAX_LINKED = 64


@dataclass(slots=True)
class Row:
    """What is known of every node of a `mask` for one need: workers that fit, `total` in all, and how well. `seen`
    changes are in the counts, `scored` in the scores: those are brought up to date when somebody has to choose.
    `refused` are the fewest workers that found no room, when so many `num_returns` had been given back."""

    mask: Bools
    fits: "Fits"
    counts: Ints
    total: int
    seen: int
    scores: Floats | None = None
    scored: int = 0
    refused: int = 0
    num_returns: int = -1


@dataclass(slots=True)
class Fits:
    """What one need makes of every state: workers that fit, and how well, as far as that was asked for. Which kinds
    of nodes it may use plays no part in that."""

    need: Need
    counts: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Finder:
    """Finds nodes in a `Space`. It remembers, need by need, how every node fits, and looks again where that changed.

    Scores are worked out for states, not for nodes, so a decision over ten thousand nodes costs little for each job.
    Nobody starts on nodes that are `barred`; those are never fewer than they were.
    """

    space: Space
    mix: Mix | None = None
    links: Links = field(default_factory=dict)
    barred: frozenset[int] = frozenset()
    rows: dict[tuple[Need, frozenset[str]], Row] = field(default_factory=dict)
    masks: dict[tuple[frozenset[str], frozenset[str]], Bools] = field(default_factory=dict)
    holders: dict[str, Bools] = field(default_factory=dict)
    states: States = field(default_factory=States)
    fits: dict[Need, Fits] = field(default_factory=dict)
    losses: dict[State, float] = field(default_factory=dict)
    numbered: Numbered = field(init=False)

    def __post_init__(self) -> None:
        self.numbered = Numbered(self.space, self.states)

    def over(self, space: Space) -> "Finder":
        """One for another space of the same nodes, which shares what is known of states; no node is barred there."""
        return Finder(
            space,
            self.mix,
            self.links,
            masks=self.masks,
            holders=self.holders,
            states=self.states,
            fits=self.fits,
            losses=self.losses,
        )

    def row(self, need: Need, zone: frozenset[str]) -> Row:
        """How many workers fit on every node, as of now. `zone` are the partitions it may use."""
        row = self.rows.get((need, zone))
        if row is None:
            row = self.rows[need, zone] = self._new_row(need, zone)
        self._renew(row)
        return row

    def _new_row(self, need: Need, zone: frozenset[str]) -> Row:
        anywhere = need.anywhere if need.kinds else need
        fits = self.fits.get(anywhere)
        if fits is None:
            fits = self.fits[anywhere] = Fits(anywhere)
        mask, numbers = self.mask(need.kinds, zone), self.numbered.now()
        counts = np.where(mask, np.array(self._counts(fits), np.int64)[numbers], 0)
        return Row(mask, fits, counts, int(counts.sum()), len(self.space.changes))

    def _renew(self, row: Row) -> None:
        changes = self.space.changes
        if row.seen == len(changes):
            return
        numbers, known, counts = self.numbered.now(), self._counts(row.fits), row.counts
        for at in _changed(changes, row.seen, row.mask):
            count = known[numbers[at]]
            row.total += count - counts.item(at)
            counts[at] = count
        row.seen = len(changes)

    def _scored(self, row: Row) -> Floats:
        """How bad it would be to put one worker on each node; never where none has room."""
        changes = self.space.changes
        if row.scores is None:
            row.scores = np.where(row.mask, np.array(self._scores(row.fits))[self.numbered.now()], NEVER)
        elif row.scored != len(changes):
            numbers, known, scores = self.numbered.now(), self._scores(row.fits), row.scores
            for at in _changed(changes, row.scored, row.mask):
                scores[at] = known[numbers[at]]
        row.scored = len(changes)
        return row.scores

    def mask(self, kinds: frozenset[str], zone: frozenset[str]) -> Bools:
        found = self.masks.get((kinds, zone))
        if found is None:
            nodes = self.space.nodes
            found = mask_of(nodes, kinds) & np.array([node.partition in zone for node in nodes], np.bool_)
            self.masks[kinds, zone] = found
        return found

    def _counts(self, fits: Fits) -> list[int]:
        """How many workers fit into every state; those that are new are worked out."""
        need, counts, listed = fits.need, fits.counts, self.states.listed
        if len(counts) < len(listed) - FEW:
            counts += self.states.table(len(counts), self.space.tops).counts(need, slice(None)).tolist()
        elif len(counts) < len(listed):
            counts += [count_in(state, need) for state in listed[len(counts) :]]
        return counts

    def _scores(self, fits: Fits) -> list[float]:
        """How well every state fits."""
        need, counts, scores = fits.need, self._counts(fits), fits.scores
        first = len(scores)
        if first < len(counts):
            scores += [NEVER] * (len(counts) - first)
            able = [at for at in range(first, len(counts)) if counts[at] > 0]
            if len(able) > FEW:
                table = self.states.table(first, self.space.tops)
                found = self.score(need, table, np.array(able) - first).tolist()
            else:
                found = [self.score_in(need, self.states.listed[at]) for at in able]
            for at, score in zip(able, found, strict=True):
                scores[at] = score
        return scores

    def score(self, need: Need, table: Table, at: Ints) -> Floats:
        """The lower the better, from -1 to 1: GPUs that one worker more would make useless for what usually comes.

        Those that others ask for by their kind are spared, and among equals the best fit goes first.
        """
        fit = FIT_WEIGHT * _fit(table, need, at)
        if self.mix is None:
            return fit
        worse = self.mix.lost(table.rooms_after(need, at)) - self.mix.lost(table.rooms(at))
        cost = (worse + SCARCE_WEIGHT * need.gpu * self.mix.scarce[table.kind[at]]) / MILLI
        # Equals must be equal whatever machine sums them up, or the last bit would decide.
        return np.round(cost / (1.0 + np.abs(cost)) + fit, DIGITS)

    def score_in(self, need: Need, state: State) -> float:
        """The same for one state."""
        fit = FIT_WEIGHT * _fit_in(state, self.space.tops, need)
        if self.mix is None:
            return fit
        worse = self._lost(state_after(state, need)) - self._lost(state)
        cost = (worse + SCARCE_WEIGHT * need.gpu * float(self.mix.scarce[state[0]])) / MILLI
        # As numpy rounds.
        return round((cost / (1.0 + abs(cost)) + fit) * 10.0**DIGITS) / 10.0**DIGITS

    def _lost(self, state: State) -> float:
        found = self.losses.get(state)
        if found is None:
            assert self.mix is not None
            found = self.losses[state] = self.mix.lost_in(state)
        return found

    def most(self, need: Need, zone: frozenset[str]) -> int:
        """How many workers with this need have room now."""
        row = self.row(need, zone)
        return row.total - sum([row.counts.item(at) for at in self.barred]) if self.barred else row.total

    def has_room(self, need: Need, workers: int, zone: frozenset[str]) -> bool:
        row = self.rows.get((need, zone))
        num_returns = self.space.num_returns
        if row is not None and row.num_returns == num_returns and workers >= row.refused:
            return False
        if self.most(need, zone) >= workers:
            return True
        row = self.rows[need, zone]
        row.refused, row.num_returns = workers, num_returns
        return False

    def pick(
        self, job: Queued, need: Need, workers: int, zone: frozenset[str], favour: Floats | None = None
    ) -> Spots | None:
        """Nodes for so many workers, all of them or None. `favour` is taken off the scores."""
        if not self.has_room(need, workers, zone):
            return None
        row = self.rows[need, zone]
        counts, scores = row.counts, self._scored(row)
        if self.barred:
            counts = counts.copy()
            counts[list(self.barred)] = 0
        if job.needs:
            scores = scores - DATA_WEIGHT * self.held_part(job.needs)
        if favour is not None:
            scores = scores - favour
        if job.is_spread:
            return _spread(counts, _fit(self.space.table(), need, slice(None)), workers)
        if workers == 1 and not self.barred:
            return {int(scores.argmin()): 1}
        alone = np.flatnonzero(counts >= workers)
        if len(alone):
            return {int(alone[scores[alone].argmin()]): workers}
        if self.links:
            return self._pick_linked(counts, scores, workers)
        return _pack(counts, scores, workers)

    def held_part(self, needs: frozenset[str]) -> Floats:
        """The part of what a job reads that is on each node already."""
        total = np.zeros(len(self.space.nodes))
        for name in needs:
            held = self.holders.get(name)
            if held is None:
                held = np.array([name in node.holds for node in self.space.nodes], np.bool_)
                self.holders[name] = held
            total += held
        return total / len(needs)

    def _pick_linked(self, counts: Ints, scores: Floats, workers: int) -> Spots | None:
        """Several nodes whose slowest link is as fast as can be found, then as few of them as possible."""
        order = np.lexsort((scores, -np.minimum(counts, workers)))
        order = order[counts[order] > 0]
        near = [int(at) for at in order[:MAX_LINKED]]
        best: tuple[float, int, Spots] | None = None
        for seed in near[:MAX_SEEDS]:
            spots, left, slowest = {seed: min(int(counts[seed]), workers)}, workers, NEVER
            left -= spots[seed]
            rates = {at: self._rate(seed, at) for at in near if at != seed}
            while left and rates:
                at = max(rates, key=lambda at: (rates[at], min(int(counts[at]), left), -scores[at]))
                slowest = min(slowest, rates.pop(at))
                spots[at] = min(int(counts[at]), left)
                left -= spots[at]
                rates = {other: min(rate, self._rate(at, other)) for other, rate in rates.items()}
            found = (-slowest, len(spots), spots)
            if not left and (best is None or found[:2] < best[:2]):
                best = found
        return best[2] if best else _pack(counts, scores, workers)

    def _rate(self, one: int, other: int) -> float:
        nodes = self.space.nodes
        pair = nodes[one].name, nodes[other].name
        return self.links.get(pair, self.links.get((pair[1], pair[0]), 0.0))


def _changed(changes: Sequence[int], seen: int, mask: Bools) -> list[int]:
    """Nodes of the mask that changed since."""
    return [at for at in set(changes[seen:]) if mask[at]]


def _fit(table: Table, need: Need, at: Ints | slice) -> Floats:
    """How much would be left, as parts of a full node. GPUs count most.

    A worker without a GPU avoids nodes that have some free, so that no GPU is left without cores.
    """
    tops = table.tops
    cores, memory, gpus = table.cores[at] / tops[0], table.memory[at] / tops[1], table.gpu_sum[at] / tops[2]
    if not need.gpu:
        return np.asarray(2 * gpus + cores + memory, np.float64)
    if need.share:
        free = table.gpu[at]
        left = np.where(free >= need.share, free - need.share, MILLI).min(axis=1) / MILLI
        return np.asarray(left + gpus + 0.25 * (cores + memory), np.float64)
    return np.asarray(2 * gpus + 0.25 * (cores + memory), np.float64)


def _fit_in(state: State, tops: Sequence[int], need: Need) -> float:
    """The same as `_fit`, for one state."""
    cores, memory, gpus = state[1] / tops[0], state[2] / tops[1], sum(state[4:]) / tops[2]
    if not need.gpu:
        return 2 * gpus + cores + memory
    if need.share:
        left = min([free - need.share if free >= need.share else MILLI for free in state[4:]]) / MILLI
        return left + gpus + 0.25 * (cores + memory)
    return 2 * gpus + 0.25 * (cores + memory)


def _pack(counts: Ints, scores: Floats, workers: int) -> Spots:
    """As few nodes as possible; the last one is the best fit for what is left. There is room for all."""
    spots: Spots = {}
    left = workers
    finite = np.where(counts > 0, scores, 0.0)
    key = np.minimum(counts, workers) - (finite - finite.min()) / (np.ptp(finite) + 1.0)
    while left:
        last = np.where(counts >= left, scores, NEVER)
        for at in spots:
            last[at] = NEVER
        at = int(last.argmin())
        if last[at] == NEVER:
            at = int(key.argmax())
            key[at] = -1.0
        spots[at] = min(int(counts[at]), left)
        left -= spots[at]
    return spots


def _spread(counts: Ints, scores: Floats, workers: int) -> Spots:
    """One worker a node while there are nodes, the emptiest first; then a second one each. There is room."""
    able = np.flatnonzero(counts > 0)
    order = able[np.argsort(-scores[able], kind="stable")]
    spots: Spots = {}
    left = workers
    while left:
        for at in order.tolist():
            if left and spots.get(at, 0) < counts[at]:
                spots[at] = spots.get(at, 0) + 1
                left -= 1
    return spots


def zones_of(job: Queued, partitions: Mapping[str, Partition]) -> tuple[frozenset[str], frozenset[str]]:
    """The partitions a job has a right to, and those it may use while their own jobs leave them idle.

    A job that must not be stopped cannot give back, so it does not borrow.
    """
    home = frozenset({job.partition})
    if not job.is_preemptible:
        return home, home
    return home, home | {name for name, rules in partitions.items() if rules.lends}


def could_ever_fit(cluster: Cluster, job: Queued) -> UserError | None:
    """None if the job would fit into its partition, were nothing else running; else an error that says what would.

    Nodes that are draining count: they come back. What others lend does not: it may never be idle.
    """
    home = frozenset({job.partition})
    nodes = [node for node in cluster.nodes if node.partition in home]
    name = f"job {job.id}"
    if not nodes:
        return UserError(
            f"Partition {job.partition!r} has no nodes, so {name} could never start.",
            hint=f"partitions with nodes: {', '.join(sorted({node.partition for node in cluster.nodes})) or 'none'}",
        )
    rules = cluster.partitions.get(job.partition, Partition(name=job.partition))
    if job.job_class not in rules.classes:
        return UserError(
            f"Partition {rules.name!r} takes no {job.job_class} jobs.",
            hint=f"it takes {', '.join(sorted(rules.classes))}",
        )
    for cap, whose in ((rules.max_workers_per_job, "a job"), (rules.max_workers_per_user, "a person")):
        if cap is not None and job.min_workers > cap:
            return UserError(
                f"{name} asks for {job.min_workers} workers; partition {rules.name!r} allows {whose} {cap}.",
                hint=f"ask for at most {cap} workers",
            )
    need = need_of(job.ask)
    able = [node for node in nodes if not need.kinds or node.kind in need.kinds]
    if not able:
        kinds = sorted({node.kind for node in nodes})
        return UserError(
            f"No node in partition {rules.name!r} is of kind {' or '.join(sorted(need.kinds))}.",
            hint=f"its nodes are of kind {', '.join(kinds)}",
        )
    fits = int(Space(able).table().counts(need, slice(None)).sum())
    if fits >= job.min_workers:
        return None
    if fits:
        return UserError(
            f"{name} asks for {job.min_workers} workers; partition {rules.name!r} has room for {fits} of that size.",
            why="every worker needs " + describe(job),
            hint=f"ask for at most {fits} workers, or for smaller ones",
        )
    return UserError(
        f"No node in partition {rules.name!r} is large enough for one worker of {name}.",
        why=f"it needs {describe(job)}",
        hint=f"the largest node that comes near has {_largest(able, need)}",
    )


def describe(job: Queued) -> str:
    """What one worker asks for, in words."""
    ask = job.ask
    parts = [amounts.cores(ask.cores)] if ask.cores else []
    parts += [f"{amounts.gib(ask.memory_bytes)} of memory"] if ask.memory_bytes else []
    parts += [amounts.gpus(ask.gpus)] if ask.gpus else []
    parts += [f"{amounts.gib(ask.disk_bytes)} of disk"] if ask.disk_bytes else []
    return ", ".join(parts) or "nothing"


def _largest(nodes: Sequence[Node], need: Need) -> str:
    """The node that falls short of the fewest resources, in words."""

    def short(node: Node) -> tuple[int, float]:
        has = (node.cores * 1000, node.memory_bytes, node.disk_bytes, node.gpus * 1000)
        wants = (need.cores, need.memory, need.disk, need.gpu)
        parts = [have / want for have, want in zip(has, wants, strict=True) if want]
        return sum(part < 1 for part in parts), -min(parts, default=1.0)

    node = min(nodes, key=short)
    parts = [amounts.cores(node.cores), f"{amounts.gib(node.memory_bytes)} of memory"]
    parts += [amounts.gpus(node.gpus)] if node.gpus or need.gpu else []
    parts += [f"{amounts.gib(node.disk_bytes)} of disk"] if need.disk else []
    return ", ".join(parts) + f" ({node.name})"
