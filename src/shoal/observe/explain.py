"""`shoal explain`: what became of a run, where its time went, and what to change."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TextIO

from shoal.observe import journal
from shoal.observe.breakdown import Breakdown, break_down_turns, changes_in
from shoal.observe.clean import clean, one_line
from shoal.observe.diagnose import diagnose
from shoal.observe.equipment import KINDS, Equipment, find_equipment
from shoal.observe.finding import Finding
from shoal.observe.history import History, tell_history
from shoal.observe.metrics import MetricsReader
from shoal.observe.noise import NoiseScale, find_noise
from shoal.observe.predictions import Accuracy, judge, read_predictions
from shoal.observe.runs import RunInfo, find_run, list_logs, read_run
from shoal.observe.spending import Spending, spend
from shoal.observe.turns import merge_turns
from shoal.spec.errors import UserError
from shoal.spec.event import Event
from shoal.spec.prediction import Prediction

# Kinds that other parts of an explanation tell.
_TOLD_ELSEWHERE = frozenset(
    {"progress", "settings", "goal", "error", "run_started", "worker_started", "worker_exited", "run_ended"}
    | {"world", "worker_lost", "worker_joined", "items_done", "state_rebuilt", "thinned", "diagnosis", *KINDS}
)
MAX_NOTES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One value in effect, and where it came from: default, argument, command line, measured, ..."""

    name: str
    value: str
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Something worth knowing: the first event of its kind, and how many there were."""

    kind: str
    count: int
    time: float
    text: str = ""
    rank: int | None = None
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why a run failed: the first error anybody reported."""

    message: str
    why: str = ""
    hint: str = ""
    where: str = ""
    rank: int | None = None
    step: int | None = None
    others: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What was said to be wrong while the run ran: see `Diagnosis`. `cost` is in percent of the time."""

    cause: str
    time: float
    message: str
    why: str = ""
    hint: str = ""
    cost: float | None = None
    rank: int | None = None
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """All that can be said about a run. `seconds` is None where its end is not known.

    `history` is None where the run is not elastic. `exits` holds the exit code of each rank that reported one,
    `log_bytes` the size of each rank's log, and `num_damaged` counts lines of journal and metrics that could not be
    read. `items` is how far a map came: done, total (None: not known), per_second, retries. `equipment` is empty
    where all workers computed with the same. `spending` is where the time went from the first step to the last, with
    checkpoints and recovering, and over time; None where there was no step. `noise_scale` is the gradient noise scale
    in samples, from `noise`; None where that was not looked at, or the gradient drowns in it.
    `predictions` are what was expected of its configurations before it had them, and `accuracy` how good they were.
    """

    run: RunInfo
    seconds: float | None
    breakdown: Breakdown | None
    history: History | None
    findings: tuple[Finding, ...] = ()
    settings: tuple[Setting, ...] = ()
    notes: tuple[Note, ...] = ()
    cause: Cause | None = None
    exits: Mapping[int, int]
    log_bytes: Mapping[int, int]
    num_damaged: int = 0
    items: Mapping[str, Any] | None = None
    equipment: tuple[Equipment, ...] = ()
    spending: Spending | None = None
    diagnoses: tuple[Told, ...] = ()
    noise: NoiseScale | None = None
    noise_scale: float | None = None
    predictions: tuple[Prediction, ...] = ()
    accuracy: Accuracy | None = None

    def text(self, width: int = 80, *, is_ascii: bool = False) -> str:
        """The explanation as people read it, no line longer than `width` columns."""
        from shoal.observe.report import write_report

        return write_report(self, width, is_ascii=is_ascii)

    def html(self) -> str:
        """The explanation as one HTML file that loads nothing."""
        from shoal.observe.page import write_page

        return write_page(self)

    def json(self) -> bytes:
        """The explanation as one JSON object; numbers that JSON does not have become text."""
        import msgspec

        return msgspec.json.encode(journal.to_plain(msgspec.to_builtins(self, str_keys=True)))


def explain(run_dir: str) -> Explanation:
    """Read a run folder, finished or not, and explain it. Raises UserError where it is not a run folder."""
    run = read_run(run_dir)
    if run is None:
        raise UserError(f"{clean(run_dir)} is not a run folder.", hint="`shoal ps` lists the runs there are")
    damaged: list[bytes] = []
    events = list(journal.read(os.path.join(run_dir, "journal.jsonl"), damaged.append))
    reader = MetricsReader(run_dir)
    steps = reader.read_new()
    # A folder that a run went on in holds the story of every attempt; `created` is the start of the newest.
    events = [event for event in events if event.time >= run.created]
    turns = merge_turns(
        {rank: [step for step in rows if step.time >= run.created] for rank, rows in steps.items()}, events
    )
    breakdown = break_down_turns(turns, changes_in(events))
    spending, diagnoses = spend(turns, events), find_diagnoses(events)
    predictions = tuple(read_predictions(run_dir))
    noise = find_noise(turn.lead for turn in turns if not turn.is_undone)
    return Explanation(
        run=run,
        seconds=_seconds(run, events),
        breakdown=breakdown,
        history=tell_history(events, turns),
        findings=tuple(name_causes(diagnose(breakdown, events, spending), diagnoses)),
        settings=find_settings(events),
        notes=find_notes(events),
        cause=find_cause(events) if run.status not in ("finished", "stopped") else None,
        exits=find_exits(events),
        log_bytes=list_logs(run_dir),
        num_damaged=len(damaged) + reader.num_damaged,
        items=find_items(events),
        equipment=find_equipment(events),
        spending=spending,
        diagnoses=diagnoses,
        noise=noise,
        noise_scale=noise.samples if noise is not None else None,
        predictions=predictions,
        accuracy=judge(predictions),
    )


def _seconds(run: RunInfo, events: Sequence[Event]) -> float | None:
    if run.ended is not None:
        return run.ended - run.created
    if run.status == "running":
        import time

        return time.time() - run.created
    # Lost: all that is known is how long it was heard of.
    return max(event.time for event in events) - run.created if events else None


def find_diagnoses(events: Iterable[Event]) -> tuple[Told, ...]:
    """What the launcher has diagnosed, in order."""
    told = []
    for event in events:
        if event.kind == "diagnosis":
            words = {name: one_line(event.data.get(name) or "") for name in ("cause", "message", "why", "hint")}
            cost = event.data.get("cost")
            number = float(cost) if isinstance(cost, int | float) else None
            told.append(Told(**words, cost=number, time=event.time, rank=event.rank, step=event.step))
    return tuple(told)


def name_causes(findings: Iterable[Finding], diagnoses: Iterable[Told]) -> Iterable[Finding]:
    """Findings of slow ranks, with the cause that was seen while they were: the kernel knows it only then."""
    seen = {
        told.rank: told for told in diagnoses if told.cause in ("throttled", "swapping", "no_core", "uneven_data")
    }
    for finding in findings:
        told = seen.get(finding.rank) if finding.kind == "slow_compute" else None
        if told is None:
            yield finding
        else:
            yield replace(finding, kind=told.cause, what=told.message, why=told.why, change=told.hint)


def find_items(events: Iterable[Event]) -> Mapping[str, Any] | None:
    """How many items of a map were done, and how fast; None for other runs."""
    told = [event.data for event in events if event.kind == "items_done"]
    return told[-1] if told else None


def find_settings(events: Iterable[Event]) -> tuple[Setting, ...]:
    """Values of the newest `settings` events: `{name: {"value": ..., "source": ...}}`, or `{name: value}`."""
    found: dict[str, Setting] = {}
    for event in events:
        if event.kind == "settings":
            for name, entry in event.data.items():
                value, source = (
                    (entry.get("value"), entry.get("source", "")) if isinstance(entry, dict) else (entry, "")
                )
                found[name] = Setting(name=one_line(name), value=one_line(value), source=one_line(source))
    return tuple(found[name] for name in sorted(found))


def find_notes(events: Iterable[Event]) -> tuple[Note, ...]:
    """Events worth knowing, equal kinds counted, in order of their first appearance."""
    groups: dict[str, list[Event]] = {}
    for event in events:
        if event.kind not in _TOLD_ELSEWHERE:
            groups.setdefault(event.kind, []).append(event)
    notes = [
        Note(
            kind=one_line(kind),
            count=len(group),
            time=group[-1].time,
            rank=group[-1].rank,
            step=group[-1].step,
            text=describe(group[-1].data),
        )
        for kind, group in groups.items()
    ]
    return tuple(notes[:MAX_NOTES])


def describe(data: Mapping[str, Any]) -> str:
    """The data of an event in one line: its message where it has one, else its values."""
    if "message" in data:
        return one_line(data["message"])
    return one_line(", ".join(f"{name} {_short(value)}" for name, value in data.items() if value is not None))[:200]


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"[{', '.join(map(_short, value))}]" if isinstance(value, list) else str(value)


def find_cause(events: Sequence[Event]) -> Cause | None:
    """Why it failed: what the launcher concluded, or else the first error anybody reported."""
    errors = sorted((event for event in events if event.kind == "error"), key=lambda event: event.time)
    ended = [event.data.get("cause") for event in events if event.kind == "run_ended"]
    if ended and isinstance(ended[-1], dict):
        return _cause(ended[-1], ended[-1].get("rank"), ended[-1].get("step"), len(errors) - 1)
    # One that a worker could be replaced for ended that worker, not the run.
    errors = [event for event in errors if event.data.get("is_retryable") is not True]
    if errors:
        first = errors[0]
        step = first.data.get("step") if first.step is None else first.step
        return _cause(first.data, first.rank, step, len(errors) - 1)
    return None


def _cause(data: Mapping[str, Any], rank: Any, step: Any, others: int) -> Cause:
    words = {name: one_line(value) for name, value in data.items() if value}
    kind, message = words.get("type", ""), words.get("message", "")
    is_ours = kind in ("", "UserError", "WorkerError", "ShoalError")
    return Cause(
        message=message if is_ours and message else f"{kind}: {message}" if message else kind or "unknown error",
        why=words.get("why", ""),
        hint=words.get("hint", ""),
        where=words.get("where", ""),
        rank=_whole(rank),
        step=_whole(step),
        others=max(0, others),
    )


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) else None


def find_exits(events: Iterable[Event]) -> dict[int, int]:
    """The exit code of each rank, from `worker_exited` events."""
    exits = {}
    for event in events:
        code = _whole(event.data.get("code"))
        if event.kind == "worker_exited" and event.rank is not None and code is not None:
            exits[event.rank] = code
    return dict(sorted(exits.items()))


def print_explanation(
    home: str, text: str, stream: TextIO, *, as_json: bool, width: int, html_path: str | None = None
) -> int:
    """What `shoal explain RUN` does; returns the exit code. With `html_path` it also writes that file."""
    explanation = explain(find_run(home, text).path)
    if html_path is not None:
        _write_page(explanation, html_path)
        if not as_json:
            stream.write(f"wrote {clean(html_path)}\n")
            return 0
    if as_json:
        stream.write(explanation.json().decode() + "\n")
    else:
        encoding = (getattr(stream, "encoding", None) or "ascii").lower()
        stream.write(explanation.text(width, is_ascii=not encoding.startswith("utf")))
    return 0


def _write_page(explanation: Explanation, path: str) -> None:
    try:
        with open(path, "w", encoding="utf-8", errors="replace") as file:
            file.write(explanation.html())
    except OSError as error:
        raise UserError(
            f"Cannot write {clean(path)}.",
            why=error.strerror or str(error),
            hint="name a file in a folder that exists",
        ) from None
