"""The user's own numbers, as `shoal.log` took them: a line a call, in a file for each worker."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import msgspec

from shoal.observe.behind import DelayedAppender
from shoal.observe.clean import one_line
from shoal.observe.decoding import decode_lines
from shoal.observe.lines import Report, say_nothing
from shoal.observe.merged import coarsen
from shoal.observe.segments import Bound, BoundedAppender, SegmentReader, list_names
from shoal.spec.errors import UserError

MAX_NAME = 128
MAX_NAMES = 1000
"""Names of one worker. Those beyond are left out, which is said once: most likely a name has a number in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What one call of `shoal.log` said: numbers by name, at a step."""

    step: int
    time: float
    values: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedPoint:
    """Several points of one name that follow each other: the last step and time, the mean of those with a number."""

    name: str
    step: int
    time: float
    num: int
    low: float
    mean: float
    high: float

    @property
    def values(self) -> dict[str, float]:
        """Its mean, by name, for whoever takes it for a point."""
        return {self.name: self.mean}


class PointsWriter(DelayedAppender[Point]):
    """Takes the points of one worker."""

    def __init__(self, run_dir: str, rank: int, report: Report = say_nothing) -> None:
        super().__init__(BoundedAppender(points_path(run_dir, rank), BOUND, report), encode, name="shoal-points")


def points_path(run_dir: str, rank: int) -> str:
    return os.path.join(run_dir, f"points-{rank}.jsonl")


def encode(point: Point) -> bytes:
    """One line of the file, without its newline; NaN and infinities as text."""
    values = point.values
    if not all(map(math.isfinite, values.values())):
        texts: dict[str, Any] = {
            name: value if math.isfinite(value) else str(value) for name, value in values.items()
        }
        return _encoder.encode({"step": point.step, "time": point.time, "values": texts})
    return _encoder.encode(point)


def decode(lines: bytes) -> tuple[list[Point], int]:
    """The points of a block of lines, and how many lines could not be read."""
    return decode_lines(lines, _decoder)


_encoder = msgspec.json.Encoder()
# Not strict: that is what turns the text "nan" into the number.
_decoder = msgspec.json.Decoder(Point, strict=False)


_past_decoder = msgspec.json.Decoder(MergedPoint, strict=False)


def split(point: Point) -> list[MergedPoint]:
    """A point as one for each of its names."""
    return [
        MergedPoint(name=name, step=point.step, time=point.time, num=1, low=value, mean=value, high=value)
        for name, value in point.values.items()
    ]


def decode_past(lines: bytes) -> tuple[list[MergedPoint], int]:
    """Merged points, and how many lines could not be read."""
    return decode_lines(lines, _past_decoder)


def fold(past: bytes, segment: bytes) -> bytes:
    """The past with one more part of the file in it, each name merged as far as it must be. Pure."""
    names: dict[str, list[MergedPoint]] = {}
    for one in chain(decode_past(past)[0], chain.from_iterable(map(split, decode(segment)[0]))):
        names.setdefault(one.name, []).append(one)
    most = max(16, MAX_MERGED // max(1, len(names)))
    kept = [one for each in names.values() for one in coarsen(each, most, lambda one: one.num, merge)]
    return b"".join(_encoder.encode(_plain(one)) + b"\n" for one in kept)


def merge(points: Sequence[MergedPoint]) -> MergedPoint:
    """One point for several of one name."""
    known = [one for one in points if math.isfinite(one.mean)]
    weight = sum(one.num for one in known)
    return MergedPoint(
        name=points[-1].name,
        step=points[-1].step,
        time=points[-1].time,
        num=sum(one.num for one in points),
        low=min((one.low for one in known), default=math.nan),
        mean=float(f"{sum(one.mean * one.num for one in known) / weight:.9g}") if known else math.nan,
        high=max((one.high for one in known), default=math.nan),
    )


def _plain(point: MergedPoint) -> object:
    if math.isfinite(point.low + point.mean + point.high):
        return point
    plain: dict[str, Any] = msgspec.to_builtins(point)
    return {**plain, **{name: str(plain[name]) for name in ("low", "mean", "high")}}


MAX_MERGED = 40_000
BOUND = Bound(segment_bytes=4 << 20, num_sealed=2, fold=fold)
"""The newest 12 MB as they were, about 150,000 points; 40,000 merged ones (about 6 MB) for all before them."""


class PointsReader:
    """Reads the points of all workers while they are being written, old ones merged."""

    def __init__(self, run_dir: str) -> None:
        self._run_dir = run_dir
        self._files: dict[int, SegmentReader] = {}
        self._newest: dict[int, float] = {}
        self.num_damaged = 0

    def read_new(self) -> dict[int, list[Point | MergedPoint]]:
        """What each worker has added since the last call; workers without news are absent."""
        news = {}
        for rank in sorted(map(int, list_names(self._run_dir, r"points-(\d+)\.jsonl"))):
            file = self._files.setdefault(rank, SegmentReader(points_path(self._run_dir, rank)))
            if points := self._read_all(file, self._newest.get(rank, -math.inf)):
                news[rank] = points
                self._newest[rank] = max(self._newest.get(rank, -math.inf), points[-1].time)
        return news

    def _read_all(self, file: SegmentReader, newest: float) -> list[Point | MergedPoint]:
        points: list[Point | MergedPoint] = []
        for block in file.read_new():
            if block.is_past:
                old, num_damaged = decode_past(block.lines)
                # Who was away for long gets all of it, and knows some of it already.
                points = [one for one in old if one.time > newest]
            else:
                good, num_damaged = decode(block.lines)
                points += good
            self.num_damaged += num_damaged
        return points


def check_values(values: Mapping[Any, Any]) -> dict[str, float]:
    """Names and numbers as they are kept. Raises UserError for what is neither.

    Names become one line that a terminal can show. A number is anything with one value: a Python number, an array or
    a tensor with one element.
    """
    checked = {}
    for name, value in values.items():
        kind = type(value)
        checked[name if type(name) is str and name in _known else _clean_name(name)] = (
            value
            if kind is float
            else float(value)
            if kind is int and -_FAR < value < _FAR
            else _to_number(name, value)
        )
    return checked


_FAR = 1 << 63
_known: set[str] = set()


def _clean_name(name: Any) -> str:
    if not isinstance(name, str):
        raise UserError(
            f"shoal.log got {shown(name)} as the name of a number, which is a {type(name).__name__}.",
            hint='names are text: `shoal.log({"val/accuracy": 0.9})`',
        )
    cleaned = one_line(name.encode("utf-8", "replace").decode("utf-8"))[:MAX_NAME]
    if not cleaned:
        raise UserError("shoal.log got an empty name.", hint="give the number a name: `shoal.log(accuracy=0.9)`")
    if cleaned == name and len(_known) < 10 * MAX_NAMES:
        _known.add(name)
    return cleaned


def _to_number(name: Any, value: Any) -> float:
    try:
        if isinstance(value, str | bytes) or value is None:
            raise TypeError
        number = value.item() if hasattr(value, "item") else value
        if isinstance(number, complex):
            raise TypeError
        return float(number)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    except Exception as error:  # a user's object may do anything
        size = f" of {math.prod(shape)} elements" if (shape := _shape(value)) else ""
        raise UserError(
            f"shoal.log got a {type(value).__name__}{size} for {one_line(name)!r}, which is not a number.",
            why="" if size or isinstance(value, str | bytes) or value is None else one_line(error)[:200],
            hint="log one number for each name: `value.mean()` of a tensor, `float(text)` of a text",
        ) from None


def _shape(value: Any) -> tuple[int, ...]:
    shape = getattr(value, "shape", ())
    return tuple(shape) if isinstance(shape, tuple) and all(isinstance(each, int) for each in shape) else ()


def shown(value: Any) -> str:
    """A value of the user's, for a message."""
    try:
        return one_line(repr(value))[:80]
    except Exception:  # a user's __repr__ may do anything
        return "something"
