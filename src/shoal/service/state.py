"""What the parts of the service share while it runs: the store, who writes, the nodes, and what was last seen."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.place.cluster import Cluster, Node, Queued
from shoal.place.decision import Wait
from shoal.service.asking import Submission, check_partition
from shoal.service.growing import may_be_there
from shoal.service.job import Asked, ask_of
from shoal.service.learned import Learned, Prospect
from shoal.service.settings import Settings, apply_limits
from shoal.service.store import Known, Reader, Store
from shoal.service.writer import Writer
from shoal.spec.errors import UserError


@dataclass(slots=True)
class Shared:
    """One service. The dispatcher replaces `nodes`, `seen`, `prospects` and `waits` whole, the learner `learned`.

    `woken` is set when there is something to decide. `seen` has what keepers said last, job by job, and `prospects`
    what is expected of each by what was learned.
    """

    home: str
    folder: str
    store: Store
    settings: Settings
    writer: Writer
    woken: threading.Event
    machines: tuple[Node, ...] = ()
    seen: Mapping[int, Any] = field(default_factory=dict)
    learned: Learned = field(default_factory=Learned)
    prospects: Mapping[int, Prospect] = field(default_factory=dict)
    waits: Mapping[int, Wait] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)
    decided_seconds: float = 0.0
    # Whether jobs could ever fit, as the settings were that it was found with.
    _fits: dict[Any, UserError | None] = field(default_factory=dict)
    _fits_by: Settings | None = None
    _local: threading.local = field(default_factory=threading.local)

    @property
    def known(self) -> Known:
        return self.store.known

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The machines as jobs may use them now."""
        return tuple(apply_limits(node, self.settings, self.known.drained) for node in self.machines)

    @property
    def reader(self) -> Reader:
        """A connection for reading; each thread has its own."""
        found: Reader | None = getattr(self._local, "reader", None)
        if found is None:
            found = self._local.reader = Reader(self.folder)
        return found

    def check_fits(self, submission: Submission) -> None:
        """Raises UserError where a job could never start; says the largest that would."""
        nodes, settings = self.nodes, self.settings
        growth = {each.node.partition for each in settings.growth.values()}
        names = {*settings.partition_names, *(node.partition for node in nodes), *growth}
        for asked in dict.fromkeys(map(_shape, submission.jobs)):
            check_partition(asked, names)
            key = (asked, nodes)
            if self._fits_by is not settings or len(self._fits) > 10_000:
                self._fits, self._fits_by = {}, settings
            if key not in self._fits:
                more = [node for _, node in may_be_there(settings.growth, {})]
                self._fits[key] = _never(asked, (*nodes, *more) if nodes else (), settings)
            problem = self._fits[key]
            if problem is not None:
                raise UserError(problem.message, why=problem.why, hint=problem.hint)


def _shape(asked: Asked) -> Asked:
    """What matters for whether it could ever fit; the same for most jobs."""
    return Asked(
        run_args=(),
        name="",
        working_dir="",
        env=_NONE,
        min_workers=asked.min_workers,
        max_workers=asked.min_workers,
        job_class=asked.job_class,
        partition=asked.partition,
        cores=asked.cores,
        memory_bytes=asked.memory_bytes,
        gpus=asked.gpus,
        disk_bytes=asked.disk_bytes,
        kinds=asked.kinds,
    )


class _Nothing(dict[str, str]):
    """An empty mapping that can be part of a key."""

    def __hash__(self) -> int:  # type: ignore[override]
        return 0


_NONE = _Nothing()


def _never(asked: Asked, nodes: tuple[Node, ...], settings: Settings) -> UserError | None:
    from shoal.place.fit import could_ever_fit

    if not nodes:
        return None  # they have not been looked at yet
    job = Queued(
        id="?",
        ask=ask_of(asked),
        min_workers=asked.min_workers,
        max_workers=asked.min_workers,
        job_class=asked.job_class,
        partition=asked.partition,
    )
    cluster = Cluster(now=0.0, nodes=nodes, jobs=(), partitions=settings.partitions)
    problem = could_ever_fit(cluster, job)
    if problem is None:
        return None
    told = problem.message.replace("job ?", "the job")
    return UserError(told[:1].upper() + told[1:], why=problem.why, hint=problem.hint)
