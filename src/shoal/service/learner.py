"""A thread that learns from run folders: how fast jobs are, how much is left of them, what jobs leave to later ones.

It looks at running jobs now and then, and at each that ends; what it found replaces `Shared.learned` whole. Whatever
goes wrong here is said once in the service's log and changes nothing else: the dispatcher never waits for it.
"""

import math
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from shoal.place.cluster import Rate
from shoal.place.lengths import Lengths
from shoal.service.job import FINISHED, RUNNING, Job
from shoal.service.learned import (
    FEWEST_STEPS,
    SAME_SCRIPT,
    Hopeful,
    Insight,
    Like,
    Pace,
    Usual,
    work_of,
    worker_seconds,
)
from shoal.service.state import Shared

if TYPE_CHECKING:
    from shoal.learning import Expecting, Study
    from shoal.observe.journal import JournalReader
    from shoal.place.prior import PastJob, Prior, Traits
    from shoal.place.throughput import Observation, Throughput

HISTORY = "history.jsonl"
MAX_FINISHED = 2000
"""So many jobs that finished last tell how long others are."""
MAX_PAST = 32
"""So many kinds of jobs in the history, the newest, make the prior and have rates of their own."""
MISSED = 50
"""After a start: how many of the jobs that finished last are looked at, in case the service was killed before."""
MORE_STEPS = 1.1
"""A run is read again when it has so many times the steps: all of it costs some 10 µs a step and worker."""
MAX_FOLDER_BYTES = 1 << 30
"""Metrics larger than this are not ours: what shoal writes stays below 24 MiB a worker."""
SHARE_OF_TIME = 0.25
"""The part of the time that reading may take; runs that were not looked at for long go first."""
LOST_SECONDS = 5.0


@dataclass(slots=True)
class Watch:
    """What is remembered of a job from one look to the next."""

    run_dir: str
    journal: "JournalReader"
    goals: set[int] = field(default_factory=set)
    token: int = 0
    anchor: tuple[float, int] = (0.0, 0)
    """When the pace began to be taken, and at which step: with these workers, in this attempt."""
    workers: int = 0
    observations: "tuple[Observation, ...]" = ()
    studied_step: int = 0
    studied_workers: int = 0
    looked_at: float = -1e9
    insight: Insight = field(default_factory=Insight)


class Learner:
    """One thread. `look` is what a keeper says of a job, `links` the measured rates between nodes."""

    def __init__(
        self, shared: Shared, look: Callable[[Job], Any], links: Callable[[], Mapping[tuple[str, str], float]]
    ) -> None:
        self._shared, self._look, self._links = shared, look, links
        self._history_path = os.path.join(shared.home, HISTORY)
        self._ended: deque[Job] = deque()
        self._watches: dict[int, Watch] = {}
        self._history: list[PastJob] = []
        self._counted: set[int] = set()
        self._prior: Prior | None = None
        self._has_new_history = True
        self._said: set[str] = set()
        self._woken = threading.Event()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="shoal-learner", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._is_over = True
        self._woken.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=LOST_SECONDS)

    def ended(self, job: Job) -> None:
        """A job is over: others will be as long. Returns at once."""
        self._ended.append(job)
        self._woken.set()

    def _run(self) -> None:
        self._guarded("what earlier jobs took", self._begin)
        while not self._is_over:
            began = time.monotonic()
            self.turn()
            rest = max(self._shared.settings.learn_seconds, (time.monotonic() - began) / SHARE_OF_TIME)
            until = time.monotonic() + rest
            while not self._is_over and time.monotonic() < until:
                self._woken.wait(until - time.monotonic())
                self._woken.clear()
                self._guarded("jobs that ended", self._take_ended)

    def turn(self) -> None:
        """Take what ended, then look at every run that has gone on."""
        self._guarded("jobs that ended", self._take_ended)
        self._guarded("the history of jobs", self._relearn)
        jobs = [job for job in list(self._shared.known.active.values()) if job.state == RUNNING]
        due = sorted(jobs, key=lambda job: self._looked_at(job.number))
        until = time.monotonic() + self._shared.settings.learn_seconds * SHARE_OF_TIME
        for job in due:
            if self._is_over or time.monotonic() > until:
                break
            self._guarded(f"job {job.number}", self._look_at, job)
        known = self._shared.known.jobs
        self._watches = {number: watch for number, watch in self._watches.items() if number in known}
        self._publish(likes={n: like for n, like in self._shared.learned.likes.copy().items() if n in known})

    def _looked_at(self, number: int) -> float:
        watch = self._watches.get(number)
        return watch.looked_at if watch is not None else -1e9

    def _guarded(self, about: str, act: Callable[..., None], *given: Any) -> None:
        try:
            act(*given)
        except Exception as error:  # a broken run folder may break anything in here
            text = f"shoal: nothing is learned of {about}: {type(error).__name__}: {error}"
            if text not in self._said and len(self._said) < 1000:
                self._said.add(text)
                print(text, file=sys.stderr)
                traceback.print_exc(file=sys.stderr)
                sys.stderr.flush()

    def _publish(self, **changes: Any) -> None:
        insights = {number: watch.insight for number, watch in self._watches.items()}
        self._shared.learned = replace(self._shared.learned, insights=insights, **changes)

    # --- jobs that are over

    def _begin(self) -> None:
        """What the database and the history tell of all jobs before."""
        from shoal.learning import recall

        self._history = recall(self._history_path)
        self._relearn()
        works = {past.name: past.work_seconds for past in self._history if past.work_seconds}
        finished = self._shared.reader.finished(MAX_FINISHED)
        learned = self._shared.learned
        pairs = [(learned.like(job), works.get(_name(job)) or worker_seconds(job)) for job in reversed(finished)]
        self._publish(lengths=Lengths().learned_all(pairs), likes={})
        self._counted = {job.number for job in finished}
        names = {past.name for past in self._history}
        for job in finished[:MISSED]:
            if not self._is_over and _name(job) not in names:
                self._guarded(f"job {job.number}", self._remember, job)

    def _take_ended(self) -> None:
        jobs = []
        while self._ended:
            jobs.append(self._ended.popleft())
        learned = self._shared.learned
        finished = []
        for job in jobs:
            if job.has_run:
                self._guarded(f"job {job.number}", self._remember, job)
            if job.state == FINISHED and job.number not in self._counted:
                newest = self._history[-1] if self._history else None
                work = newest.work_seconds if newest is not None and newest.name == _name(job) else None
                finished.append((learned.like(job), work or self._work(job)))
            self._watches.pop(job.number, None)
        if jobs:
            self._publish(lengths=learned.lengths.learned_all(finished))

    def _work(self, job: Job) -> float:
        """What it took in all, in seconds on one worker, as if all of its workers had been as useful."""
        kind, per_node = Usual(self._shared.nodes).of(job)
        return work_of(job, None, kind, per_node, 0.0)

    def _remember(self, job: Job) -> None:
        """Add it to the history: how it stepped, and what it took."""
        from shoal.learning import remember
        from shoal.place.prior import PastJob

        watch = self._watches.get(job.number)
        run_dir = watch.run_dir if watch is not None else str(getattr(self._look(job), "run_dir", ""))
        if not run_dir or not _is_readable(run_dir):
            return
        fitted = self._fit(job, run_dir)
        if fitted is None:
            return
        found, traits, rate, _ = fitted
        alone = rate(self._kinds(job)[0], 1, 1)
        # What is not stepping does not become faster with workers.
        work = found.num_samples / alone + max(job.run_seconds - found.step_seconds, 0.0) if alone > 0 else None
        past = PastJob(
            traits=traits,
            observations=found.observations,
            name=_name(job),
            like=self._shared.learned.like(job),
            work_seconds=work if job.state == FINISHED else None,
            pause_seconds=found.pause_seconds,
            noise=found.noise,
            batches=found.batches,
        )
        remember(self._history_path, past)
        self._history = [*self._history, past][-MAX_FINISHED:]
        self._has_new_history = True

    def _relearn(self) -> None:
        """The prior, and rates of jobs that are over, from the history as it is now."""
        if not self._has_new_history:
            return
        from shoal.place.prior import Likeness, learn

        self._has_new_history = False
        newest: dict[Like, PastJob] = {}
        pauses: dict[Like, float] = {}
        for past in reversed(self._history):
            if len(newest) < MAX_PAST:
                newest.setdefault(past.like, past)
            for size in range(len(past.like) + 1) if past.pause_seconds else ():
                pauses.setdefault(past.like[:size], past.pause_seconds or 0.0)
        if not newest:
            return
        self._prior = learn(list(newest.values()))
        rates: dict[Like, Rate] = {}
        for like, past in newest.items():
            if past.batches is None:
                continue
            rate = self._rate(
                Likeness(self._prior, past).known, past.batches, past.traits.micro_batch, past.noise, 64
            )
            for size in range(SAME_SCRIPT, len(like) + 1):
                rates.setdefault(like[:size], rate)
        self._publish(rates=rates, pauses=pauses)

    # --- jobs that run

    def _look_at(self, job: Job) -> None:
        seen = self._shared.seen.get(job.number)
        run_dir, step, workers = getattr(seen, "run_dir", ""), getattr(seen, "step", None), seen and seen.num_workers
        if not run_dir or step is None or not workers:
            return
        from shoal.observe.journal import JournalReader

        watch = self._watches.get(job.number)
        if watch is None or watch.run_dir != run_dir:
            watch = self._watches[job.number] = Watch(run_dir=run_dir, journal=JournalReader(run_dir))
        now = watch.looked_at = time.monotonic()
        for event in watch.journal.read_new():
            goal = event.data.get("num_steps")
            if event.kind == "goal":
                watch.goals.add(goal if isinstance(goal, int) and goal > 0 else 0)
        if (watch.token, watch.workers) != (job.token, workers) or step < watch.anchor[1]:
            watch.token, watch.workers, watch.anchor = job.token, workers, (now, step)
        has_grown = step >= MORE_STEPS * watch.studied_step + FEWEST_STEPS
        if has_grown or (workers != watch.studied_workers and step >= FEWEST_STEPS):
            self._study(job, watch)
            watch.studied_step, watch.studied_workers = step, workers
        watch.insight = replace(watch.insight, pace=self._pace(watch, now, step))

    def _study(self, job: Job, watch: Watch) -> None:
        """Read all of its steps, and fit its model again."""
        from shoal.observe.predictions import read_predictions

        if not _is_readable(watch.run_dir):
            raise ValueError(f"{watch.run_dir} has no metrics, or more than a run can have")
        fitted = self._fit(job, watch.run_dir)
        if fitted is None:
            return
        found, _, rate, is_like = fitted
        watch.observations = found.observations
        watch.insight = Insight(
            rate=rate,
            largest=0 if is_like else rate.tried,
            pace=watch.insight.pace,
            pause_seconds=found.pause_seconds,
            resize_seconds=found.resize_seconds,
            predictions=tuple(read_predictions(watch.run_dir)),
        )

    def _fit(self, job: Job, run_dir: str) -> "tuple[Study, Traits, Hopeful, bool] | None":
        """What a run tells, its traits and its rate, and whether one like it was seen with several sizes."""
        from shoal.learning import learn_run, study

        kind, kinds = self._kinds(job)
        found = study(run_dir, kind, kinds)
        if found.traits is None or found.batches is None or not found.observations:
            return None
        expecting, is_like = self._expecting(job)
        traits = self._with_link(job, found.traits)
        model = learn_run(
            run_dir, expecting, traits, job=_name(job), now=time.time(), kind=kind, observations=found.observations
        )
        most = max(job.max_workers, model.largest_workers)
        rate = self._rate(model, found.batches, traits.micro_batch, found.noise, most)
        return found, traits, rate, is_like

    def _pace(self, watch: Watch, now: float, step: int) -> Pace | None:
        """How it comes closer to its end. A script that names several ends one after the other has told of none."""
        goal = max(watch.goals, default=0)
        if len(watch.goals) != 1 or not goal:
            return None
        seconds, steps = now - watch.anchor[0], step - watch.anchor[1]
        if steps >= FEWEST_STEPS:
            each = seconds / steps
        else:
            here = [seen for seen in watch.observations if seen.workers == watch.workers]
            if not here:
                return None
            each, steps = here[-1].step_seconds, FEWEST_STEPS
        return Pace(goal=goal, step=step, step_seconds=each, num_steps=steps, workers=watch.workers)

    def _expecting(self, job: Job) -> "tuple[Expecting, bool]":
        """What is thought of it before its first step, and whether one like it was seen with several sizes."""
        from shoal.learning import Unknown
        from shoal.place.prior import Likeness

        like = self._shared.learned.like(job)
        for size in range(len(like), SAME_SCRIPT - 1, -1):
            for past in reversed(self._history) if self._prior is not None else ():
                if past.like[:size] == like[:size]:
                    sizes = {seen.workers for seen in past.observations}
                    return Likeness(self._prior, past), len(sizes) > 1  # type: ignore[arg-type]
        return self._prior or Unknown(), False

    def _rate(
        self, model: "Throughput", batches: tuple[float, float], micro: float, noise: float | None, most: int
    ) -> Hopeful:
        """Samples a second, as good as those of the smallest batch; worked out here, so that no decision waits."""
        from shoal.place.batching import Batching, LearnedRate

        batching = Batching(
            initial=batches[0], largest=batches[1], largest_micro=max(micro, 1.0), noise=max(noise or 0.0, 0.0)
        )
        likely = LearnedRate(throughput=model, batching=batching, most_workers=max(most, 1))
        best = replace(likely, optimism=1.0, _tables={}, _grids={})
        for kind in {node.kind for node in self._shared.nodes}:
            made = [
                each.ready(kind)(kind, size, nodes)
                for each in (likely, best)
                for size in (1, most)
                for nodes in (1, 2)
            ]
            if not all(0.0 <= rate < math.inf for rate in made):
                raise ValueError(f"its model says {made} samples a second")
        return Hopeful(likely, best, model.largest_workers)

    def _kinds(self, job: Job) -> tuple[str, dict[str, str]]:
        """The kind of node that most of its workers are on, and that of each machine."""
        kinds = {node.name: node.kind for node in self._shared.nodes}
        counts: dict[str, int] = {}
        for name, workers in job.allocation.items():
            counts[kinds.get(name, "")] = counts.get(kinds.get(name, ""), 0) + workers
        usual = max(job.kind_seconds, key=lambda kind: job.kind_seconds[kind], default="")
        return max(counts, key=lambda kind: counts[kind], default=usual), kinds

    def _with_link(self, job: Job, traits: "Traits") -> "Traits":
        """Its traits, with the slowest link between the nodes it is on, where that was measured."""
        links = self._links()
        rates = [rate for (one, other), rate in links.items() if one in job.allocation and other in job.allocation]
        return replace(traits, sizes={**traits.sizes, "link": min(rates)}) if rates and min(rates) > 0 else traits


def _name(job: Job) -> str:
    return job.run_name


def _is_readable(run_dir: str) -> bool:
    """Whether there are steps to read, and no more than a run of ours can leave."""
    try:
        with os.scandir(run_dir) as entries:
            sizes = {
                each.name: each.stat().st_size for each in entries if each.name.startswith(("metrics-", "journal."))
            }
    except OSError:
        return False
    return any(name.startswith("metrics-") for name in sizes) and sum(sizes.values()) <= MAX_FOLDER_BYTES
