"""`shoal ps`: the runs there are, one a line."""

import contextlib
import json
import math
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from shoal.observe.clean import clean, columns, fit
from shoal.observe.runs import RunInfo, list_runs
from shoal.observe.segments import list_names, newest_lines
from shoal.observe.status import duration, number

MAX_SHOWN = 20
_TITLES = ("RUN", "STATUS", "WORKERS", "TIME", "STEP", "LOSS", "COMMAND")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run as it is listed. `step` is how many steps are done, `loss` the newest; None where unknown.

    `members` are those of the newest World of an elastic run, as WORKER.INCARNATION. `items` is how many items of a
    map are done, and of how many (None: not known).
    """

    run: RunInfo
    seconds: float | None
    step: int | None
    loss: float | None
    members: tuple[str, ...] | None = None
    items: tuple[int, int | None] | None = None


def list_rows(home: str, now: float) -> list[Row]:
    """A row for each run under `home`, newest first."""
    return [row_of(run, now) for run in list_runs(home)]


def row_of(run: RunInfo, now: float) -> Row:
    """A run with what the ends of its files tell."""
    ended = now if run.status == "running" else run.ended
    is_elastic = run.max_workers is not None
    workers = _workers_with_metrics(run.path) if is_elastic else (0,)
    step, loss = newest_step(run.path, workers) if run.status != "imported" else _imported_step(run)
    return Row(
        run=run,
        seconds=None if ended is None else max(0.0, ended - run.created),
        step=step,
        loss=loss,
        members=newest_members(run.path) if is_elastic else None,
        items=newest_items(run.path) if run.command.startswith("shoal.map ") else None,
    )


def _imported_step(run: RunInfo) -> tuple[int | None, float | None]:
    """What was found when it was imported."""
    step, loss = run.facts.get("num_steps"), run.facts.get("loss")
    return step if isinstance(step, int) else None, float(loss) if isinstance(loss, int | float | str) else None


def newest_step(run_dir: str, workers: Iterable[int] = (0,)) -> tuple[int | None, float | None]:
    """Steps done and loss, from the newest whole line of any of the workers; cost does not grow with the files."""
    # Not through `metrics`, which imports msgspec: this must stay as cheap as the rest of `shoal ps`.
    newest = max((_last_step(run_dir, worker) for worker in workers), key=lambda each: each[0], default=_NO_STEP)
    return newest[1], newest[2]


def _workers_with_metrics(run_dir: str) -> list[int]:
    """Those that have files: there may be far fewer than the run may have."""
    return [int(number) for number in list_names(run_dir, r"metrics-(\d{1,9})\.jsonl")]


_NO_STEP: tuple[float, int | None, float | None] = (-math.inf, None, None)


def _last_step(run_dir: str, worker: int) -> tuple[float, int | None, float | None]:
    lines = newest_lines(os.path.join(run_dir, f"metrics-{worker}.jsonl"), 2, block_bytes=2048)
    for line in reversed(lines.split(b"\n")):
        try:
            data = json.loads(line)
            return float(data.get("time", 0.0)), int(data["step"]) + 1, float(data["loss"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
    return _NO_STEP


def newest_members(run_dir: str) -> tuple[str, ...] | None:
    """Who is in the newest World that the end of the journal tells of; None where it tells of none."""
    data = _newest(run_dir, "world")
    members = data.get("members") if data is not None else None
    return tuple(map(str, members)) if isinstance(members, list) else None


def newest_items(run_dir: str) -> tuple[int, int | None] | None:
    """Items of a map that are done, and of how many; None where the journal does not tell."""
    data = _newest(run_dir, "items_done") or {}
    done, total = data.get("done"), data.get("total")
    return (done, total if isinstance(total, int) else None) if isinstance(done, int) else None


def newest_failure(run_dir: str, since: float) -> dict[str, Any]:
    """The first cause of a run that has failed since then, as its journal tells it; empty where it tells of none."""
    for line in reversed(newest_lines(os.path.join(run_dir, "journal.jsonl"), 20).split(b"\n")):
        if b'"run_ended"' in line:
            with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                event = json.loads(line)
                if event["kind"] == "run_ended" and event["time"] >= since:
                    return dict(event["data"]["cause"] or {})
    return {}


def _newest(run_dir: str, kind: str, num_lines: int = 200) -> dict[str, Any] | None:
    """The data of the newest event of that kind near the end of the journal."""
    lines = newest_lines(os.path.join(run_dir, "journal.jsonl"), num_lines)
    for line in reversed(lines.split(b"\n")):
        if f'"{kind}"'.encode() in line:
            with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                event = json.loads(line)
                if event["kind"] == kind:
                    return dict(event["data"])
    return None


def table(rows: Sequence[Row], width: int) -> str:
    """Runs as aligned text, no line longer than `width` columns; the command takes what is left."""
    cells = [_TITLES, *(_cells(row) for row in rows)]
    used = [index for index, title in enumerate(_TITLES) if any(row[index] for row in cells[1:]) or title == "RUN"]
    widths = {index: max(columns(row[index]) for row in cells) for index in used}
    lines = ["  ".join(row[index] + " " * (widths[index] - columns(row[index])) for index in used) for row in cells]
    return "\n".join(fit(line.rstrip(), width) for line in lines) + "\n"


def _cells(row: Row) -> tuple[str, ...]:
    run = row.run
    return (
        clean(run.name),
        clean(run.status) + (f" ({run.exit_code})" if run.exit_code else ""),
        _workers(run),
        "" if row.seconds is None else duration(row.seconds),
        _steps(row),
        "" if row.loss is None else number(row.loss),
        clean(run.command),
    )


def _steps(row: Row) -> str:
    if row.items is not None:
        return f"{row.items[0]}/{row.items[1]}" if row.items[1] is not None else str(row.items[0])
    return "" if row.step is None else str(row.step)


def _workers(run: RunInfo) -> str:
    """`4`, or `3 of 2:8` where there may be 2 to 8."""
    if run.num_workers is None:
        return ""
    is_elastic = run.min_workers is not None and run.max_workers is not None
    return f"{run.num_workers}" + (f" of {run.min_workers}:{run.max_workers}" if is_elastic else "")


def to_json(rows: Sequence[Row]) -> str:
    """The rows as a JSON array; a loss that is not finite becomes text."""
    return json.dumps([plain_row(row) for row in rows], default=str)


def plain_row(row: Row) -> dict[str, Any]:
    """A row as `--json` shows it."""
    loss = row.loss if row.loss is None or row.loss - row.loss == 0 else str(row.loss)
    facts = asdict(row.run)
    del facts["facts"]
    return {
        **facts,
        "seconds": row.seconds,
        "step": row.step,
        "loss": loss,
        "members": row.members,
        "items": row.items,
    }


def print_runs(home: str, stream: TextIO, *, as_json: bool, show_all: bool, width: int) -> int:
    """What `shoal ps` does: running and newest runs, or all of them; returns the exit code."""
    rows = list_rows(home, time.time())
    shown = rows if show_all else [row for i, row in enumerate(rows) if i < MAX_SHOWN or row.run.status == "running"]
    if as_json:
        stream.write(to_json(shown) + "\n")
    elif rows:
        more = len(rows) - len(shown)
        stream.write(table(shown, width) + (f"and {more} older runs: `shoal ps --all`\n" if more else ""))
    else:
        stream.write(f"no runs in {clean(os.path.join(home, 'runs'))}; start one with `shoal run SCRIPT`\n")
    return 0
