"""The curves of a run, read from its folder while it grows: each step once, and never more points than wanted."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from shoal.observe.journal import JournalReader
from shoal.observe.merged import BOUNDED, PARTS, MergedSteps, bounds_of
from shoal.observe.metrics import decode_past, list_ranks, metrics_path
from shoal.observe.points import MergedPoint, Point, PointsReader
from shoal.observe.segments import SegmentReader
from shoal.observe.turns import is_way_back
from shoal.spec.event import Event, StepMetrics

if TYPE_CHECKING:
    from numpy import ndarray

    Columns = dict[str, ndarray[Any, Any]]

NAMES = (*("loss", "lr", "epoch", "grad_norm", "samples_per_second", "step_seconds"), *PARTS)
"""What a Trainer records; of the parts of time, their share of a step, mean over the workers."""
OWN = "log/"
"""Stands before a number of the user's own that has the name of one a Trainer records."""
_FIELDS = ("step", "time", "epoch", "loss", "lr", "global_samples", *PARTS, "grad_norm", "has_norm", "num_steps")
_LOWS = tuple(f"low {name}" for name in BOUNDED)
_HIGHS = tuple(f"high {name}" for name in BOUNDED)
_OWN_FIELDS = ("step", "time", "low", "mean", "high", "count")


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One curve; low and high differ from mean where several steps were merged into one point.

    Points are in the order in which steps were taken. `steps` and `times` are those of the last step of each point.
    """

    name: str
    steps: list[int]
    times: list[float]
    low: list[float]
    mean: list[float]
    high: list[float]


class SeriesReader:
    """Follows the curves of a run. Cheap to call again: only what is new is read.

    Numbers that several workers logged for one step under one name are one point, with their mean. What the run
    took back by going to a checkpoint is left out. NaN and infinities are kept; a point
    of several steps is about those that have a number, and NaN where none has.
    """

    def __init__(self, run_dir: str) -> None:
        self._run_dir = run_dir
        self._ranks: dict[int, _Rank] = {}
        self._points = PointsReader(run_dir)
        self._journal = JournalReader(run_dir)
        self._own: dict[str, dict[int, Table]] = {}
        self._returns: list[Event] = []
        self._made: dict[str, Columns] = {}

    def names(self) -> list[str]:
        """The curves there are: those of a Trainer, then the user's own in the order they first appeared."""
        self._follow()
        return [*(NAMES if self._has_steps() else ()), *(self._shown(name) for name in self._own)]

    def read(
        self,
        names: Sequence[str],
        *,
        max_points: int = 2000,
        first_step: int | None = None,
        last_step: int | None = None,
    ) -> dict[str, Series]:
        """The named curves, of the steps from `first_step` to `last_step`; names nobody recorded are left out."""
        self._follow()
        found = {}
        for name in dict.fromkeys(names):
            columns = self._columns(name)
            if columns is not None:
                found[name] = _shrink(name, _between(columns, first_step, last_step), max(1, max_points))
        return found

    def _follow(self) -> None:
        has_news = False
        for rank in list_ranks(self._run_dir):
            if rank not in self._ranks:
                self._ranks[rank] = _Rank(metrics_path(self._run_dir, rank))
            has_news |= self._ranks[rank].follow()
        for rank, points in self._points.read_new().items():
            has_news = True
            for name, rows in _by_name(points).items():
                tables = self._own.setdefault(name, {})
                tables.setdefault(rank, Table(_OWN_FIELDS)).add(rows)
        # What is damaged in the journal is for others to say.
        returns = [event for event in self._journal.read_new() if is_way_back(event) or event.kind == "relearning"]
        self._returns += returns
        if has_news or returns:
            self._made.clear()

    def _shown(self, name: str) -> str:
        return f"{OWN}{name}" if name in NAMES and self._has_steps() else name

    def _has_steps(self) -> bool:
        return any(each.size for each in self._ranks.values())

    def _columns(self, name: str) -> "Columns | None":
        if name not in self._made:
            if name in NAMES and self._has_steps():
                has_past = any(each.has_past for each in self._ranks.values())
                ranks = {rank: each.columns(has_past) for rank, each in self._ranks.items() if each.size}
                self._made |= _curves(merge_ranks(ranks, self._returns))
            for own, tables in self._own.items():
                if self._shown(own) == name:
                    self._made[name] = _merge_own([table.columns() for table in tables.values()], self._returns)
        return self._made.get(name)


class Table:
    """Columns of numbers that grow at the end."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self.size = 0
        self._data: Any = None

    def add(self, rows: Sequence[Sequence[float]]) -> None:
        """Add what each column got, one list a column."""
        import numpy as np

        count = len(rows[0])
        if self._data is None or self.size + count > self._data.shape[1]:
            grown = np.empty((len(self._names), max(1024, 2 * (self.size + count))))
            if self._data is not None:
                grown[:, : self.size] = self._data[:, : self.size]
            self._data = grown
        for column, values in zip(self._data, rows, strict=True):
            column[self.size : self.size + count] = values
        self.size += count

    def columns(self) -> "Columns":
        """Views of what there is."""
        if self._data is None:
            self.add([()] * len(self._names))
        return {name: self._data[index, : self.size] for index, name in enumerate(self._names)}


class _Rank:
    """The steps of one worker: those of long ago, which are merged, and those that are as they were."""

    def __init__(self, path: str) -> None:
        self._file = SegmentReader(path)
        self._past, self._steps = Table((*_FIELDS, *_LOWS, *_HIGHS)), Table(_FIELDS)

    @property
    def size(self) -> int:
        return self._past.size + self._steps.size

    @property
    def has_past(self) -> bool:
        return self._past.size > 0

    def follow(self) -> bool:
        """Read what is new; True where something was."""
        has_news = False
        for block in self._file.read_new():
            has_news = True
            if block.is_past:
                self._past, self._steps = Table((*_FIELDS, *_LOWS, *_HIGHS)), Table(_FIELDS)
                rows = decode_past(block.lines)[0]
                self._past.add([*_rows_of(rows), *_bounds_of(rows)])
            else:
                self._steps.add(_rows_of(_decode(block.lines)))
        return has_news

    def columns(self, has_past: bool) -> "Columns":
        """All steps; where some are merged, also between which bounds everything was."""
        import numpy as np

        steps = self._steps.columns()
        if not has_past:
            return steps
        values = _values_of(steps)
        for name in BOUNDED:
            steps[f"low {name}"] = steps[f"high {name}"] = values[name]
        past = self._past.columns()
        return {name: np.concatenate([past[name], steps[name]]) for name in past}


@cache
def _decoder() -> Any:
    """Decodes lines of metrics into objects that the garbage collector need not know: twice as fast."""
    import msgspec

    names = [(name, float) for name in _FIELDS[:-3]]
    step = msgspec.defstruct("Step", [*names, ("grad_norm", float | None, None)], gc=False)
    return msgspec.json.Decoder(step, strict=False)


def _decode(lines: bytes) -> Sequence[Any]:
    import msgspec

    from shoal.observe.metrics import decode

    try:
        return _decoder().decode_lines(lines)  # type: ignore[no-any-return]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return decode(lines)[0]


def _rows_of(steps: Sequence[StepMetrics]) -> list[Any]:
    """The fields of steps, an array each."""
    import numpy as np

    size = len(steps)
    rows: list[Any] = [np.fromiter(map(attrgetter(name), steps), float, size) for name in _FIELDS[:-3]]
    norms = [step.grad_norm for step in steps]
    has_norm = [value is not None for value in norms]
    is_merged = bool(steps) and isinstance(steps[-1], MergedSteps)
    counts = [step.num_steps for step in steps] if is_merged else [1] * size
    return [*rows, [value or 0.0 for value in norms], has_norm, counts]


def _bounds_of(rows: Sequence[StepMetrics]) -> list[list[float]]:
    nothing = (float("nan"), float("nan"))
    pairs = [[bounds.get(name, nothing) for name in BOUNDED] for bounds in map(bounds_of, rows)]
    return [[row[place][side] for row in pairs] for side in (0, 1) for place in range(len(BOUNDED))]


def _by_name(points: Iterable[Point | MergedPoint]) -> dict[str, list[list[float]]]:
    found: dict[str, list[list[float]]] = {}
    for point in points:
        if isinstance(point, Point):
            news = [(name, (point.step, point.time, value, value, value, 1)) for name, value in point.values.items()]
        else:
            news = [(point.name, (point.step, point.time, point.low, point.mean, point.high, point.num))]
        for name, numbers in news:
            rows = found.get(name)
            if rows is None:
                rows = found[name] = [[] for _ in _OWN_FIELDS]
            for column, number in zip(rows, numbers, strict=True):
                column.append(number)
    return found


def merge_ranks(ranks: "Mapping[int, Columns]", returns: Sequence[Event] = ()) -> "Columns":
    """The steps of all workers as one table in which each counts once. Pure.

    What is the same for all comes from the lowest worker that has the step; parts of time are sums over all that have
    it. In the usual run every worker has every step, and the tables lie on each other.
    """
    import numpy as np

    tables = [_without_taken_back(ranks[rank], returns) for rank in sorted(ranks)]
    for table in tables:
        table["seconds"] = _add_up([table[part] for part in PARTS])
    first = tables[0]
    if all(np.array_equal(each["step"], first["step"]) for each in tables[1:]):
        return first | {name: _combine(name, [each[name] for each in tables]) for name in first if _is_of_all(name)}
    starts = _restarts(tables)
    keys = [np.searchsorted(starts, each["time"], side="right") * 2.0**40 + each["step"] for each in tables]
    order, places = np.unique(np.concatenate(keys), return_inverse=True)
    cuts = np.cumsum([0, *map(len, keys)])
    merged: Columns = {}
    for name in first:
        merged[name] = column = np.zeros(len(order)) if name in PARTS else np.full(len(order), np.nan)
        for number in reversed(range(len(tables))):  # the lowest writes last
            place, values = places[cuts[number] : cuts[number + 1]], tables[number][name]
            column[place] = _combine(name, [column[place], values]) if _is_of_all(name) else values
    return merged


def _is_of_all(name: str) -> bool:
    """Whether a column is about all workers, and not only about the lowest."""
    return name.rpartition(" ")[2] in PARTS


def _combine(name: str, columns: "Sequence[ndarray[Any, Any]]") -> Any:
    import numpy as np

    if name in PARTS:
        return _add_up(columns)
    return (np.fmin if name.startswith("low ") else np.fmax).reduce(columns)


def _add_up(columns: "Sequence[ndarray[Any, Any]]") -> Any:
    import numpy as np

    return np.sum(columns, axis=0)


def _without_taken_back(table: "Columns", returns: Iterable[Event]) -> "Columns":
    """What was taken before the run went back, and taken again after it, does not count; see `turns`."""
    import numpy as np

    kept = np.ones(len(table["step"]), dtype=bool)
    table = dict(table)
    for event in returns:
        is_before, back_to = table["time"] <= event.time, event.step or 0
        is_again = np.isin(table["step"], table["step"][~is_before])
        if is_way_back(event):
            kept &= ~(is_before & (table["step"] >= back_to) & is_again)
        else:
            is_missing = (table["step"] >= back_to) & (table["step"] < float(event.data.get("until", 0)))
            kept &= ~(~is_before & is_missing & np.isin(table["step"], table["step"][is_before]))
    return table if kept.all() else {name: column[kept] for name, column in table.items()}


def _restarts(tables: "Sequence[Columns]") -> Any:
    """When steps began to count from a lower number again, by the worker that saw it most: the next trainer."""
    import numpy as np

    found = []
    for table in tables:
        places = np.flatnonzero(np.diff(table["step"]) <= 0)
        # In the middle between two steps: clocks of machines differ by less.
        found.append((table["time"][places] + table["time"][places + 1]) / 2)
    return np.sort(max(found, key=len))


def _values_of(steps: "Columns") -> "Columns":
    """What people look at, from sums: those of one worker, or shares of time from those of all."""
    import numpy as np

    total = _add_up([steps[part] for part in PARTS])
    seconds = steps.get("seconds", total)
    with np.errstate(divide="ignore", invalid="ignore"):
        return {
            **{name: steps[name] for name in ("loss", "lr", "epoch", "grad_norm")},
            "step_seconds": seconds / steps["num_steps"],
            "samples_per_second": np.where(seconds > 0, steps["global_samples"] / seconds, np.nan),
            **{part: np.where(total > 0, steps[part] / total, np.nan) for part in PARTS},
        }


def _curves(steps: "Columns") -> "dict[str, Columns]":
    """What people look at, from merged steps."""
    curves = {}
    for name, mean in _values_of(steps).items():
        low, high = steps.get(f"low {name}", mean), steps.get(f"high {name}", mean)
        curves[name] = {"step": steps["step"], "time": steps["time"], "low": low, "mean": mean, "high": high}
        curves[name]["count"] = steps["num_steps"]
    has_norm = steps["has_norm"] > 0
    curves["grad_norm"] = {name: column[has_norm] for name, column in curves["grad_norm"].items()}
    return curves


def _merge_own(tables: "Sequence[Columns]", returns: Sequence[Event]) -> "Columns":
    """One name's points of all workers: those of one step are one, between the lowest and the highest of them."""
    import numpy as np

    tables = [_without_taken_back(each, returns) for each in tables]
    if len(tables) == 1:
        return tables[0]
    whole = {name: np.concatenate([each[name] for each in tables]) for name in tables[0]}
    steps, places = np.unique(whole["step"], return_inverse=True)
    count = np.bincount(places, whole["count"], len(steps))
    low, high, time = np.full(len(steps), np.inf), np.full(len(steps), -np.inf), np.full(len(steps), -np.inf)
    np.minimum.at(low, places, whole["low"])
    np.maximum.at(high, places, whole["high"])
    np.maximum.at(time, places, whole["time"])
    mean = np.bincount(places, whole["mean"] * whole["count"], len(steps)) / count
    return {"step": steps, "time": time, "low": low, "mean": mean, "high": high, "count": count}


def _between(columns: "Columns", first_step: int | None, last_step: int | None) -> "Columns":
    if first_step is None and last_step is None:
        return columns
    kept = columns["step"] >= (-float("inf") if first_step is None else first_step)
    kept &= columns["step"] <= (float("inf") if last_step is None else last_step)
    return {name: column[kept] for name, column in columns.items()}


def _shrink(name: str, columns: "Columns", max_points: int) -> Series:
    """At most so many points: neighbours are merged, and what was lowest and highest among them stays visible."""
    import numpy as np

    size = len(columns["step"])
    if size > max_points:
        starts = np.arange(max_points) * size // max_points
        ends = np.append(starts[1:], size)
        known = np.isfinite(columns["mean"])
        weight = np.where(known, columns["count"], 0.0)
        with np.errstate(invalid="ignore"):
            mean = np.add.reduceat(np.where(known, columns["mean"], 0.0) * weight, starts)
            mean /= np.add.reduceat(weight, starts)
        columns = {
            "step": columns["step"][ends - 1],
            "time": columns["time"][ends - 1],
            "low": np.fmin.reduceat(columns["low"], starts),
            "mean": mean,
            "high": np.fmax.reduceat(columns["high"], starts),
        }
    return Series(
        name=name,
        steps=columns["step"].astype(np.int64).tolist(),
        times=columns["time"].tolist(),
        low=columns["low"].tolist(),
        mean=columns["mean"].tolist(),
        high=columns["high"].tolist(),
    )
