"""A trace of any known form, told by its columns: our own, and those of published schedulers."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from shoal.place.cluster import Ask, Queued
from shoal.place.simulate import Work
from shoal.place.traces.gavel import read_gavel, read_throughputs
from shoal.place.traces.openb import POD_COLUMNS, read_pod_jobs
from shoal.place.traces.plain import REQUIRED, PlainWork, read_plain
from shoal.place.traces.pollux import Past, read_pollux
from shoal.place.traces.shockwave import read_shockwave
from shoal.place.traces.table import Row, read_rows
from shoal.spec.errors import UserError

KNOWLEDGE = ("none", "learned", "known")
"""What policies know of how long jobs are: nothing, what earlier jobs of the run took, or all."""


TABBED = {7: "gavel", 10: "gavel", 12: "shockwave"}
"""Files without a header, whose columns are separated by tabs: whose they are, by how many there are."""


def read_trace(
    path: Path,
    *,
    profiles: Path | None = None,
    throughputs: Path | None = None,
    knowledge: str = "known",
    skips_unmeasured: bool = False,
    shares_gpus: bool = False,
) -> Sequence[Work]:
    """The jobs of a trace file.

    `profiles` are those of Pollux's applications, `throughputs` the table of Gavel's or Shockwave's: by default
    beside the trace. `skips_unmeasured` leaves out jobs for which that table has no throughput.
    `shares_gpus`: two jobs of Gavel's may share their GPUs, where the table has their speeds then.
    """
    is_known = knowledge == "known"
    form = _tabbed_form(path)
    if shares_gpus and form != "gavel":
        raise UserError(
            f"{path} does not say how fast two jobs are on the same GPUs.",
            why="only Gavel's traces come with a table that has it",
            hint="leave out --share-gpus",
        )
    if form:
        table = read_throughputs(throughputs or _table_beside(path))
        if form == "gavel":
            return read_gavel(
                path, table, is_length_known=is_known, skips_unmeasured=skips_unmeasured, shares_gpus=shares_gpus
            )
        return read_shockwave(path, table, is_length_known=is_known)
    columns = set(read_rows(path, ())[0].values)
    if {"application", "num_replicas"} <= columns:
        folder = profiles or path.resolve().parent.parent / "profiles"
        past = Past(tells_lengths=knowledge == "learned")
        return read_pollux(path, folder, knows_length=is_known, past=past)
    if {"timestamp", "duration", "num_gpus"} <= columns:
        return _read_philly(path, is_known)
    if {"job_id", "num_gpu", "submit_time", "duration"} <= columns:
        return _read_tiresias(path, is_known)
    if set(POD_COLUMNS) <= columns:
        return read_pod_jobs(path, is_length_known=is_known)
    if not set(REQUIRED) <= columns:
        known = "our own has submitted_at and seconds; docs/scheduling.md lists the published ones that are known"
        raise UserError(
            f"{path} is no trace of a known form.", why=f"its columns are: {', '.join(sorted(columns))}", hint=known
        )
    return read_plain(path, is_length_known=is_known)


def _tabbed_form(path: Path) -> str | None:
    """Whose file without a header it is; None if it is none."""
    try:
        with path.open(encoding="utf-8") as file:
            return TABBED.get(file.readline().count("\t") + 1)
    except (OSError, UnicodeDecodeError):
        return None  # said by who reads it as a file with a header


def _table_beside(path: Path) -> Path:
    """The table of throughputs of a trace: in its folder, or one above, where one named after another folder is not
    meant."""
    folder = path.resolve().parent
    for place in (folder, folder.parent):
        found = sorted(place.glob("*throughputs.json"))
        own = [each for each in found if each.name.startswith(folder.name)]
        found = own or [each for each in found if not (place / each.name.removesuffix("_throughputs.json")).is_dir()]
        if len(found) == 1:
            return found[0]
    raise UserError(
        f"{path} does not say how fast its jobs are.",
        why="it lists steps, and there is no one table of throughputs (*throughputs.json) beside it or above",
        hint="name the table with --throughputs FILE",
    )


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
