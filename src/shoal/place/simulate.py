"""A cluster that exists only in numbers: jobs come, a policy of the service decides, time passes.

Decisions are made in rounds. Between two of them every running job works on what it has; one that ends in between
leaves its workers idle until the next round, as the rounds of a real scheduler do. Nothing here knows what a job is:
a `Work` says how far it gets. Nothing is random, so the same input gives the same result.
"""

import heapq
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shoal.place.cluster import Allocation, Cluster, Devices, Node, Partition, Queued, guests_of, may_be_stopped
from shoal.place.decision import Decision, Place, Stop
from shoal.spec.errors import UserError

Policy = Callable[[Cluster], list[Decision]]
MAX_IDLE_SECONDS = 30 * 86400.0
"""If nothing runs and nothing comes for so long while jobs wait, nothing ever will."""


class Work(Protocol):
    """What a simulated job does. One object a job; the simulator calls it in the order of time."""

    def seen(self) -> Queued:
        """As a policy may see it now: what was asked for, what was measured so far. The simulator fills in the rest:
        allocation, service, times and stops."""
        ...

    def place(self, allocation: Allocation, nodes: Mapping[str, Node]) -> None:
        """From now on it runs there; an empty allocation stops it. What a change costs is its own matter."""
        ...

    def work(self, seconds: float) -> float | None:
        """Run for so many seconds, the pause of a restart among them. If it ends in them: after how many."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where and how: `round_seconds` from one decision to the next; a policy is asked at least every `quiet_rounds`,
    and in each round before which a job came or ended. `until`: seconds at which to stop; None: after the last job.
    The first decision is a round after `since`: one round before 0 for a first decision at 0.
    """

    nodes: tuple[Node, ...]
    round_seconds: float = 60.0
    quiet_rounds: int = 1
    partitions: Mapping[str, Partition] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    until: float | None = None
    since: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a job. Seconds of the virtual clock; None: that never happened."""

    job: str
    submitted_at: float
    started_at: float | None
    ended_at: float | None
    service_seconds: float
    run_seconds: float
    num_changes: int
    num_stops: int

    @property
    def jct_seconds(self) -> float | None:
        return None if self.ended_at is None else self.ended_at - self.submitted_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One round: after its decision, who runs and who waits. `used` are GPUs; workers if nobody asks for GPUs."""

    at: float
    used: float
    num_running: int
    num_waiting: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    outcomes: tuple[Outcome, ...]
    moments: tuple[Moment, ...]
    decision_seconds: tuple[float, ...]
    capacity: float


@dataclass(slots=True)
class _Live:
    """A job in the queue or running, and what it got so far."""

    work: Work
    base: Queued
    max_stops: int | None = None
    allocation: Allocation = field(default_factory=dict)
    devices: Devices = field(default_factory=dict)
    kinds: dict[str, int] = field(default_factory=dict)
    kind_seconds: dict[str, float] = field(default_factory=dict)
    num_workers: int = 0
    part: float = 1.0
    mates: int = 0
    changed_at: float = 0.0
    started_at: float | None = None
    stopped_at: float | None = None
    service_seconds: float = 0.0
    run_seconds: float = 0.0
    num_changes: int = 0
    num_stops: int = 0

    def view(self) -> Queued:
        seen = self.work.seen()
        return seen.having(
            is_preemptible=seen.is_preemptible and may_be_stopped(self.num_stops, self.max_stops),
            allocation=self.allocation,
            devices=self.devices,
            changed_at=self.changed_at,
            service_seconds=self.service_seconds,
            run_seconds=self.run_seconds,
            kind_seconds=self.kind_seconds,
            num_stops=self.num_stops,
            stopped_at=self.stopped_at,
        )

    def outcome(self, ended_at: float | None) -> Outcome:
        return Outcome(
            job=self.base.id,
            submitted_at=self.base.submitted_at,
            started_at=self.started_at,
            ended_at=ended_at,
            service_seconds=self.service_seconds,
            run_seconds=self.run_seconds,
            num_changes=self.num_changes,
            num_stops=self.num_stops,
        )

    def pass_time(self, seconds: float) -> float | None:
        ended = self.work.work(seconds * self.part)
        ended = None if ended is None else ended / self.part
        spent = seconds if ended is None else ended
        self.run_seconds += spent
        self.service_seconds += spent * self.num_workers * self.base.ask.size / (1 + self.mates)
        for kind in self.kinds:
            self.kind_seconds[kind] = self.kind_seconds.get(kind, 0.0) + spent
        return ended


class Simulation:
    """One run of it. `step()` does a round; `run()` all of them. `on_round(time, ended, all)` tells how far it is.

    `clock` measures what decisions cost; it has no part in the result. A round costs the policy's decision and some
    microseconds for each running job: waiting ones cost nothing but their place in the queue.
    """

    def __init__(
        self, work: Iterable[Work], policy: Policy, setting: Setting, *, clock: Callable[[], float] = lambda: 0.0
    ) -> None:
        if not setting.nodes:
            raise UserError("The cluster has no nodes.", hint="give it some, such as 16x4:t4")
        if not 0 < setting.round_seconds < math.inf:
            raise UserError(
                f"Rounds of {setting.round_seconds:g} s do not work.", hint="give a number of seconds above 0"
            )
        self.policy, self.setting, self.clock = policy, setting, clock
        self.nodes = {node.name: node for node in setting.nodes}
        coming = [(job.seen(), job) for job in work]
        _check_kinds([seen for seen, _ in coming], {node.kind for node in setting.nodes})
        budgets = {name: rules.max_preemptions for name, rules in setting.partitions.items()}
        self.coming = [
            (seen.submitted_at, number, _Live(job, seen, budgets.get(seen.partition)))
            for number, (seen, job) in enumerate(coming)
        ]
        heapq.heapify(self.coming)
        self.num_jobs = len(self.coming)
        self.live: dict[str, _Live] = {}
        self.views: dict[str, Queued] = {}
        self.running: dict[str, _Live] = {}
        self.outcomes: list[Outcome] = []
        self.moments: list[Moment] = []
        self.decision_seconds: list[float] = []
        self.has_kinds = len({node.kind for node in setting.nodes}) > 1
        self.shares = any(seen.pair_rate for seen, _ in coming)
        self.uses_gpus = any(seen.ask.gpus for seen, _ in coming)
        self.capacity = sum(node.gpus if self.uses_gpus else node.cores for node in setting.nodes)
        self.now = setting.since
        self.decided_at = 0.0

    def run(self, on_round: Callable[[float, int, int], None] | None = None) -> Result:
        while self.coming or self.live:
            if self.setting.until is not None and self.now >= self.setting.until:
                break
            self.step()
            if on_round is not None:
                on_round(self.now, len(self.outcomes), self.num_jobs)
        outcomes = [*self.outcomes, *(live.outcome(None) for live in self.live.values())]
        outcomes += [live.outcome(None) for _, _, live in self.coming]
        return Result(
            outcomes=tuple(outcomes),
            moments=tuple(self.moments),
            decision_seconds=tuple(self.decision_seconds),
            capacity=self.capacity,
        )

    def step(self) -> None:
        """Let a round pass, then decide, if there is something to decide about."""
        seconds = self.setting.round_seconds
        if not self.running and self.coming and not self.live:
            # Nothing happens before the next job comes: rounds until then are as good as over.
            self.now = max(self.now, (-(-self.coming[0][0] // seconds) - 1) * seconds)
        num_ended = self._pass(seconds)
        num_came = self._admit()
        is_quiet = not num_came and not num_ended
        is_early = self.now - self.decided_at < self.setting.quiet_rounds * seconds
        if self.live and not (is_quiet and (is_early or self._is_settled())):
            self._decide()
        self._look()

    def _pass(self, seconds: float) -> int:
        ended = []
        for name, live in self.running.items():
            after = live.pass_time(seconds)
            if after is not None:
                ended.append(name)
                self.outcomes.append(live.outcome(self.now + after))
        for name in ended:
            for names in (self.live, self.running, self.views):
                names.pop(name, None)
        self.now += seconds
        return len(ended)

    def _admit(self) -> int:
        count = 0
        while self.coming and self.coming[0][0] <= self.now:
            live = heapq.heappop(self.coming)[2]
            if live.base.id in self.live:
                raise UserError(f"Two jobs are named {live.base.id!r}.", hint="give every job a name of its own")
            self.live[live.base.id] = live
            self.views[live.base.id] = live.view()
            count += 1
        return count

    def _decide(self) -> None:
        for name, live in self.running.items():
            self.views[name] = live.view()
        cluster = Cluster(
            now=self.now,
            nodes=self.setting.nodes,
            jobs=tuple(self.views.values()),
            partitions=self.setting.partitions,
            shares=self.setting.shares,
            round_seconds=self.setting.round_seconds,
        )
        began = self.clock()
        decisions = self.policy(cluster)
        self.decision_seconds.append(self.clock() - began)
        self.decided_at = self.now
        for decision in decisions:
            if isinstance(decision, Stop):
                self._change(self.live[decision.job], {}, {})
        for decision in decisions:
            if isinstance(decision, Place):
                self._change(self.live[decision.job], decision.allocation, decision.devices)
        self._share()
        if decisions and not self.running and not self.coming and self.now - self._last_news() > MAX_IDLE_SECONDS:
            raise stuck(decisions, self.live)

    def _share(self) -> None:
        """Two jobs on the same GPUs go at the speeds that were measured so, until the next decision: one that is left
        alone before that goes no faster until then."""
        if not self.shares:
            return
        for live in self.running.values():
            live.part, live.mates = 1.0, 0
        for guest_id, host_id in guests_of(self.views[name] for name in self.running).items():
            guest, host = self.live[guest_id], self.live[host_id]
            (kind,) = host.kinds
            assert guest.base.pair_rate is not None
            parts = guest.base.pair_rate(host.base, kind)
            assert parts is not None, "who was never measured together must not share"
            guest.part, host.part = parts
            guest.mates = host.mates = 1

    def _is_settled(self) -> bool:
        """Whether all jobs run, none changes its size, and there is no other kind of node: nothing to decide."""
        if len(self.running) < len(self.live) or self.has_kinds:
            return False
        return not any(live.base.is_elastic for live in self.running.values())

    def _last_news(self) -> float:
        came = max((live.base.submitted_at for live in self.live.values()), default=0.0)
        return max([came, *(outcome.ended_at or 0.0 for outcome in self.outcomes[-1:])])

    def _change(self, live: _Live, allocation: Allocation, devices: Devices) -> None:
        name = live.base.id
        if allocation and not live.allocation:
            self.running[name] = live
            live.started_at = self.now if live.started_at is None else live.started_at
        elif not allocation and live.allocation:
            del self.running[name]
            live.num_stops += 1
            live.stopped_at = self.now
        live.num_changes += dict(allocation) != dict(live.allocation)
        live.allocation, live.devices, live.changed_at = allocation, devices, self.now
        live.num_workers = sum(allocation.values())
        live.kinds = {}
        for node in allocation:
            live.kinds[self.nodes[node].kind] = live.kinds.get(self.nodes[node].kind, 0) + allocation[node]
        live.work.place(allocation, self.nodes)
        self.views[name] = live.view()

    def _look(self) -> None:
        used = sum(
            live.num_workers * (live.base.ask.gpus if self.uses_gpus else 1.0) / (1 + live.mates)
            for live in self.running.values()
        )
        self.moments.append(
            Moment(
                at=self.now,
                used=used,
                num_running=len(self.running),
                num_waiting=len(self.live) - len(self.running),
            )
        )


def _check_kinds(jobs: Iterable[Queued], kinds: Collection[str]) -> None:
    """Every job of a known speed gets something done on some kind of node."""
    for job in jobs:
        if job.rate is not None and not any(job.rate(kind, job.min_workers, 1) > 0 for kind in kinds):
            raise UserError(
                f"{job.id} gets nothing done on any node of this cluster.",
                why=f"its nodes are of the kinds {', '.join(sorted(kinds))}, and on those it was never measured",
                hint="give the cluster nodes of a kind that the trace knows, such as --cluster 9x4:v100",
            )


def stuck(decisions: Sequence[Decision], live: Mapping[str, object]) -> UserError:
    """Jobs that wait for ever, with the reason that the policy gives for the first of them."""
    first = decisions[0]
    return UserError(
        f"{len(live)} jobs can never start, {first.job} among them.",
        why=first.why,
        hint="give the cluster nodes for them, or take them out of the trace",
    )


def simulate(
    work: Iterable[Work],
    policy: Policy,
    setting: Setting,
    *,
    clock: Callable[[], float] = lambda: 0.0,
    on_round: Callable[[float, int, int], None] | None = None,
) -> Result:
    """Everything from the first job to the last."""
    return Simulation(work, policy, setting, clock=clock).run(on_round)
