"""What a policy sees: nodes, jobs, partitions and people, at one moment. Frozen; service and simulator make it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

CLASSES = ("batch", "training", "interactive", "serving")
"""Job classes, the least urgent first."""

Rate = Callable[[str, int, int], float]
"""How much useful work a second a job would do: (kind of node, workers, nodes) -> progress a second.

Only ratios matter. Throughput times statistical efficiency where that was measured, throughput elsewhere.
"""

PairRate = Callable[["Queued", str], tuple[float, float] | None]
"""How fast it and another job are while both share the same GPUs: (the other, kind of node) -> each as a part of its
speed alone there. None where that was not measured, and then they never share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What one worker of a job needs on its node. `gpus` below one is a share of one GPU; above, whole ones.

    `kinds` are the kinds of nodes it can run on; empty means any.
    """

    cores: float = 1.0
    memory_bytes: int = 0
    gpus: float = 0.0
    disk_bytes: int = 0
    kinds: frozenset[str] = frozenset()

    @property
    def size(self) -> float:
        """What one worker counts wherever it is counted who got how much: its GPUs, and one if those are fewer."""
        return max(self.gpus, 1.0)

    def on(self, kinds: frozenset[str]) -> "Ask":
        """The same on these kinds of nodes."""
        return Ask(
            cores=self.cores,
            memory_bytes=self.memory_bytes,
            gpus=self.gpus,
            disk_bytes=self.disk_bytes,
            kinds=kinds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine. `holds` names data and models that are on its disk already."""

    name: str
    kind: str = "cpu"
    cores: float = 1.0
    memory_bytes: int = 0
    gpus: int = 0
    disk_bytes: int = 0
    partition: str = "default"
    holds: frozenset[str] = frozenset()
    is_draining: bool = False


Allocation = Mapping[str, int]
"""Node name -> how many workers of the job are there. Empty: it is not running."""

Devices = Mapping[str, tuple[int, ...]]
"""Node name -> the numbers of the GPUs that its workers there have, worker by worker."""


@dataclass(frozen=True, kw_only=True)
class Queued:
    """A job that is not over, as policies see it.

    `service_seconds` is what it got: workers, each counted with `ask.size`, times seconds. `run_seconds` is how long
    it ran in all, and `kind_seconds` that by kind of node. `remaining_seconds` is an estimate at `max_workers` on the
    usual node, with its relative uncertainty; None: nobody knows. `num_stops` counts preemptions and restarts,
    `stopped_at` the last. `stop_seconds` is what stopping and starting it costs, `resize_seconds` what another size
    does; None: as much. `is_elastic`: it can change its size while it runs. `changed_at`: when its allocation last
    changed.
    `pair_rate`: it may share its GPUs with another job of which that is true, too; None: it may not.
    `blocked_by` is a reason why it cannot start yet ("after JOB", "held", ...). `needs` are data and models it reads.
    `devices` are the GPUs it has; where that is not known they are counted as if it had the best fitting ones.
    """

    id: str
    ask: Ask = Ask()
    min_workers: int = 1
    max_workers: int = 1
    owner: str = ""
    account: str = ""
    job_class: str = "training"
    priority: int = 0
    weight: float = 1.0
    partition: str = "default"
    submitted_at: float = 0.0
    time_limit_seconds: float | None = None
    allocation: Allocation = field(default_factory=dict)
    devices: Devices = field(default_factory=dict)
    changed_at: float = 0.0
    service_seconds: float = 0.0
    run_seconds: float = 0.0
    kind_seconds: Mapping[str, float] = field(default_factory=dict)
    remaining_seconds: float | None = None
    remaining_spread: float = 0.0
    num_stops: int = 0
    stopped_at: float | None = None
    stop_seconds: float = 0.0
    resize_seconds: float | None = None
    is_elastic: bool = False
    is_preemptible: bool = True
    is_spread: bool = False
    blocked_by: str = ""
    needs: frozenset[str] = frozenset()
    rate: Rate | None = None
    pair_rate: PairRate | None = None

    @property
    def num_workers(self) -> int:
        return sum(self.allocation.values()) if self.allocation else 0

    def having(self, **changes: object) -> "Queued":
        """What `dataclasses.replace` gives, in a tenth of its time: each decision makes some of every job."""
        other, facts = object.__new__(Queued), self.__dict__.copy()
        facts.update(changes)
        object.__setattr__(other, "__dict__", facts)
        return other


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """A part of the nodes with rules of its own. None: no limit.

    `lends`: others may use what is idle, and give it back. `max_user_share` caps one person's part of it, 0 to 1.
    `max_preemptions` is how often a job may be stopped for others.
    """

    name: str = "default"
    lends: bool = True
    max_workers_per_user: int | None = None
    max_workers_per_job: int | None = None
    max_user_share: float = 1.0
    max_preemptions: int | None = None
    classes: frozenset[str] = frozenset(CLASSES)


def guests_of(jobs: Iterable[Queued]) -> dict[str, str]:
    """Who shares the GPUs of whom: guest -> host. Of two jobs on the same GPUs the host is who came first."""
    found: dict[object, Queued] = {}
    guests: dict[str, str] = {}
    for job in sorted(
        (job for job in jobs if job.pair_rate and job.devices and job.ask.gpus >= 1),
        key=lambda j: (j.submitted_at, j.id),
    ):
        host = found.setdefault(tuple(sorted(job.devices.items())), job)
        if host is not job:
            guests[job.id] = host.id
    return guests


def may_be_stopped(num_preempted: int, *budgets: int | None) -> bool:
    """Whether a job that was stopped so often for others may be stopped once more. A budget of None has no end."""
    return all(budget is None or num_preempted < budget for budget in budgets)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Everything at one moment. `shares` are weights of accounts ("lab", "lab/alice"), 1 where none is given;
    `usage` what they used lately, in worker-seconds, decayed. `quotas` are how many workers a person may use at once
    in all partitions together; who is not named there may use any number.

    `links` is the measured rate between two nodes in bytes a second, where it was measured.
    """

    now: float
    nodes: tuple[Node, ...]
    jobs: tuple[Queued, ...]
    partitions: Mapping[str, Partition] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    usage: Mapping[str, float] = field(default_factory=dict)
    quotas: Mapping[str, int] = field(default_factory=dict)
    links: Mapping[tuple[str, str], float] = field(default_factory=dict)
    round_seconds: float = 60.0
