"""Steps of long ago, several in one line: sums and means, and between which bounds they were. Pure."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import TypeVar

import msgspec

from shoal.spec.event import StepMetrics

PARTS = ("compute", "communicate", "wait", "load", "other")
BOUNDED = ("loss", "lr", "grad_norm", "samples_per_second", "step_seconds", *PARTS)
NUM_FIRST = 64
"""The first steps of a run stay as they are: they tell of the warm-up."""
FIRST_WIDTH = 8
PAST_BYTES = 8 << 20
_ROW_BYTES = 600
MAX_ROWS = PAST_BYTES // _ROW_BYTES
_MAX_WIDTH = 1 << 40

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedSteps(StepMetrics):
    """What one rank measured in `num_steps` steps that follow each other, the last of which is `step`.

    Durations and samples are sums. Loss, learning rate and norm are means over steps in which they were numbers; NaN
    where they never were. `waited_for` is who was waited for longest. `bounds` has the lowest and highest number of a
    single step for each name that a series has; of the parts of time, those of their shares.
    """

    num_steps: int = field()
    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)


def merge(rows: Sequence[StepMetrics]) -> MergedSteps:
    """One row for several that follow each other."""
    last, count = rows[-1], sum(row.num_steps for row in rows)
    sums = {name: _round(sum(map(attrgetter(name), rows))) for name in PARTS}
    norms = [(row.grad_norm, row.num_steps) for row in rows if row.grad_norm is not None]
    signals = [(row.grad_signal, row.num_steps) for row in rows if row.grad_signal is not None]
    variances = [(row.grad_variance, row.num_steps) for row in rows if row.grad_variance is not None]
    waited: Counter[int] = Counter()
    for row in rows:
        if row.waited_for is not None:
            waited[row.waited_for] += int(1e9 * (row.wait - row.bubble)) + 1
    return MergedSteps(
        step=last.step,
        time=last.time,
        epoch=last.epoch,
        loss=_mean((row.loss, row.num_steps) for row in rows),
        num_samples=sum(row.num_samples for row in rows),
        global_samples=sum(row.global_samples for row in rows),
        lr=_mean((row.lr, row.num_steps) for row in rows),
        compute=sums["compute"],
        communicate=sums["communicate"],
        wait=sums["wait"],
        load=sums["load"],
        other=sums["other"],
        num_values=sum(row.num_values for row in rows),
        bubble=_round(sum(row.bubble for row in rows)),
        waited_for=waited.most_common(1)[0][0] if waited else None,
        grad_norm=_mean(norms) if norms else None,
        grad_signal=_mean(signals) if signals else None,
        grad_variance=_mean(variances) if variances else None,
        num_steps=count,
        bounds=_all_bounds(rows),
    )


def _mean(values: Iterable[tuple[float, int]]) -> float:
    known = [(value, weight) for value, weight in values if math.isfinite(value)]
    weights = sum(weight for _, weight in known)
    return _round(sum(value * weight for value, weight in known) / weights) if known else math.nan


def _all_bounds(rows: Sequence[StepMetrics]) -> dict[str, tuple[float, float]]:
    found: dict[str, list[float]] = {}
    for row in rows:
        for name, pair in bounds_of(row).items():
            found.setdefault(name, []).extend(pair)
    finite = {name: [value for value in values if math.isfinite(value)] for name, values in found.items()}
    return {name: (_round(min(values)), _round(max(values))) for name, values in finite.items() if values}


def bounds_of(row: StepMetrics) -> Mapping[str, tuple[float, float]]:
    """Between which numbers each name of a series was; of a single step both are what it was."""
    if isinstance(row, MergedSteps):
        return row.bounds
    seconds = row.compute + row.communicate + row.wait + row.load + row.other
    values = {"loss": row.loss, "lr": row.lr, "step_seconds": seconds}
    if row.grad_norm is not None:
        values["grad_norm"] = row.grad_norm
    if seconds > 0:
        values["samples_per_second"] = row.global_samples / seconds
        values |= {
            "compute": row.compute / seconds,
            "communicate": row.communicate / seconds,
            "wait": row.wait / seconds,
            "load": row.load / seconds,
            "other": row.other / seconds,
        }
    return {name: (value, value) for name, value in values.items()}


def _round(value: float) -> float:
    """To seven digits: nobody sees more on a curve, and lines are half as long."""
    return float(f"{value:.7g}")


def widen(rows: Sequence[StepMetrics], width: int) -> list[StepMetrics]:
    """Merge rows within the same `width` steps, counted from step 0, so that all ranks are cut in the same places.

    Rows before and after the run went back to an earlier step are never merged.
    """
    merged: list[StepMetrics] = []
    for _, group in groupby(_with_runs(rows), key=lambda item: (item[0], item[1].step // width)):
        same = [row for _, row in group]
        merged.append(same[0] if len(same) == 1 else merge(same))
    return merged


def _with_runs(rows: Iterable[StepMetrics]) -> Iterable[tuple[int, StepMetrics]]:
    run, before = 0, -1
    for row in rows:
        run += row.step <= before
        before = row.step
        yield run, row


def width_of(rows: Iterable[StepMetrics]) -> int:
    """The width to which rows have been merged; 1 where none has."""
    most = max((row.num_steps for row in rows), default=1)
    return 1 << (most - 1).bit_length()


def shrink(rows: Sequence[StepMetrics], max_rows: int = MAX_ROWS) -> list[StepMetrics]:
    """So many rows at most, the first as they are, the others merged as evenly as may be."""
    first, rest = _split(rows)
    width = max(FIRST_WIDTH, width_of(rest))
    shorter = widen(rest, width)
    while len(shorter) > max_rows and width < _MAX_WIDTH:
        width *= 2
        shorter = widen(shorter, width)
    # Only a run that goes back all the time comes to this.
    return [*first, *shorter[-max_rows:]]


def _split(rows: Sequence[StepMetrics]) -> tuple[list[StepMetrics], Sequence[StepMetrics]]:
    """The first steps of a run, and the others."""
    count, before = 0, -1
    while count < len(rows) and before < rows[count].step < NUM_FIRST:
        before = rows[count].step
        count += 1
    return list(rows[:count]), rows[count:]


def align(metrics: Mapping[int, Sequence[StepMetrics]]) -> dict[int, list[StepMetrics]]:
    """Rows of all ranks merged alike: as wide, and up to the same step, as those of the rank that has merged most.

    Without that, a step would be in a merged row of one rank and by itself in another's.
    """
    pasts = {rank: [row for row in rows if row.num_steps > 1] for rank, rows in metrics.items()}
    if not any(pasts.values()):
        return {rank: list(rows) for rank, rows in metrics.items()}
    width = max(map(width_of, pasts.values()))
    until = max(past[-1].time for past in pasts.values() if past)
    aligned = {}
    for rank, rows in metrics.items():
        first, rest = _split(rows)
        num_past = next((place for place, row in enumerate(rest) if row.time > until), len(rest))
        edge = rest[num_past - 1].step // width if num_past else 0
        while num_past < len(rest) and rest[num_past].step // width == edge:
            num_past += 1
        aligned[rank] = [*first, *widen(rest[:num_past], width), *rest[num_past:]]
    return aligned


def coarsen(
    rows: Sequence[Row], max_rows: int, num_of: Callable[[Row], int], join: Callable[[Sequence[Row]], Row]
) -> list[Row]:
    """At most so many rows, neighbours joined; all stand for about equally much."""
    found, width = list(rows), max(map(num_of, rows), default=1)
    while len(found) > max_rows:
        groups: list[list[Row]] = []
        room = 0
        for row in found:
            if num_of(row) > room:
                groups.append([])
                room = width
            groups[-1].append(row)
            room -= num_of(row)
        found = [group[0] if len(group) == 1 else join(group) for group in groups]
        width *= 2
    return found


def encode_rows(rows: Iterable[StepMetrics]) -> bytes:
    """Rows as lines."""
    return b"".join(_encoder.encode(_plain(row)) + b"\n" for row in rows)


def _plain(row: StepMetrics) -> object:
    if math.isfinite(row.loss + row.lr + (row.grad_norm or 0.0)):
        return row
    plain: dict[str, object] = msgspec.to_builtins(row)
    bad = {name: str(value) for name, value in plain.items() if isinstance(value, float) and not math.isfinite(value)}
    return {**plain, **bad}


_encoder = msgspec.json.Encoder()
