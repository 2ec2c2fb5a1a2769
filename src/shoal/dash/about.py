"""What a run is, as JSON values: facts, settings and where they come from, how to do it again."""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shoal.checkpoint.listing import Entry, list_checkpoints, verify
from shoal.observe.clean import clean, one_line
from shoal.observe.explain import find_cause, find_settings
from shoal.observe.runs import RunInfo, list_logs
from shoal.spec.event import Event
from shoal.spec.system import SystemSample

MAX_CHECKPOINTS = 200
_SYSTEM = ("cpu", "memory_used", "net_in", "net_out", "disk_read", "disk_write", "swap_in", "swap_out")


def tell_run(run: RunInfo, events: Sequence[Event]) -> dict[str, Any]:
    """What the page of a run shows besides what the list has."""
    recent = [event for event in events if event.time >= run.created]
    cause = find_cause(recent) if run.status not in ("finished", "stopped", "running") else None
    versions = run.facts.get("versions")
    return {
        "path": clean(run.path),
        "pid": run.pid,
        "reproduce": reproduce(run),
        "resume": f"shoal run --resume {shlex.quote(clean(run.name))}",
        "versions": {one_line(k): one_line(v) for k, v in versions.items()} if isinstance(versions, dict) else {},
        "job": _plain_job(run.facts.get("job")),
        "settings": [asdict(setting) for setting in find_settings(recent)],
        "cause": asdict(cause) if cause else None,
        "ranks": [{"rank": rank, "bytes": size} for rank, size in list_logs(run.path).items()],
        "num_events": len(events),
    }


def reproduce(run: RunInfo) -> str:
    """The command that starts the same job again, from the same folder; empty where it is not known.

    Values of `--env` are not kept in run folders: `***` stands for them.
    """
    command = run.facts.get("command")
    if not isinstance(command, list) or not command:
        return clean(run.command)
    words = [str(word) for word in command]
    job = run.facts.get("job")
    folder = job.get("working_dir") if isinstance(job, dict) else None
    text = shlex.join(words)
    return clean(f"cd {shlex.quote(str(folder))} && {text}" if folder else text)


def _plain_job(job: object) -> list[dict[str, str]]:
    if not isinstance(job, dict):
        return []
    rows = []
    for name, value in job.items():
        if value not in (None, "", [], {}, ()):
            shown = shlex.join(map(str, value)) if isinstance(value, list) else value
            if isinstance(value, Mapping):
                shown = ", ".join(f"{key}={item}" for key, item in value.items())
            rows.append({"name": one_line(name), "value": one_line(shown)})
    return rows


def checkpoint_folders(run_dir: str) -> list[str]:
    """`checkpoints`, and those of further trainers."""
    try:
        with os.scandir(run_dir) as entries:
            return sorted(e.name for e in entries if re.fullmatch(r"checkpoints[\w-]*", e.name) and e.is_dir())
    except OSError:
        return []


def tell_checkpoints(run_dir: str) -> list[dict[str, Any]]:
    """Every checkpoint of a run with whether it is whole, as far as its manifest and the sizes of its files tell."""
    rows = []
    for folder in checkpoint_folders(run_dir):
        for entry in list_checkpoints(Path(run_dir, folder))[:MAX_CHECKPOINTS]:
            rows.append(_plain_entry(folder, entry))
    return rows


def check_checkpoint(run_dir: str, folder: str, name: str) -> dict[str, Any] | None:
    """The same after reading every byte of one; None where there is none of that name."""
    if folder not in checkpoint_folders(run_dir):
        return None
    for entry in list_checkpoints(Path(run_dir, folder)):
        if entry.path.name == name:
            return {**_plain_entry(folder, verify(entry)), "is_read": True}
    return None


def _plain_entry(folder: str, entry: Entry) -> dict[str, Any]:
    return {
        "folder": folder,
        "name": clean(entry.path.name),
        "step": entry.step,
        "saved_at": entry.saved_at or None,
        "num_bytes": entry.num_bytes,
        "generation": entry.generation,
        "is_stale": entry.is_stale,
        "problem": one_line(entry.problem),
    }


def tell_system(samples: Mapping[str, Sequence[SystemSample]], seconds: float, points: int) -> list[dict[str, Any]]:
    """Every node over the last `seconds`: curves of at most so many points, and what it has now."""
    nodes = []
    for node, all_of_it in samples.items():
        if not all_of_it:
            continue
        last = all_of_it[-1]
        recent = [sample for sample in all_of_it if sample.time >= last.time - seconds]
        size = max(1, -(-len(recent) // points))
        groups = [recent[at : at + size] for at in range(0, len(recent), size)]
        curves = {name: [_mean(group, name) for group in groups] for name in _SYSTEM}
        now = {name: getattr(last, name) for name in (*_SYSTEM, "cores", "memory_total", "disk_free", "disk_total")}
        workers = {rank: _plain_worker(facts) for rank, facts in last.workers.items()}
        nodes.append(
            {
                "node": one_line(node),
                "time": last.time,
                "now": now,
                "times": [group[-1].time for group in groups],
                "curves": curves,
                "workers": workers,
            }
        )
    return nodes


def _plain_worker(facts: Any) -> dict[str, Any]:
    if not isinstance(facts, Mapping):
        names = ("pid", "cpu", "rss", "major_faults", "throttled", "run_delay")
        facts = {name: getattr(facts, name, None) for name in names}
    return {str(name): value for name, value in facts.items() if isinstance(value, int | float)}


def _mean(group: Sequence[SystemSample], name: str) -> float:
    return float(sum(getattr(sample, name) for sample in group)) / len(group)
