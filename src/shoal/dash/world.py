"""Who took part in a run and when, and what happened to them. Pure: events in, JSON values out."""

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.observe.clean import one_line
from shoal.observe.explain import describe
from shoal.observe.runs import RunInfo
from shoal.observe.timeline import find_eras
from shoal.spec.event import Event

BAD = frozenset(
    {"worker_lost", "worker_hung", "worker_frozen", "error", "replica_diverged", "checkpoint_failed", "alert"}
    | {"step_skipped", "waiting_for_workers", "item_failed", "fence_failed"}
)
GOOD = frozenset({"worker_joined", "worker_went_on", "state_rebuilt", "resumed"})
NOTE = frozenset({"fault", "worker_signaled", "resized", "going_on_with_few", "checkpoint_skipped"})
MAX_MARKS = 500


def tell_world(run: RunInfo, events: Sequence[Event], now: float) -> dict[str, Any]:
    """Worlds over time and the marks on them. A run of fixed size has one World."""
    end = run.ended if run.ended is not None else now if run.status == "running" else _last_time(run, events)
    eras = [
        {
            "generation": era.generation,
            "time": era.time,
            "until": era.time + era.seconds if era.seconds is not None else max(end, era.time),
            "workers": len(era.members),
            "members": [one_line(member) for member in era.members],
            "joined": [one_line(member) for member in era.joined],
            "reason": one_line(era.reason),
        }
        for era in find_eras(events, ())
    ]
    if not eras and run.num_workers:
        members = [str(rank) for rank in range(run.num_workers)]
        only = {"generation": 0, "time": run.created, "until": end, "workers": run.num_workers}
        eras = [{**only, "members": members, "joined": members, "reason": "a run of fixed size"}]
    # Who was lost has also exited; of an elastic run the loss says it.
    told = [event for event in events if event.kind != "worker_exited" or run.max_workers is None]
    marks = [mark(event) for event in told if severity(event)]
    return {
        "start": run.created,
        "end": end,
        "is_elastic": run.max_workers is not None,
        "most": run.max_workers or run.num_workers,
        "eras": eras,
        "marks": marks[-MAX_MARKS:],
        "num_marks": len(marks),
    }


def severity(event: Event) -> str:
    """`bad`, `good` or `note` for what is marked; empty for the rest."""
    if event.kind == "alert" and event.data.get("is_resolved") is True:
        return "good"
    if event.kind == "alert":
        return "note" if event.data.get("severity") in ("info", "note") else "bad"
    if event.kind == "worker_exited":
        return "bad" if event.data.get("code") not in (0, None) else ""
    if event.kind in BAD:
        return "bad"
    return "good" if event.kind in GOOD else "note" if event.kind in NOTE else ""


def mark(event: Event) -> dict[str, Any]:
    return {**plain_event(event), "severity": severity(event)}


def plain_event(event: Event) -> dict[str, Any]:
    """An event as it is listed."""
    return {
        "kind": one_line(event.kind),
        "time": event.time,
        "rank": event.rank,
        "step": event.step,
        "generation": event.generation,
        "text": describe(event.data),
        "why": _words(event.data, "why"),
        "hint": _words(event.data, "hint"),
        "severity": severity(event),
    }


def _words(data: Mapping[str, Any], name: str) -> str:
    return one_line(data[name]) if data.get(name) else ""


def _last_time(run: RunInfo, events: Sequence[Event]) -> float:
    return max((event.time for event in events), default=run.created)
