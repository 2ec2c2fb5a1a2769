"""What is known of jobs by those that ran before them and by their own steps, as policies are shown it. Pure."""

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from shoal.place.cluster import Cluster, Node, Queued, Rate
from shoal.place.decision import Wait
from shoal.place.lengths import Lengths
from shoal.service.asking import default_name, script_of
from shoal.service.job import Job, ask_of
from shoal.service.settings import Settings
from shoal.spec.prediction import Prediction

T = TypeVar("T")
Like = tuple[str, ...]
"""What a job is, the coarsest first: script, owner, where the script is, its arguments and what each worker has."""

SAME_SCRIPT = 3
"""Jobs that have so much in common step alike; those that have less may only be as long."""

RESIZE_SECONDS = 2.0
"""What a change of the size of an elastic job costs, until it was measured."""

PATIENCE_ROUNDS = 3
"""A job that has told nothing of its speed for so many rounds and looks never will."""

OWN_STEPS = "its own steps"
FEWEST_STEPS = 5
PACE_SPREAD = 0.1
"""How far off a job's own pace is at least, as a part of what is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How a run comes closer to the end that it named: `num_steps` steps of `step_seconds` each were timed."""

    goal: int
    step: int
    step_seconds: float
    num_steps: int
    workers: int


@dataclass(frozen=True, slots=True)
class Hopeful:
    """A rate that is thought to be `likely` up to the size that was `tried`; beyond, what it may be by the end of the
    spread that is `best`, but no more than if all workers were as useful. So what is uncertain is tried."""

    likely: Rate
    best: Rate
    tried: int

    def __call__(self, kind: str, workers: int, nodes: int) -> float:
        rate = self.likely(kind, workers, nodes)
        if workers <= self.tried or rate <= 0:
            return rate
        linear = self.likely(kind, self.tried, min(nodes, self.tried)) * workers / self.tried
        return max(rate, min(self.best(kind, workers, nodes), linear))


@dataclass(frozen=True, slots=True, kw_only=True)
class Insight:
    """What the run folder of a job has told so far.

    `largest` is the most workers it was seen with; 0 where that does not matter, as jobs like it were seen with many.
    """

    rate: Rate | None = None
    largest: int = 0
    pace: Pace | None = None
    pause_seconds: float | None = None
    resize_seconds: float | None = None
    predictions: tuple[Prediction, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """One job at one moment. `remaining_seconds` is at `max_workers` on the usual node, `left_seconds` on as many
    workers as it has; `spread` is one standard deviation as a part of it. `told_by` says where that is from."""

    rate: Rate | None = None
    max_workers: int = 0
    stop_seconds: float = 0.0
    resize_seconds: float | None = None
    remaining_seconds: float | None = None
    left_seconds: float | None = None
    spread: float = 0.0
    told_by: str = ""

    def shown(self, job: Queued, *, is_settling: bool = False) -> Queued:
        """The job as policies see it. While it settles it keeps its size, unless others need its workers."""
        if self.told_by == "" and self.rate is None and not self.stop_seconds and self.max_workers == job.max_workers:
            return job
        return job.having(
            rate=None if is_settling else self.rate,
            max_workers=self.max_workers,
            stop_seconds=self.stop_seconds or job.stop_seconds,
            resize_seconds=self.resize_seconds,
            remaining_seconds=self.remaining_seconds,
            remaining_spread=self.spread,
        )


NOTHING = Insight()


class Usual:
    """The node that a job would usually get: the one that takes most of its workers. For one decision.

    `fresh` is what has been found out in it of jobs that never ran.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        self.fresh: dict[object, Prospect] = {}
        self._found: dict[tuple[str, float, float], tuple[str, int]] = {}

    def of(self, job: Job) -> tuple[str, int]:
        """Its kind, and how many workers it takes."""
        asked = job.asked
        key = asked.partition, asked.cores, asked.gpus
        if key not in self._found:
            able = [node for node in self._nodes if node.partition == asked.partition] or [*self._nodes]
            rooms = [(_room(node, asked.cores, asked.gpus), node.kind) for node in able]
            most, kind = max(rooms, default=(1, ""))
            self._found[key] = kind, max(most, 1)
        return self._found[key]


def _room(node: Node, cores: float, gpus: float) -> int:
    by_cores = node.cores / cores if cores else 1e9
    return int(min(by_cores, node.gpus / gpus if gpus else 1e9, 1e6))


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """All that has been learned by now; replaced when there is more. Costs some microseconds for each job asked of.

    `lengths` are in seconds on one worker. `rates` are those of jobs that are over, by what they were and by each
    beginning of it that has the script; `pauses` what stopping and starting them took, by every beginning.
    """

    lengths: Lengths = field(default_factory=Lengths)
    insights: Mapping[int, Insight] = field(default_factory=dict)
    rates: Mapping[Like, Rate] = field(default_factory=dict)
    pauses: Mapping[Like, float] = field(default_factory=dict)
    likes: dict[int, Like] = field(default_factory=dict)
    """What jobs are, as far as that was asked: a digest of their arguments costs more than all else."""

    def like(self, job: Job) -> Like:
        found = self.likes.get(job.number)
        if found is None:
            found = self.likes[job.number] = like_of(job)
        return found

    def know(
        self, job: Job, most: int, usual: Usual, now: float, step: int | None = None, patience: float | None = None
    ) -> Prospect:
        """What is known of a job that may have `most` workers; `step` is how many its run has taken by now.

        `patience` is for policies that give sizes by rates: then an elastic job gets at most twice the workers it was
        seen with, and one whose speed is not known stays small until it has run for so many seconds.
        """
        if job.token or job.number in self.insights:
            return self._know(job, most, usual, now, step, patience)
        # Of those that never ran there may be very many, and most of them are alike.
        asked = job.asked
        key = self.like(job), most, job.min_workers, asked.is_elastic, asked.partition, asked.time_limit_seconds
        found = usual.fresh.get(key)
        if found is None:
            found = usual.fresh[key] = self._know(job, most, usual, now, step, patience)
        return found

    def _know(
        self, job: Job, most: int, usual: Usual, now: float, step: int | None, patience: float | None
    ) -> Prospect:
        like, insight = self.like(job), self.insights.get(job.number, NOTHING)
        rate = insight.rate or _nearest(self.rates, like, SAME_SCRIPT)
        if patience is not None and job.asked.is_elastic:
            # A model is not trusted far from what it was fitted to.
            tried = 2 * insight.largest or most
            if rate is None and seconds_run(job, now) < patience:
                tried = job.min_workers
            most = min(most, max(tried, job.num_wanted, job.min_workers))
        kind, per_node = usual.of(job)
        work, spread, told_by = self._work_left(job, like, insight.pace, rate, kind, per_node, now, step)
        pause = insight.pause_seconds
        left = None
        if work is not None:
            left = work / speed_of(rate, kind, job.num_wanted or most, per_node)
            work /= speed_of(rate, kind, most, per_node)
        limit = job.asked.time_limit_seconds
        if work is not None and left is not None and limit is not None:
            ends_in = max(limit - job.run_seconds, 0.0)
            work, left = min(work, ends_in), min(left, ends_in)
        return Prospect(
            rate=rate,
            max_workers=most,
            stop_seconds=pause if pause is not None else _nearest(self.pauses, like, 0) or 0.0,
            resize_seconds=_resize_seconds(job, insight),
            remaining_seconds=work,
            left_seconds=left,
            spread=spread,
            told_by=told_by,
        )

    def _work_left(
        self,
        job: Job,
        like: Like,
        pace: Pace | None,
        rate: Rate | None,
        kind: str,
        per_node: int,
        now: float,
        step: int | None,
    ) -> tuple[float | None, float, str]:
        """Seconds on one worker, how far they may be off, and where that is from."""
        if pace is not None and pace.goal > 0:
            steps = max(pace.goal - max(step or 0, pace.step), 0)
            work = steps * pace.step_seconds * speed_of(rate, kind, pace.workers, per_node)
            return work, max(PACE_SPREAD, pace.num_steps**-0.5), OWN_STEPS
        found = self.lengths.outlook(like, work_of(job, rate, kind, per_node, now))
        if found is None:
            return None, 0.0, ""
        if not found.num_jobs:
            return found.left, found.spread, "it has run longer than any job like it"
        count = f"{found.num_jobs} job{'s' * (found.num_jobs != 1)}"
        alike = ("of that name", "of the same owner and name", "with that script", "like it")[min(found.depth, 4) - 1]
        return found.left, found.spread, f"{count} {alike}"


def _resize_seconds(job: Job, insight: Insight) -> float | None:
    if not job.asked.is_elastic:
        return None
    return RESIZE_SECONDS if insight.resize_seconds is None else insight.resize_seconds


def like_of(job: Job) -> Like:
    """What a job is. Arguments may be long and are nobody's business: a digest stands for them."""
    asked = job.asked
    place = os.path.normpath(os.path.join(asked.working_dir, script_of(asked.run_args)))
    rest = [*asked.run_args, f"{asked.cores:g}", f"{asked.gpus:g}", *asked.kinds]
    return default_name(asked.run_args), job.owner, _digest([place]), _digest([place, *rest])


def _digest(texts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode(errors="surrogatepass")).hexdigest()[:16]


def _nearest(table: Mapping[Like, T], like: Like, least: int) -> T | None:
    """Of the job that has most in common with this one, at least so much."""
    for size in range(len(like), least - 1, -1):
        if (found := table.get(like[:size])) is not None:
            return found
    return None


def speed_of(rate: Rate | None, kind: str, workers: int, per_node: int) -> float:
    """How many times as fast as on one worker a job is; as many times as workers, where nobody knows."""
    workers = max(workers, 1)
    if rate is None:
        return float(workers)
    one = rate(kind, 1, 1)
    many = rate(kind, workers, -(-workers // per_node))
    return many / one if one > 0 and many > 0 else float(workers)


def seconds_run(job: Job, now: float) -> float:
    """How long it has run, to this moment."""
    return job.run_seconds + (max(0.0, now - job.accrued_at) if job.is_active else 0.0)


def worker_seconds(job: Job) -> float:
    """How long its workers ran in all, to the last time that was counted."""
    return job.service_seconds / ask_of(job.asked).size


def work_of(job: Job, rate: Rate | None, kind: str, per_node: int, now: float) -> float:
    """What a job has done so far, in seconds on one worker."""
    seconds = seconds_run(job, now)
    if seconds <= 0:
        return 0.0
    workers = (worker_seconds(job) + (seconds - job.run_seconds) * job.num_reserved) / seconds
    if rate is None:
        return seconds * workers
    return seconds * speed_of(rate, kind, round(workers), per_node)


def is_settling(job: Job, settings: Settings, now: float) -> bool:
    """Whether its size was changed within a round: the goodput policy lets it be, or sizes would go to and fro."""
    return settings.policy == "goodput" and job.is_active and now - job.changed_at < settings.round_seconds


def patience_of(jobs: Iterable[Job], settings: Settings) -> dict[str, float]:
    """By partition, how long the goodput policy keeps an elastic job of unknown speed small; other policies never do.

    As long as it may take to measure it, and only where others could use the workers.
    """
    if settings.policy != "goodput":
        return {}
    rivals: dict[str, int] = {}
    for job in jobs:
        if job.asked.is_elastic and not job.is_held and not job.is_over:
            rivals[job.asked.partition] = rivals.get(job.asked.partition, 0) + 1
    seconds = PATIENCE_ROUNDS * (settings.round_seconds + settings.learn_seconds)
    return {name: seconds if count > 1 else 0.0 for name, count in rivals.items()}


def explain_waits(waits: Mapping[int, Wait], cluster: Cluster) -> dict[int, Wait]:
    """Reasons with what the time until the start depends on. Durations are left out: they change all the time."""
    from shoal.place.waiting import seconds_left, waits_for_drained

    ends: dict[str, tuple[float, str]] = {}
    unknown: dict[str, str] = {}
    waiting: dict[str, str] = {}
    for job in cluster.jobs:
        left = seconds_left(job)
        if job.allocation and left is None:
            unknown.setdefault(job.partition, job.id)
        elif job.allocation and left is not None:
            ends[job.partition] = min(ends.get(job.partition, (left, job.id)), (left, job.id))
        elif left is None and not job.blocked_by:
            waiting.setdefault(job.partition, job.id)
    homes = {job.id: job.partition for job in cluster.jobs}
    told = dict(waits)
    for number, wait in waits.items():
        home = homes.get(wait.job, "")
        first = unknown.get(home) or waiting.get(home)
        if not wait.position or waits_for_drained(wait):
            continue
        if wait.eta_seconds is not None and wait.eta_seconds > 0 and home in ends:
            told[number] = replace(wait, why=f"{wait.why}; job {ends[home][1]} is expected to end first")
        elif wait.eta_seconds is None and first and first != wait.job:
            why = f"nothing like job {first} has finished yet, and it has no time limit"
            told[number] = replace(wait, why=f"{wait.why}; when it starts is not known: {why}")
    return told


def with_data(nodes: Sequence[Node], jobs: Iterable[Queued]) -> tuple[Node, ...]:
    """Nodes with what of the jobs' data each has: `holds` of a folder is what lies in it, too."""
    needs = {path for job in jobs for path in job.needs}
    if not needs or not any(node.holds for node in nodes):
        return tuple(nodes)
    return tuple(
        replace(node, holds=frozenset(path for path in needs if _is_inside(path, node.holds))) for node in nodes
    )


def _is_inside(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or path.startswith(folder.rstrip("/") + "/") for folder in folders)
