"""A trace of any known form, told by its columns: our own, Pollux's workloads, Philly, Tiresias."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from shoal.place.cluster import Ask, Queued
from shoal.place.simulate import Work
from shoal.place.traces.plain import REQUIRED, PlainWork, read_plain
from shoal.place.traces.pollux import Past, read_pollux
from shoal.place.traces.table import Row, read_rows
from shoal.spec.errors import UserError

KNOWLEDGE = ("none", "learned", "known")
"""What policies know of how long jobs are: nothing, what earlier jobs of the run took, or all."""


def read_trace(path: Path, *, profiles: Path | None = None, knowledge: str = "known") -> Sequence[Work]:
    """The jobs of a trace file. `profiles` are those of Pollux's applications; by default beside its workloads."""
    columns = set(read_rows(path, ())[0].values)
    is_known = knowledge == "known"
    if {"application", "num_replicas"} <= columns:
        folder = profiles or path.resolve().parent.parent / "profiles"
        past = Past(tells_lengths=knowledge == "learned")
        return read_pollux(path, folder, knows_length=is_known, past=past)
    if {"timestamp", "duration", "num_gpus"} <= columns:
        return _read_philly(path, is_known)
    if {"job_id", "num_gpu", "submit_time", "duration"} <= columns:
        return _read_tiresias(path, is_known)
    if not set(REQUIRED) <= columns:
        known = "our own (submitted_at, seconds), Pollux's, Philly's and Tiresias' are known"
        raise UserError(
            f"{path} is no trace of a known form.", why=f"its columns are: {', '.join(sorted(columns))}", hint=known
        )
    return read_plain(path, is_length_known=is_known)


def _rigid(name: str, at: float, gpus: int, seconds: float, is_known: bool) -> PlainWork:
    queued = Queued(id=name, ask=Ask(cores=0.0, gpus=1.0), min_workers=gpus, max_workers=gpus, submitted_at=at)
    return PlainWork(queued, seconds, gpus, is_known)


def _read_philly(path: Path, is_known: bool) -> list[PlainWork]:
    """Microsoft's Philly trace as Pollux's authors reduced it; the first job comes at 0. Only jobs with GPUs."""
    rows = read_rows(path, ("timestamp", "duration", "num_gpus"))
    times = [_seconds(row) for row in rows]
    first = min(times)
    return [
        _rigid(f"philly-{row.line}", at - first, row.whole("num_gpus", least=1), row.number("duration"), is_known)
        for row, at in zip(rows, times, strict=True)
        if row.whole("num_gpus") and row.number("duration") > 0
    ]


def _seconds(row: Row) -> float:
    text = row.text("timestamp")
    try:
        return (datetime.fromisoformat(text) - datetime(1970, 1, 1)).total_seconds()
    except (ValueError, TypeError):
        raise row.error("timestamp", f"{text!r} is not a time such as 2017-10-09 07:01:55") from None


def _read_tiresias(path: Path, is_known: bool) -> list[PlainWork]:
    rows = read_rows(path, ("job_id", "num_gpu", "submit_time", "duration"))
    return [
        _rigid(
            row.text("job_id"),
            row.number("submit_time"),
            row.whole("num_gpu", least=1),
            row.number("duration", above=0.0),
            is_known,
        )
        for row in rows
    ]
