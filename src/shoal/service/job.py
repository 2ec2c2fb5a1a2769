"""A job in the queue: what was asked for, and what became of it so far. Plain values, kept in the store as JSON."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import msgspec

from shoal.spec.errors import UserError

WAITING, STARTING, RUNNING, STOPPING = "waiting", "starting", "running", "stopping"
FINISHED, FAILED, CANCELLED = "finished", "failed", "cancelled"
ACTIVE = frozenset({STARTING, RUNNING, STOPPING})
"""States in which a job holds nodes: an attempt is under way, or may be."""

OVER = frozenset({FINISHED, FAILED, CANCELLED})
RUN_PREFIX = "job-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What somebody submitted. It never changes; `Job` has what does.

    `run_args` are arguments of `shoal run`, with the script, but for the number of workers. `cores`, `memory_bytes`
    and `gpus` are what each worker needs. `after` are jobs that must have finished well before. Of an array, `array`
    is the number of its first job, `index` the place in it. `data` are paths that it reads. `env` may hold secrets:
    it is shown to its owner only.
    """

    run_args: tuple[str, ...]
    name: str
    working_dir: str
    env: Mapping[str, str] = field(default_factory=dict)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job and how far it is.

    `token` numbers its attempts: it grows with each, in the transaction before the attempt is started, and an older
    one never starts again. `wish` is how the attempt under way is to end: `cancel`, `preempt`, `time`, or nothing.
    `allocation` is what is reserved for it; while it shrinks, `target` is what will be left of that. `node_kinds` are
    the kinds of those nodes, `kind_seconds` how long it ran on each kind.

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
    allocation: Mapping[str, int] = field(default_factory=dict)
    devices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    target: Mapping[str, int] | None = None
    target_devices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    min_workers: int = 1
    max_workers: int = 1
    submitted_at: float = 0.0
    changed_at: float = 0.0
    accrued_at: float = 0.0
    stopped_at: float | None = None
    node_kinds: tuple[str, ...] = ()
    kind_seconds: Mapping[str, float] = field(default_factory=dict)
    run_seconds: float = 0.0
    service_seconds: float = 0.0
    num_stops: int = 0
    num_lost: int = 0
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
    def is_over(self) -> bool:
        return self.state in OVER

    @property
    def is_active(self) -> bool:
        return self.state in ACTIVE

    @property
    def account(self) -> str:
        return self.asked.account or self.owner


_FACTS = tuple(field.name for field in fields(Job) if field.name != "asked")


def encode_asked(asked: Asked) -> bytes:
    return msgspec.json.encode(asked)


def encode_facts(job: Job) -> bytes:
    """All of a job but what was asked for, which is written once."""
    return msgspec.json.encode({name: getattr(job, name) for name in _FACTS})


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
        if stop < start or stop - start >= 100_000:
            raise UserError(f"{text[:60]!r} is not a range of jobs.", hint="for example: 17-26")
        found += range(start, stop + 1)
    return list(dict.fromkeys(found))
