"""What people should be woken up for: from what a launcher sees to alerts. Pure; what is remembered is passed in.

The same rules judge a run while it goes on, and one that is recorded (`replay`).
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from heapq import merge
from itertools import pairwise
from operator import itemgetter
from typing import Any, Literal

from shoal.observe.breakdown import break_down, median
from shoal.observe.clean import one_line
from shoal.observe.status import duration, number
from shoal.observe.straggler import slow_rank
from shoal.spec.event import Event, StepMetrics
from shoal.spec.system import SystemSample

Severity = Literal["warning", "error"]

FEW_STEPS = 3
NO_PROGRESS_STEPS = 10
"""Nothing is wrong before so many of the longest recent steps."""
LOSS_STEPS = 50
SPIKE_STEPS = 3
"""So many losses in a row are a spike; one is a hard batch."""
SPIKE_DEVIATIONS = 8.0
CALM_STEPS = 20
"""After so many good steps it is over."""
WINDOW_STEPS = 20
WINDOW_SECONDS = 10.0
WINDOWS = 3
"""A rank that is slow in so many windows in a row is a straggler; in one it had bad luck."""
GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """Something is wrong, or is not any more (`is_resolved`). `rank` is None where it is nobody's in particular.

    `is_told`: who sits at the terminal knows already, because whoever found it has said so there.
    """

    rule: str
    message: str
    why: str = ""
    hint: str = ""
    severity: Severity = "warning"
    rank: int | None = None
    step: int | None = None
    time: float = 0.0
    is_resolved: bool = False
    is_told: bool = False

    def facts(self) -> dict[str, Any]:
        """The data of an `alert` event."""
        words = {name: getattr(self, name) for name in ("rule", "message", "why", "hint", "severity", "rank")}
        return {**words, **({"is_resolved": True} if self.is_resolved else {})}

    def event(self) -> Event:
        """For the journal."""
        return Event(kind="alert", time=self.time, rank=self.rank, step=self.step, data=self.facts())

    def text(self) -> str:
        """What people read, in a line or two."""
        if self.is_resolved:
            return f"resolved: {self.message}"
        why = f" ({self.why})" if self.why else ""
        return f"{self.message.rstrip('.')}{why}." + (f" Do: {self.hint}" if self.hint else "")

    def plain(self) -> dict[str, Any]:
        """For programs."""
        return {name: value for name, value in asdict(self).items() if name != "is_told"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What was seen since the last look. `now` is seconds since 1970; sizes of the disk are None where not known."""

    now: float
    steps: Mapping[int, Sequence[StepMetrics]] = field(default_factory=dict)
    events: Sequence[Event] = ()
    disk_free: int | None = None
    disk_total: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When something is an alert.

    no_progress: seconds without a step, at least. straggler: the part of the time that a slow rank costs. disk_low:
    free bytes; None: 2 GiB, or a twentieth of a small disk. cool_down: seconds in which the same rule says
    nothing more of the same rank. off: rules that say nothing at all.
    """

    no_progress: float = 300.0
    straggler: float = 0.2
    disk_low: int | None = None
    cool_down: float = 600.0
    off: frozenset[str] = frozenset()


Key = tuple[str, int | None]


@dataclass(slots=True)
class Memory:
    """What rules remember of a run between two looks."""

    num_steps: int = 0
    step: int | None = None
    stepped_at: float = 0.0
    step_gaps: deque[float] = field(default_factory=lambda: deque(maxlen=LOSS_STEPS))
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=LOSS_STEPS))
    num_spiking: int = 0
    num_calm: int = 0
    num_finite: int = 0
    window: dict[int, list[StepMetrics]] = field(default_factory=dict)
    suspect: Key = ("", None)
    num_suspected: int = 0
    num_equal: int = 0
    is_over: bool = False
    active: dict[Key, bool] = field(default_factory=dict)
    """What is wrong now, and whether people were told."""
    sent_at: dict[Key, float] = field(default_factory=dict)


def judge(sight: Sight, memory: Memory, limits: Limits) -> list[Alert]:
    """What people should hear after this look. Changes `memory`."""
    found = [alert for rule in RULES for alert in rule(sight, memory, limits)]
    memory.is_over = memory.is_over or any(event.kind == "run_ended" for event in sight.events)
    told = (_once(alert, sight.now, memory, limits) for alert in found if alert.rule not in limits.off)
    return [replace(alert, time=sight.now) for alert in told if alert is not None]


def _once(alert: Alert, now: float, memory: Memory, limits: Limits) -> Alert | None:
    """The same thing is said once, and again only after the cool-down. An end is said of what was said."""
    key = alert.rule, alert.rank
    if alert.is_resolved:
        return alert if memory.active.pop(key, False) else None
    if key in memory.active:
        return None
    is_fresh = now >= memory.sent_at.get(key, -math.inf) + limits.cool_down
    memory.active[key] = is_fresh
    if is_fresh:
        memory.sent_at[key] = now
    return alert if is_fresh else None


def _lead(sight: Sight) -> Sequence[StepMetrics]:
    """The steps of the rank that has most of them: loss and norm are the same for all."""
    return max(sight.steps.values(), key=len, default=())


def no_progress(sight: Sight, memory: Memory, limits: Limits) -> Iterable[Alert]:
    """Steps have stopped to come."""
    if lead := _lead(sight):
        if memory.num_steps:
            memory.step_gaps.append((sight.now - memory.stepped_at) / len(lead))
        memory.step_gaps.extend(later.time - earlier.time for earlier, later in pairwise(lead))
        memory.num_steps += len(lead)
        memory.step, memory.stepped_at = lead[-1].step, sight.now
        yield Alert(rule="no_progress", message="Steps are taken again.", step=memory.step, is_resolved=True)
    elif memory.num_steps >= FEW_STEPS and not memory.is_over:
        usual = max(memory.step_gaps, default=0.0)
        silent = sight.now - memory.stepped_at
        if silent > max(limits.no_progress, NO_PROGRESS_STEPS * usual):
            yield Alert(
                rule="no_progress",
                severity="error",
                step=memory.step,
                message=f"No step has ended for {duration(silent)}.",
                why=f"the last was step {memory.step}, and before it none took longer than {usual:.3g} s",
                hint="`shoal stacks RUN` says where its workers are; "
                "if that is usual here: `-o alert.no_progress=SECONDS`",
            )


def loss_spike(sight: Sight, memory: Memory, limits: Limits) -> Iterable[Alert]:
    """The loss has jumped above what it was, for several steps in a row."""
    for row in _lead(sight):
        if not math.isfinite(row.loss):
            continue  # for another rule
        if len(memory.losses) >= CALM_STEPS and row.loss > (ceiling := _ceiling(memory.losses)):
            memory.num_spiking, memory.num_calm = memory.num_spiking + 1, 0
            if memory.num_spiking == SPIKE_STEPS:
                yield Alert(
                    rule="loss_spike",
                    step=row.step,
                    message=f"The loss has jumped to {number(row.loss)} at step {row.step}.",
                    why=f"over {len(memory.losses)} steps it was {number(median(memory.losses))}, "
                    f"and more than {number(ceiling)} is unusual",
                    hint="look at the data of these steps; lower the learning rate, or clip gradients (`max_norm=1`)",
                )
            if memory.num_spiking < LOSS_STEPS:
                continue
            memory.losses.clear()  # it stays there: this is how it is now
        memory.num_spiking, memory.num_calm = 0, memory.num_calm + 1
        memory.losses.append(row.loss)
        if memory.num_calm >= CALM_STEPS:
            yield Alert(rule="loss_spike", message="The loss is as usual again.", step=row.step, is_resolved=True)


def _ceiling(losses: Sequence[float]) -> float:
    middle = median(losses)
    spread = 1.4826 * median([abs(loss - middle) for loss in losses])
    return middle + max(SPIKE_DEVIATIONS * spread, abs(middle) / 2)


def nan(sight: Sight, memory: Memory, limits: Limits) -> Iterable[Alert]:
    """A loss or gradient is no number."""
    hint = "lower the learning rate, clip gradients (`max_norm=1.0`), or look at the samples of that step"
    for event in sight.events:
        if event.kind == "diagnosis" and event.data.get("cause") == "nan":
            memory.num_finite = 0
            words = {name: one_line(event.data.get(name) or "") for name in ("message", "why")}
            yield Alert(rule="nan", severity="error", step=event.step, hint=hint, is_told=True, **words)  # type: ignore[arg-type]
    for event in sight.events:
        if event.kind == "step_skipped":
            memory.num_finite = 0
            message = one_line(event.data.get("message") or "A loss or gradient was no number.")
            yield Alert(
                rule="nan", severity="error", step=event.step, message=message, why="the step was left out", hint=hint
            )
    for row in _lead(sight):
        norm = row.grad_norm if row.grad_norm is not None else 0.0
        if math.isfinite(row.loss) and math.isfinite(norm):
            memory.num_finite += 1
            if memory.num_finite >= CALM_STEPS:
                yield Alert(rule="nan", message="Losses are numbers again.", step=row.step, is_resolved=True)
        else:
            memory.num_finite = 0
            name, value = ("loss", row.loss) if not math.isfinite(row.loss) else ("norm of the gradient", norm)
            message = f"The {name} is {value} at step {row.step}."
            yield Alert(rule="nan", severity="error", step=row.step, message=message, hint=hint)


_SLOW = frozenset(
    {"slow_input", "slow_compute", "throttled", "swapping", "no_core", "busy_elsewhere", "slow_link", "uneven_data"}
)
"""Causes of a `diagnosis` that make a rank a straggler."""


def straggler(sight: Sight, memory: Memory, limits: Limits) -> Iterable[Alert]:
    """One rank is waited for by all others, for longer than bad luck lasts."""
    for event in sight.events:
        if event.kind == "world":
            memory.window.clear()
        elif event.kind == "diagnosis" and event.data.get("cause") in _SLOW:
            words = {name: one_line(event.data.get(name) or "") for name in ("message", "why", "hint")}
            yield Alert(rule="straggler", rank=event.rank, step=event.step, is_told=True, **words)  # type: ignore[arg-type]
    for rank, rows in sight.steps.items():
        memory.window.setdefault(rank, []).extend(rows)
    if memory.window and _is_full(memory.window):
        window, memory.window = memory.window, {}
        if len(window) > 1:
            yield from _judge_window(window, memory, limits)


def _is_full(window: Mapping[int, Sequence[StepMetrics]]) -> bool:
    rows = max(window.values(), key=len)
    return len(rows) >= WINDOW_STEPS and rows[-1].time - rows[0].time >= WINDOW_SECONDS


def _judge_window(window: Mapping[int, Sequence[StepMetrics]], memory: Memory, limits: Limits) -> Iterable[Alert]:
    breakdown = break_down(window)
    found = next(iter(slow_rank(breakdown)), None) if breakdown is not None else None
    if found is None or (found.gain or 0.0) < limits.straggler:
        memory.num_suspected, memory.num_equal = 0, memory.num_equal + 1
        if memory.num_equal >= WINDOWS:
            for rule, rank in list(memory.active):
                if rule == "straggler":
                    message = f"Rank {rank} is as fast as the others again."
                    yield Alert(rule=rule, rank=rank, message=message, is_resolved=True)
        return
    memory.num_equal = 0
    is_same = memory.suspect == (found.kind, found.rank)
    memory.suspect, memory.num_suspected = (found.kind, found.rank), memory.num_suspected + 1 if is_same else 1
    if memory.num_suspected >= WINDOWS:
        cost = f"{found.why}; it costs {100 * (found.gain or 0):.0f} % of the time"
        yield Alert(rule="straggler", rank=found.rank, message=found.what, why=cost, hint=found.change)


def disk_low(sight: Sight, memory: Memory, limits: Limits) -> Iterable[Alert]:
    """The disk of the run folder is nearly full."""
    if sight.disk_free is None:
        return
    low = limits.disk_low
    if low is None:
        low = min(2 * GIB, (sight.disk_total or 0) // 20)
    if sight.disk_free < low:
        yield Alert(
            rule="disk_low",
            message=f"The disk of the run folder has {sight.disk_free / GIB:.1f} GiB left.",
            why=f"less than {low / GIB:.1f} GiB; checkpoints will fail when it is full",
            hint="remove old runs and checkpoints (`keep=` says how many stay), or move SHOAL_HOME",
        )
    elif sight.disk_free > 1.25 * low:
        message = f"The disk has {sight.disk_free / GIB:.1f} GiB again."
        yield Alert(rule="disk_low", message=message, is_resolved=True)


def worker_lost(sight: Sight, memory: Memory, limits: Limits) -> Iterable[Alert]:
    """A worker is gone, frozen or hangs, while the run goes on."""
    for event in sight.events:
        if event.kind == "worker_lost":
            why = one_line(event.data.get("reason") or "")
            message = f"Rank {_rank_of(event)} was lost; the run goes on without it."
            hint = "`shoal logs RUN --rank N` has what it printed last; another one is started for it"
            yield Alert(rule="worker_lost", rank=_rank_of(event), message=message, why=why, hint=hint, is_told=True)
        elif event.kind == "worker_joined":
            message = f"Rank {_rank_of(event)} is back."
            yield Alert(rule="worker_lost", rank=_rank_of(event), message=message, is_resolved=True, is_told=True)
        elif event.kind == "worker_hung":
            where = one_line(event.data.get("where") or "")
            yield Alert(
                rule="worker_hung",
                severity="error",
                rank=event.rank,
                message=f"Rank {event.rank} hangs, and others wait for it.",
                why=f"it is in {where}" if where else "",
                hint="`shoal stacks RUN` has the stacks of all ranks",
                is_told=True,
            )
        elif event.kind == "worker_went_on":
            message = f"Rank {event.rank} went on."
            yield Alert(rule="worker_hung", rank=event.rank, message=message, is_resolved=True, is_told=True)
        elif event.kind == "waiting_for_workers":
            have, need = event.data.get("present"), event.data.get("min_workers")
            message = f"The run waits: it has {have} workers and needs {need}."
            hint = "replacements are started where there is room: add machines, or look why they do not come"
            yield Alert(rule="too_few_workers", severity="error", message=message, hint=hint, is_told=True)
        elif event.kind == "world" and not memory.is_over:
            message = "There are enough workers again."
            yield Alert(rule="too_few_workers", message=message, is_resolved=True, is_told=True)


def _rank_of(event: Event) -> int | None:
    """Whom an event is about: the launcher says it as WORKER.INCARNATION."""
    worker = str(event.data.get("id", "")).partition(".")[0]
    return int(worker) if worker.isdecimal() else event.rank


def trouble(sight: Sight, memory: Memory, limits: Limits) -> Iterable[Alert]:
    """What workers themselves report: a checkpoint that failed, copies that differ."""
    for event in sight.events:
        words = {name: one_line(event.data.get(name) or "") for name in ("message", "why", "hint")}
        if event.kind == "checkpoint_failed":
            message = words["message"] or "A checkpoint could not be saved."
            why, hint = words["why"], words["hint"] or "free some space on the disk of the checkpoints"
            yield Alert(
                rule="checkpoint_failed", severity="error", step=event.step, message=message, why=why, hint=hint
            )
        elif event.kind == "checkpoint_saved":
            message = "Checkpoints are saved again."
            yield Alert(rule="checkpoint_failed", message=message, step=event.step, is_resolved=True)
        elif event.kind == "replica_diverged":
            yield Alert(
                rule="replica_diverged",
                severity="error",
                rank=event.rank,
                step=event.step,
                message=f"Rank {event.rank} had other parameters than the others.",
                why="its memory or its arithmetic cannot be trusted",
                hint="check the machine of this rank; `shoal explain RUN` has what was done about it",
            )


def run_failed(sight: Sight, memory: Memory, limits: Limits) -> Iterable[Alert]:
    """The run is over, and did not end well. Who stopped it by hand knows."""
    for event in sight.events:
        if event.kind == "run_ended" and event.data.get("status") == "failed":
            cause = event.data.get("cause")
            cause = cause if isinstance(cause, dict) else {}
            said = [one_line(cause[name]) for name in ("type", "message") if cause.get(name)]
            yield Alert(
                rule="run_failed",
                severity="error",
                rank=cause.get("rank") if isinstance(cause.get("rank"), int) else None,
                step=cause.get("step") if isinstance(cause.get("step"), int) else None,
                message="The run has failed.",
                why=": ".join(said)[:500],
                hint=one_line(cause.get("hint") or "")
                or "`shoal explain RUN` has the cause, and logs are in the run folder",
                is_told=True,
            )


Rule = Callable[[Sight, Memory, Limits], Iterable[Alert]]
RULES: tuple[Rule, ...] = (no_progress, loss_spike, nan, straggler, disk_low, worker_lost, trouble, run_failed)
NAMES = (
    *("no_progress", "loss_spike", "nan", "straggler", "disk_low", "worker_lost", "worker_hung", "too_few_workers"),
    *("checkpoint_failed", "replica_diverged", "run_failed"),
)
"""All that an alert can be called, and `off` can name."""


def replay(
    metrics: Mapping[int, Sequence[StepMetrics]],
    events: Sequence[Event],
    limits: Limits,
    *,
    samples: Sequence[SystemSample] = (),
    until: float | None = None,
    look_seconds: float = 1.0,
) -> Iterator[Alert]:
    """The alerts of a recorded run, as they would have been sent. `until`: how long it has been silent since.

    `samples` say what disks had free.
    """
    memory = Memory()
    last = None
    for sight in _sights(metrics, events, samples, look_seconds):
        if last is not None and sight.now - last > 2 * look_seconds:
            yield from judge(Sight(now=sight.now - look_seconds), memory, limits)
        yield from judge(sight, memory, limits)
        last = sight.now
    if until is not None:
        yield from judge(Sight(now=until), memory, limits)


def _sights(
    metrics: Mapping[int, Sequence[StepMetrics]],
    events: Sequence[Event],
    samples: Sequence[SystemSample],
    look_seconds: float,
) -> Iterator[Sight]:
    rows: list[list[tuple[float, int, StepMetrics | Event | SystemSample]]]
    rows = [[(row.time, rank, row) for row in steps] for rank, steps in metrics.items()]
    rows.append([(event.time, -1, event) for event in events])
    rows.append([(sample.time, -1, sample) for sample in samples if sample.disk_total])
    steps: dict[int, list[StepMetrics]] = {}
    seen: list[Event] = []
    disk: tuple[int | None, int | None] = (None, None)
    due = now = -math.inf
    timeline: Iterator[tuple[float, int, StepMetrics | Event | SystemSample]]
    timeline = merge(*rows, key=itemgetter(0))
    for moment, rank, item in timeline:
        if moment > due and now > -math.inf:
            yield Sight(now=now, steps=steps, events=seen, disk_free=disk[0], disk_total=disk[1])
            steps, seen, disk = {}, [], (None, None)
        if moment > due:
            due = moment + look_seconds
        now = moment
        if isinstance(item, StepMetrics):
            steps.setdefault(rank, []).append(item)
        elif isinstance(item, SystemSample):
            disk = item.disk_free, item.disk_total
        else:
            seen.append(item)
    if now > -math.inf:
        yield Sight(now=now, steps=steps, events=seen, disk_free=disk[0], disk_total=disk[1])
