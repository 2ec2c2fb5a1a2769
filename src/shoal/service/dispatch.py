"""What starts, resizes and stops jobs: looks at attempts, asks the policy, writes it down, and only then does it."""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from shoal.place.cluster import Cluster, Node, Queued
from shoal.place.decision import Wait
from shoal.service import acts, growing, transitions
from shoal.service.briefing import orders_for, places_of
from shoal.service.deciding import (
    Promise,
    Todo,
    blocked_jobs,
    can_do,
    can_have,
    cluster_of,
    held_by,
    hopeless,
    still_promised,
    usage_of,
)
from shoal.service.job import RUNNING, STARTING, STOPPING, WAITING, Job
from shoal.service.learned import Learned, Prospect, Usual, explain_waits, is_settling, patience_of
from shoal.service.learner import Learner
from shoal.service.machines import Machines
from shoal.service.orders import Orders, Size, gpus_here
from shoal.service.places import JOBS
from shoal.service.settings import FILE, read_settings
from shoal.service.state import Shared
from shoal.service.telling import decay
from shoal.service.writer import Change
from shoal.spec.errors import ShoalError

LOOK_SECONDS = 0.5
DECIDE_SECONDS = 2.0
ACCRUE_SECONDS = 30.0
FORGET_SECONDS = 3600.0
START_SECONDS = 5.0
"""How long a keeper that was started may take until it holds its lock."""

SHARE_OF_TIME = 0.25
"""The part of the time that deciding may take: with a hundred thousand jobs, decisions come less often."""


class Keeper(Protocol):
    """Who runs attempts: the functions of `service/attempts.py`."""

    def start(self, jobs_folder: str, orders: Any) -> None: ...
    def look(self, jobs_folder: str, job: str, token: int) -> Any: ...
    def stop(self, jobs_folder: str, job: str, token: int, why: str) -> None: ...
    def resize(self, jobs_folder: str, job: str, token: int, size: Size) -> None: ...
    def here(self, folder: str) -> Node: ...


class Dispatcher:
    """One thread. Whatever it has written down and not done when the service is killed is done after the restart."""

    def __init__(self, shared: Shared, keeper: Keeper) -> None:
        self._shared = shared
        self._keeper = keeper
        self._folder = os.path.join(shared.folder, JOBS)
        os.makedirs(self._folder, mode=0o700, exist_ok=True)
        self._machines = Machines(lambda: keeper.here(shared.home))
        shared.machines = self._machines.now(shared.settings.ray_address)
        self._learner = Learner(shared, self._look_again, lambda: self._machines.links)
        self._told: dict[tuple[int, int], tuple[str, Size]] = {}
        self._started: dict[tuple[int, int], float] = {}
        self._promised: dict[int, Promise] = {}
        self._hope = growing.Hope()
        self._changes_seen = -1
        self._decide_at = 0.0
        self._is_waited_for = True
        self._jobs_before: Mapping[int, Job] = {}
        self._learned_before: Learned | None = None
        self._accrue_at = 0.0
        self._forget_at = 0.0
        self._settings_stamp: object = None
        self._is_plain = False
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="shoal-dispatcher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End; jobs go on."""
        self._is_over = True
        self._shared.woken.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=30.0)
        self._learner.close()
        self._machines.close()

    def _run(self) -> None:
        self._turn_safely()
        self._learner.start()
        while not self._is_over:
            self._shared.woken.wait(LOOK_SECONDS)
            self._shared.woken.clear()
            self._turn_safely()

    def _turn_safely(self) -> None:
        trouble = ""
        try:
            self.turn()
        except Exception as error:  # whatever it is, the others' jobs must go on
            trouble = f"{type(error).__name__}: {error}"
            if self._shared.problems.get("dispatcher") != trouble:
                traceback.print_exc(file=sys.stderr)
            time.sleep(LOOK_SECONDS)
        self._problem("dispatcher", trouble)

    def turn(self) -> None:
        """Look at everything once, and decide where something has changed, or may with time."""
        self._read_settings()
        self._shared.machines = self._machines.now(self._shared.settings.ray_address)
        self._problem("nodes", self._machines.problem)
        self._look()
        now = time.monotonic()
        known = self._shared.known
        is_new = known.num_changes != self._changes_seen
        if (is_new and now >= self._decide_at) or (self._is_waited_for and now >= self._decide_at + DECIDE_SECONDS):
            self._changes_seen = known.num_changes
            self._decide_anyhow()
            took = time.monotonic() - now
            self._shared.decided_seconds = took
            self._decide_at = time.monotonic() + took / SHARE_OF_TIME
        if now >= self._accrue_at:
            self._accrue_at = now + ACCRUE_SECONDS
            self._accrue()
        if now >= self._forget_at:
            self._forget_at = now + FORGET_SECONDS
            self._shared.writer.do(acts.forget_keys).result()

    # --- attempts

    def _look(self) -> None:
        """See what became of attempts, tell keepers what they do not know yet, and write down what changed."""
        seen: dict[int, Any] = {}
        trouble = ""
        for job in list(self._shared.known.active.values()):
            found = self._keeper.look(self._folder, str(job.number), job.token)
            if job.state == STARTING and _never_began(found) and self._is_due(job):
                self._start(job)
                found = self._keeper.look(self._folder, str(job.number), job.token)
            elif found.state in ("starting", "running"):
                try:
                    self._tell(job, found)
                except ShoalError as error:  # the others' keepers are to hear what they are told all the same
                    trouble = f"job {job.number}: {error.message} {error.why}".strip()
            if found.state == "ended" and found.machine:
                self._machines.doubt(found.machine)
                self._shared.machines = self._machines.now(self._shared.settings.ray_address)
            seen[job.number] = found
            if transitions.see(job, found, 0.0, 0.0) is not job:
                self._write(
                    job.number,
                    lambda change, job, found=found: transitions.see(  # type: ignore[misc]
                        job, found, change.now, change.wall, self._when(found)
                    ),
                    job.token,
                )
        self._shared.seen = seen
        self._problem("keepers", trouble)
        active = {(job.number, job.token) for job in list(self._shared.known.active.values())}
        self._told = {key: told for key, told in self._told.items() if key in active}
        self._started = {key: at for key, at in self._started.items() if key in active}

    def _when(self, seen: Any) -> tuple[float, float] | None:
        """Clock and date of what an attempt told last."""
        return None if seen.mark is None else (self._shared.store.clock.when(seen.mark), seen.mark.wall)

    def _look_again(self, job: Job) -> Any:
        return self._keeper.look(self._folder, str(job.number), job.token)

    def _is_due(self, job: Job) -> bool:
        """Whether to start it again: a keeper takes a moment until it is seen."""
        return time.monotonic() >= self._started.get((job.number, job.token), -START_SECONDS) + START_SECONDS

    def _start(self, job: Job) -> None:
        """Start what was written down. The same token twice is one attempt, so this may be done again."""
        self._started[job.number, job.token] = time.monotonic()
        try:
            self._keeper.start(self._folder, self._orders(job))
        except ShoalError as error:
            told = f"{error.message} {error.why}".strip()
            self._write(
                job.number,
                lambda change, job: transitions.fail_to_start(job, told, change.now, change.wall),
                job.token,
            )

    def _orders(self, job: Job) -> Orders:
        return orders_for(job, self._shared.settings, self._machines.engine, self._machines.addresses)

    def _size(self, job: Job) -> Size:
        """What it is to have. On one machine it is plain where its workers are; on others Ray gives them GPUs."""
        wanted, devices = held_by(job)
        if self._machines.engine != "local":
            return Size(num_workers=job.num_wanted, nodes=places_of(wanted, self._machines.addresses))
        return Size(num_workers=job.num_wanted, gpus=gpus_here(devices))

    def _tell(self, job: Job, seen: Any) -> None:
        """Pass on a wish or a size. Keepers take the same twice, and after a restart they get it again."""
        key, wanted = (job.number, job.token), (job.wish, self._size(job))
        if self._told.get(key) == wanted:
            return
        if job.state == STOPPING:
            self._keeper.stop(self._folder, str(job.number), job.token, job.wish or "cancel")
        elif (
            job.asked.is_elastic
            and seen.state == "running"
            and (key in self._told or seen.num_workers != job.num_wanted)
        ):
            self._keeper.resize(self._folder, str(job.number), job.token, wanted[1])
        elif seen.state != "running":
            return
        self._told[key] = wanted

    def _write(self, number: int, move: Callable[[Change, Job], Job], token: int | None = None) -> None:
        """Change one job, as it is by then; with a token, only while that attempt is its newest."""

        def change(change: Change) -> Job | None:
            job = change.job(number)
            if token is not None and job.token != token:
                return None
            after = move(change, job)
            change.put(after)
            _use(change, job, after, self._shared.settings.usage_half_life_seconds)
            if not after.is_over or job.is_over:
                return None
            change.note("service", after.state, str(number), cause=after.cause, message=after.message[:200])
            return after

        ended = self._shared.writer.do(change).result()
        if ended is not None:
            self._learner.ended(ended)

    def _accrue(self) -> None:
        for job in list(self._shared.known.active.values()):
            self._write(job.number, lambda change, job: transitions.accrue(job, change.now), job.token)

    # --- decisions

    def _decide_anyhow(self) -> None:
        """Decide with what was learned; where that goes wrong, without it, which is said in the log once."""
        trouble = ""
        try:
            self._decide()
        except Exception as error:  # a model that is no good must not stop anybody
            trouble = f"decided without what was learned: {type(error).__name__}: {error}"
            if self._shared.problems.get("learning") != trouble:
                traceback.print_exc(file=sys.stderr)
            self._is_plain = True
            try:
                self._decide()
            finally:
                self._is_plain = False
        self._problem("learning", trouble)

    def _decide(self) -> None:
        from shoal.place.policies import POLICIES
        from shoal.place.reclaim import reclaim

        shared, now = self._shared, self._shared.store.clock.now()
        jobs = dict(shared.known.jobs)
        states = self._states(jobs)
        for number, first, what in hopeless(jobs.values(), states):
            self._write(
                number,
                lambda change, job, first=first, what=what: transitions.give_up(  # type: ignore[misc]
                    job, first, what, change.now, change.wall
                ),
            )
        nodes, settings = shared.nodes, shared.settings
        usage = usage_of(shared.reader.usage(), now, settings.usage_half_life_seconds)
        people = shared.known.people
        learned, usual, prospects = shared.learned, Usual(nodes), dict[int, Prospect]()
        patiences = patience_of(jobs.values(), settings)

        def with_learned(job: Job, shown: Queued) -> Queued:
            if self._is_plain:
                return shown
            step = getattr(shared.seen.get(job.number), "step", None)
            patience = patiences.get(job.asked.partition)
            prospects[job.number] = prospect = learned.know(job, shown.max_workers, usual, now, step, patience)
            return prospect.shown(shown, is_settling=is_settling(job, settings, now))

        links, promised = self._machines.links, still_promised(self._promised, jobs, nodes)
        blocked = blocked_jobs(jobs.values(), states, people, promised)
        able = [job for number, job in jobs.items() if number not in blocked]
        self._is_waited_for = bool(able)
        cluster = cluster_of(able, nodes, settings, people, usage, links, states, now, promised, with_learned)
        if not self._is_plain:
            prospects |= self._blocked_prospects({number: jobs[number] for number in blocked}, usual, now)
        shared.prospects = prospects
        policy = POLICIES[settings.policy]
        decisions, lowers = reclaim(cluster, policy(cluster), self._peaks(jobs), policy)
        todo, waits, self._promised = can_do(decisions, jobs, nodes, people, promised, now, lowers)
        waits |= {
            number: Wait(job=str(number), why=why) for number, why in blocked.items() if not jobs[number].is_held
        }
        shared.waits = self._hope_for_more(cluster, explain_waits(waits, cluster), now)
        for each in todo:
            self._do(each)

    def _blocked_prospects(self, blocked: Mapping[int, Job], usual: Usual, now: float) -> dict[int, Prospect]:
        """What is known of those that cannot start; what was worked out before still holds, for there may be many."""
        shared = self._shared
        learned, before = shared.learned, shared.prospects
        is_same = learned is self._learned_before
        found = {}
        for number, job in blocked.items():
            known = before.get(number) if is_same and self._jobs_before.get(number) is job else None
            found[number] = known or learned.know(job, job.max_workers, usual, now)
        self._jobs_before, self._learned_before = blocked, learned
        return found

    def _hope_for_more(self, cluster: Cluster, waits: Mapping[int, Wait], now: float) -> Mapping[int, Wait]:
        """Have a cluster that grows asked for what jobs that wait lack; returns the reasons with that in them."""
        settings, machines = self._shared.settings, self._machines
        growth = settings.growth
        # What was asked for is withdrawn where the settings say no more that the cluster grows.
        if not settings.ray_address or not machines.present or not (growth or self._hope.wanted.nodes):
            return waits
        wanted = growing.find_wanted(cluster, waits, growth, machines.groups)
        self._hope = growing.go_on(self._hope, wanted, now)
        is_asked = self._hope.is_asked(now)
        machines.hope_for(growing.bundles_of(wanted, growth, machines.present) if is_asked else [])
        return growing.tell_waits(waits, self._hope, growth, now)

    def _peaks(self, jobs: Mapping[int, Job]) -> dict[str, int]:
        """The most that one worker of a job has used, where that is known and the job may be asked for memory."""
        found = {}
        for number, seen in self._shared.seen.items():
            job, peak = jobs.get(number), getattr(seen, "worker_peak_bytes", 0)
            if peak and job is not None and job.state == RUNNING and not job.keeps_memory and not job.lowered_bytes:
                found[str(number)] = peak
        return found

    def _states(self, jobs: Mapping[int, Job]) -> dict[int, str]:
        """The states of jobs that others wait for, over or not."""
        found: dict[int, str] = {}
        for job in jobs.values():
            for number in job.asked.after if job.state == WAITING else ():
                if number not in found:
                    other = jobs.get(number) or self._shared.reader.job(number)
                    found[number] = other.state if other is not None else "cancelled"
        return found

    def _do(self, todo: Todo) -> None:
        """Write a decision down, if the job is still what it was; then do it."""
        job = self._shared.known.jobs.get(todo.number)
        if job is None:
            return
        if not todo.allocation:
            self._write(job.number, lambda change, job: transitions.preempt(job, todo.why, change.now, change.wall))
            return
        kinds = self._kinds(todo)
        if job.is_active:
            self._write(
                job.number,
                lambda change, job: (
                    transitions.change_size(
                        job, todo.allocation, todo.devices, change.now, change.wall, todo.why, kinds
                    )
                    if not job.wish
                    else job
                ),
                job.token,
            )
        else:
            self._write(
                job.number,
                lambda change, job: (
                    transitions.start(
                        job,
                        todo.allocation,
                        todo.devices,
                        change.now,
                        change.wall,
                        todo.why,
                        todo.memory_bytes,
                        kinds,
                    )
                    if job.state == WAITING and not job.is_held and can_have(job, todo.allocation)
                    else job
                ),
                job.token,
            )
            started = self._shared.known.jobs.get(todo.number)
            if started is not None and started.state == STARTING:
                self._start(started)

    def _kinds(self, todo: Todo) -> tuple[str, ...]:
        """The kinds of nodes that it names."""
        return tuple(sorted({node.kind for node in self._shared.nodes if node.name in todo.allocation}))

    # --- settings

    def _read_settings(self) -> None:
        """Take over what was changed in the file; what cannot be read changes nothing and is told."""
        try:
            stat = os.stat(os.path.join(self._shared.home, FILE))
            stamp: object = stat.st_mtime_ns, stat.st_size
        except OSError:
            stamp = None
        if stamp == self._settings_stamp:
            return
        self._settings_stamp = stamp
        from shoal.place.policies import POLICIES

        try:
            self._shared.settings = read_settings(self._shared.home, lambda: POLICIES)
            self._problem("settings", "")
        except ShoalError as error:
            self._problem("settings", " ".join(filter(None, (error.message, error.where, error.why, error.hint))))

    def _problem(self, about: str, text: str) -> None:
        rest = {name: told for name, told in self._shared.problems.items() if name != about}
        self._shared.problems = {**rest, about: text} if text else rest


def _never_began(seen: Any) -> bool:
    return bool(seen.state == "absent" or (seen.state == "starting" and not seen.is_alive))


def _use(change: Change, before: Job, after: Job, half_life_seconds: float) -> None:
    """Count what a job has had to its owner, in the transaction in which the job says so itself."""
    more = after.service_seconds - before.service_seconds
    if more <= 0:
        return
    row = change.connection.execute(
        "SELECT worker_seconds, lately, at FROM usage WHERE person = ? AND account = ?", (after.owner, after.account)
    ).fetchone()
    total, lately, at = row if row else (0.0, 0.0, change.now)
    left = decay(lately, change.now - at, half_life_seconds)
    change.connection.execute(
        "INSERT OR REPLACE INTO usage (person, account, worker_seconds, lately, at) VALUES (?, ?, ?, ?, ?)",
        (after.owner, after.account, total + more, left + more, change.now),
    )
