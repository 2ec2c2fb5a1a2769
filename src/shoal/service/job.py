"""A job in the queue: what was asked for, and what became of it so far. Plain values, kept in the store as JSON."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

import msgspec

from shoal.place.cluster import Ask
from shoal.spec.errors import UserError

WAITING, STARTING, RUNNING, STOPPING = "waiting", "starting", "running", "stopping"
FINISHED, FAILED, CANCELLED = "finished", "failed", "cancelled"
ACTIVE = frozenset({STARTING, RUNNING, STOPPING})
"""States in which a job holds nodes: an attempt is under way, or may be."""

OVER = frozenset({FINISHED, FAILED, CANCELLED})
STATES = (WAITING, "held", STARTING, RUNNING, STOPPING, FINISHED, FAILED, CANCELLED)
"""As people are told them: see `Job.shown_state`."""

RUN_PREFIX = "job-"
MAX_NAMED = 100_000
_NONE: dict[Any, Any] = {}
"""Shared by all jobs that have nothing there, for there may be very many. Nobody changes a job's values in place."""


def _nothing() -> dict[Any, Any]:
    return _NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What somebody submitted. It never changes; `Job` has what does.

    `run_args` are arguments of `shoal run`, with the script, but for the number of workers. `cores`, `memory_bytes`,
    `disk_bytes` and `gpus` are what each worker needs. `after` are jobs that must have finished well before. Of an
    array, `array` is the number of its first job, `index` the place in it. `data` are paths that it reads. `env` may
    hold secrets: it is shown to its owner only. After `max_preemptions` stops it is not stopped for others any more.
    """

    run_args: tuple[str, ...]
    name: str
    working_dir: str
    env: Mapping[str, str] = field(default_factory=_nothing)
    min_workers: int = 1
    max_workers: int = 1
    is_elastic: bool = False
    job_class: str = "training"
    priority: int = 0
    partition: str = "default"
    account: str = ""
    cores: float = 1.0
    memory_bytes: int = 0
    gpus: float = 0.0
    kinds: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    time_limit_seconds: float | None = None
    after: tuple[int, ...] = ()
    array: int | None = None
    index: int | None = None
    is_preemptible: bool = True
    disk_bytes: int = 0
    max_preemptions: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job and how far it is.

    `token` numbers its attempts: it grows with each, in the transaction before the attempt is started, and an older
    one never starts again. `wish` is how the attempt under way is to end: `cancel`, `preempt`, `time`, or nothing.
    `allocation` is what is reserved for it; while it shrinks, `target` is what will be left of that. `node_kinds` are
    the kinds of those nodes, `kind_seconds` how long it ran on each kind.

    `span` is the fewest and the most workers that the attempt under way can have, as it was started. While it runs,
    `min_workers` and `max_workers` stay within that.

    `num_stops` counts attempts that were stopped and went on later, `num_preempted` how often it was stopped for
    others. `stop_seconds` is what that cost when it was measured last: from the order to stop until the attempt was
    over (`stopping_seconds`), and from the next start until it came further than before (`last_step`).

    `lowered_bytes` is the memory that each worker has in this attempt, where that is less than was asked for;
    `keeps_memory`: it needed what it had given back, and is not asked again. `change` says what was decided about it
    last and why, `change_wall` when.

    Times that end with `_at` are seconds of the service's own clock (`service/clock.py`), which no change of the
    date moves; those that end with `_wall` are dates for people.
    """

    number: int
    owner: str
    asked: Asked
    state: str = WAITING
    is_held: bool = False
    token: int = 0
    wish: str = ""
    allocation: Mapping[str, int] = field(default_factory=_nothing)
    devices: Mapping[str, tuple[int, ...]] = field(default_factory=_nothing)
    target: Mapping[str, int] | None = None
    target_devices: Mapping[str, tuple[int, ...]] = field(default_factory=_nothing)
    min_workers: int = 1
    max_workers: int = 1
    span: tuple[int, int] | None = None
    submitted_at: float = 0.0
    changed_at: float = 0.0
    accrued_at: float = 0.0
    stopped_at: float | None = None
    node_kinds: tuple[str, ...] = ()
    kind_seconds: Mapping[str, float] = field(default_factory=_nothing)
    run_seconds: float = 0.0
    service_seconds: float = 0.0
    num_stops: int = 0
    num_preempted: int = 0
    num_lost: int = 0
    began_at: float = 0.0
    stop_seconds: float | None = None
    stopping_seconds: float | None = None
    last_step: int | None = None
    lowered_bytes: int | None = None
    keeps_memory: bool = False
    change: str = ""
    change_wall: float | None = None
    has_run: bool = False
    exit_code: int | None = None
    cause: str = ""
    message: str = ""
    submitted_wall: float = 0.0
    started_wall: float | None = None
    ended_wall: float | None = None

    @property
    def run_name(self) -> str:
        """The name of its run folder. All attempts are the same run, resumed."""
        return f"{RUN_PREFIX}{self.number}"

    @property
    def num_reserved(self) -> int:
        return sum(self.allocation.values())

    @property
    def num_wanted(self) -> int:
        """How many workers it is to have from now on."""
        return sum((self.allocation if self.target is None else self.target).values())

    @property
    def size(self) -> float:
        """What it has now, in the unit in which it is counted who got how much: see `Ask.size`."""
        return self.num_reserved * ask_of(self.asked).size

    @property
    def memory_bytes(self) -> int:
        """The memory that is reserved for each of its workers."""
        return self.asked.memory_bytes if self.lowered_bytes is None else self.lowered_bytes

    @property
    def shown_state(self) -> str:
        """The state as people are told it: whoever waits and may not start is held."""
        return "held" if self.is_held and self.state == WAITING else self.state

    @property
    def is_over(self) -> bool:
        return self.state in OVER

    @property
    def is_active(self) -> bool:
        return self.state in ACTIVE

    @property
    def account(self) -> str:
        return self.asked.account or self.owner


def check_gpus(gpus: float, num_workers: int) -> None:
    """Raise UserError but for whole GPUs, or for a single worker a part of one."""
    if gpus > 1 and not float(gpus).is_integer():
        why = "a worker has whole GPUs, or a part of one"
        raise UserError(f"{gpus:g} GPUs a worker are refused.", why=why, hint="for example: 2, or 0.5")
    if 0 < gpus < 1 and num_workers > 1:
        raise UserError(
            f"{num_workers} workers with {gpus:g} of a GPU each are refused.",
            why="they could come to share one, and NCCL does not let two workers of a job use the same GPU",
            hint="ask for 1 GPU a worker, or for 1 worker; `--array` makes many jobs of one worker",
        )


def ask_of(asked: Asked, memory_bytes: int | None = None) -> Ask:
    """What each worker needs; with another amount of memory where that is given."""
    return Ask(
        cores=asked.cores,
        memory_bytes=asked.memory_bytes if memory_bytes is None else memory_bytes,
        gpus=asked.gpus,
        disk_bytes=asked.disk_bytes,
        kinds=frozenset(asked.kinds),
    )


def _defaults(kind: type) -> dict[str, Any]:
    """Field -> what it is where nothing is said; MISSING where something must be."""
    return {
        each.name: each.default if each.default_factory is MISSING else each.default_factory()
        for each in fields(kind)
        if each.name != "asked"
    }


_ASKED, _FACTS = _defaults(Asked), _defaults(Job)


def encode_asked(asked: Asked) -> bytes:
    return _encode(asked, _ASKED)


def encode_facts(job: Job) -> bytes:
    """All of a job but what was asked for, which is written once."""
    return _encode(job, _FACTS)


def _encode(value: Asked | Job, defaults: Mapping[str, Any]) -> bytes:
    """What is as ever is left out: most of it is, and a service with many jobs reads them all when it starts."""
    told = {name: each for name, default in defaults.items() if (each := getattr(value, name)) != default}
    return msgspec.json.encode(told)


def decode_job(asked: bytes, facts: bytes) -> Job:
    return msgspec.json.decode(b'{"asked":' + asked + b"," + facts[1:], type=Job)


def parse_number(text: str) -> int:
    """The job that is meant by `17` or `job-17`."""
    digits = text.removeprefix(RUN_PREFIX)
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= 15 and int(digits) > 0):
        raise UserError(f"{text[:60]!r} is not the number of a job.", hint="`shoal queue` shows them")
    return int(digits)


def parse_numbers(texts: tuple[str, ...] | list[str]) -> list[int]:
    """Jobs as people name them: numbers, and ranges of them such as 17-26."""
    found: list[int] = []
    for text in texts:
        first, dash, last = text.removeprefix(RUN_PREFIX).partition("-")
        start, stop = parse_number(first), parse_number(last) if dash else parse_number(first)
        if stop < start or stop - start >= MAX_NAMED:
            raise UserError(f"{text[:60]!r} is not a range of jobs.", hint="for example: 17-26")
        found += range(start, stop + 1)
        if len(found) > MAX_NAMED:
            raise UserError(f"More than {MAX_NAMED:,} jobs at once.", hint="name them in several parts")
    return list(dict.fromkeys(found))
