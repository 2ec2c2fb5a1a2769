"""`shoal trace`: all that a run folder knows, as a file for Perfetto and chrome://tracing."""

import contextlib
import gzip
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, TextIO

import msgspec

from shoal.observe import journal, metrics, spans
from shoal.observe.clean import clean
from shoal.observe.clocks import find_clocks
from shoal.observe.runs import RunInfo
from shoal.observe.system import SystemReader
from shoal.observe.trace import Material, TraceEvent, Window, finite, trace_run
from shoal.spec.errors import UserError
from shoal.spec.event import StepMetrics

MAX_ROWS = 100_000
"""Steps times ranks that a file has if nobody asks for certain ones: some megabytes, and seconds to write."""
TELL_SECONDS = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What was written. `num_left_out` counts older steps that would have made the file too large."""

    run: str
    path: str
    num_events: int
    num_bytes: int
    steps: tuple[int, int] | None
    ranks: tuple[int, ...]
    num_left_out: int
    clocks: Mapping[int, Mapping[str, Any]]


def write_trace(run: RunInfo, path: str | None, window: Window, told: TextIO | None = None) -> Written:
    """Write the trace of a run, or of some of its steps, in one go: the file is there whole or not at all.

    Compressed where its name ends in `.gz`; without a name it is `trace.json.gz` in the run folder. Raises UserError
    where there are no such steps or the disk refuses. How far it is goes to `told`.
    """
    material = read_material(run)
    metrics_of, num_left_out = _newest(material.metrics) if window.is_all else (material.metrics, 0)
    if num_left_out:
        window = Window(first=min(row.step for rows in metrics_of.values() for row in rows))
    steps = [row.step for rows in metrics_of.values() for row in rows if window.has(row.step)]
    if not window.is_all and not steps:
        raise _no_steps(material.metrics, window)
    path = os.path.abspath(path or os.path.join(run.path, "trace.json.gz"))
    clocks = find_clocks(material.events)
    facts = {"run": run.name, "command": run.command, "host": run.host, "started": run.created, "status": run.status}
    num_events = _write(path, trace_run(material, window), facts, told)
    return Written(
        run=run.name,
        path=path,
        num_events=num_events,
        num_bytes=os.path.getsize(path),
        steps=(min(steps), max(steps) + 1) if steps else None,
        ranks=tuple(sorted(material.metrics)),
        num_left_out=num_left_out,
        clocks={
            rank: {"node": known[-1].node, "offset_seconds": known[-1].seconds, "error_seconds": known[-1].error}
            for rank, known in clocks.offsets.items()
        },
    )


def read_material(run: RunInfo) -> Material:
    return Material(
        name=run.name,
        events=list(journal.read(os.path.join(run.path, "journal.jsonl"))),
        metrics=metrics.read(run.path),
        spans=spans.read(run.path),
        samples=SystemReader(run.path).read_new(),
    )


def _newest(rows_of: Mapping[int, Sequence[StepMetrics]]) -> tuple[Mapping[int, Sequence[StepMetrics]], int]:
    """The newest steps, as many as a file should have; and how many are left out."""
    most = max(1, MAX_ROWS // max(1, len(rows_of)))
    longest = max(map(len, rows_of.values()), default=0)
    if longest <= most:
        return rows_of, 0
    return {rank: rows[-most:] for rank, rows in rows_of.items()}, longest - most


def _no_steps(rows_of: Mapping[int, Sequence[StepMetrics]], window: Window) -> UserError:
    known = sorted({row.step for rows in rows_of.values() for row in rows})
    wanted = f"{'' if window.first is None else window.first}:{'' if window.last is None else window.last}"
    if not known:
        why = "it recorded no steps: its script does not use `shoal.Trainer`, or has not taken one"
        return UserError(f"There are no steps {wanted} in this run.", why=why, hint="leave out `--steps`")
    return UserError(
        f"There are no steps {wanted} in this run.",
        why=f"it has steps {known[0]} to {known[-1]}",
        hint=f"for example: `--steps {known[0]}:{min(known[0] + 100, known[-1] + 1)}`",
    )


def _write(path: str, events: Iterable[TraceEvent], facts: Mapping[str, Any], told: TextIO | None) -> int:
    passing = f"{path}.{os.getpid()}"
    try:
        with _opened(passing, is_packed=path.endswith(".gz")) as file:
            num_events = _write_events(file, _telling(events, told), facts)
        os.replace(passing, path)
    except OSError as error:
        raise UserError(
            f"Cannot write {clean(path)}.",
            why=error.strerror or str(error),
            hint="name another file with `-o`",
        ) from error
    finally:
        with contextlib.suppress(OSError):
            os.unlink(passing)
    return num_events


@contextlib.contextmanager
def _opened(path: str, *, is_packed: bool) -> Iterator[IO[bytes]]:
    with open(path, "xb") as file:
        if is_packed:
            with gzip.GzipFile("", "wb", compresslevel=5, fileobj=file, mtime=0) as packed:
                yield packed  # type: ignore[misc]
        else:
            yield file


def _write_events(file: IO[bytes], events: Iterable[TraceEvent], facts: Mapping[str, Any]) -> int:
    encoder, block, num_events = msgspec.json.Encoder(enc_hook=str), [], 0
    file.write(b'{"displayTimeUnit":"ms","otherData":' + encoder.encode(journal.to_plain(facts)))
    file.write(b',"traceEvents":[\n')
    for event in events:
        block.append(encoder.encode(event))
        num_events += 1
        if len(block) == 4096:
            file.write(b",\n".join(block) + b",\n")
            block.clear()
    # The list must not end with a comma, so there is one event more, which says nothing.
    block.append(encoder.encode({"ph": "M", "name": "process_labels", "pid": 1, "tid": 0, "args": {"labels": ""}}))
    file.write(b",\n".join(block) + b"\n]}\n")
    return num_events + 1


def _telling(events: Iterable[TraceEvent], told: TextIO | None) -> Iterator[TraceEvent]:
    """The same events, while somebody is told how many there are, if it takes long."""
    due, has_told = time.monotonic() + 1.0, False
    for num_events, event in enumerate(events, start=1):
        if told is not None and num_events % 1024 == 0 and time.monotonic() > due:
            due, has_told = time.monotonic() + TELL_SECONDS, True
            told.write(f"\r{num_events:,} events")
            told.flush()
        yield event
    if told is not None and has_told:
        told.write("\r\x1b[K")
        told.flush()


def tell_written(written: Written) -> str:
    """What was written, and what to do with it."""
    steps = f"steps {written.steps[0]} to {written.steps[1] - 1}, " if written.steps else ""
    ranks = f"{len(written.ranks)} rank{'s' * (len(written.ranks) != 1)}"
    lines = [f"{clean(written.path)}: {steps}{ranks}, {written.num_events:,} events, {written.num_bytes >> 10:,} KB"]
    if written.num_left_out:
        lines.append(f"  {written.num_left_out:,} older steps are left out; `--steps A:B` chooses others")
    for rank, clock in sorted(written.clocks.items()):
        offset, error = 1e3 * clock["offset_seconds"], 1e3 * clock["error_seconds"]
        node = clean(str(clock["node"]))
        lines.append(f"  rank {rank} on {node}: its clock is {offset:+.3f} ms off (± {error:.3f} ms), corrected")
    lines.append("  open it in https://ui.perfetto.dev or chrome://tracing; nothing is uploaded")
    return "\n".join(lines)


def parse_steps(text: str | None) -> Window:
    """The value of `--steps`: A:B, where either may be missing."""
    if text is None:
        return Window()
    first, colon, last = text.partition(":")
    ends = [end.strip() for end in (first, last)]
    if not colon or not any(ends) or not all(end.isdecimal() and end.isascii() for end in ends if end):
        raise UserError(
            f"--steps {text!r} is not a range of steps.",
            why="it has two whole numbers, the first step and the one after the last, counted from zero",
            hint="for example: `--steps 100:120`",
        )
    low, high = (int(end) if end else None for end in ends)
    if low is not None and high is not None and low >= high:
        raise UserError(f"--steps {text} has no step in it.", hint=f"for example: `--steps {low}:{low + 20}`")
    return Window(low, high)


def print_trace(run: RunInfo, path: str | None, steps: str | None, stream: TextIO, *, as_json: bool) -> int:
    """What `shoal trace RUN` does; returns the exit code."""
    window = parse_steps(steps)
    written = write_trace(run, path, window, sys.stderr if sys.stderr.isatty() and not as_json else None)
    if as_json:
        stream.write(msgspec.json.encode(written, enc_hook=finite).decode() + "\n")
    else:
        stream.write(tell_written(written) + "\n")
    return 0
