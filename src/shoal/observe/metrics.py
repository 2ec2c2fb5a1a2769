"""Metrics of a run: one line a step and rank, written behind the training loop's back.

The file is JSON lines. JSON has no NaN and no infinities: such numbers are written as the texts "nan", "inf" and
"-inf", and read back as the numbers they were. A missing value (`grad_norm`, `waited_for`) is null; what only few
steps have (`bubble`, `grad_signal`, `grad_variance`) is left out of the others.
"""

import math
import os
from typing import Any

import msgspec

from shoal.observe.behind import DelayedAppender
from shoal.observe.decoding import UNREADABLE, decode_lines
from shoal.observe.lines import Report, say_nothing
from shoal.observe.merged import MergedSteps, encode_rows, shrink
from shoal.observe.segments import Bound, BoundedAppender, SegmentReader, list_names
from shoal.spec.event import StepMetrics

_FLOATS = ("time", "loss", "lr", "compute", "communicate", "wait", "load", "other", "grad_norm")
_UNSEEN = b',"bubble":0.0,"grad_signal":null,"grad_variance":null}'


class MetricsWriter(DelayedAppender[StepMetrics]):
    """Takes the metrics of one rank, a step at a time."""

    def __init__(self, run_dir: str, rank: int, report: Report = say_nothing) -> None:
        file = BoundedAppender(metrics_path(run_dir, rank), BOUND, report)
        super().__init__(file, encode, name="shoal-metrics")


def metrics_path(run_dir: str, rank: int) -> str:
    return os.path.join(run_dir, f"metrics-{rank}.jsonl")


def encode(metrics: StepMetrics) -> bytes:
    """One line of the file, without its newline."""
    if math.isfinite(metrics.loss + metrics.lr + (metrics.grad_norm or 0.0)):
        line = _encoder.encode(metrics)
        return line[: -len(_UNSEEN)] + b"}" if line.endswith(_UNSEEN) else line
    plain: dict[str, Any] = msgspec.to_builtins(metrics)
    for name in _FLOATS:
        value = plain[name]
        if value is not None and not math.isfinite(value):
            plain[name] = str(value)
    return _encoder.encode(plain)


def decode(lines: bytes) -> tuple[list[StepMetrics], int]:
    """The metrics of a block of lines, and how many lines could not be read."""
    return decode_lines(lines, _decoder)


_encoder = msgspec.json.Encoder()
# Not strict: that is what turns the text "nan" into the number.
_decoder = msgspec.json.Decoder(StepMetrics, strict=False)


def decode_past(lines: bytes) -> tuple[list[StepMetrics], int]:
    """The same for lines of the past: single steps, and merged ones."""
    rows: list[StepMetrics] = []
    num_damaged = 0
    for line in lines.splitlines():
        try:
            rows.append((_past_decoder if b'"num_steps"' in line else _decoder).decode(line))
        except UNREADABLE:
            num_damaged += 1
    return rows, num_damaged


def fold(past: bytes, segment: bytes) -> bytes:
    """The past with one more part of the file in it, merged as far as it must be."""
    return encode_rows(shrink([*decode_past(past)[0], *decode(segment)[0]]))


_past_decoder = msgspec.json.Decoder(MergedSteps, strict=False)
BOUND = Bound(segment_bytes=4 << 20, num_sealed=3, fold=fold)
"""The newest 45,000 steps and more as they were, 16 MB; all before them in at most 8 MB."""


class MetricsReader:
    """Reads the metrics of all ranks while they are being written. `num_damaged` counts lines nobody could read.

    Steps of long ago come merged, several in one row: `num_steps` says how many.
    """

    def __init__(self, run_dir: str) -> None:
        self._run_dir = run_dir
        self._files: dict[int, SegmentReader] = {}
        self._newest: dict[int, float] = {}
        self.num_damaged = 0

    def read_new(self) -> dict[int, list[StepMetrics]]:
        """What each rank has added since the last call; ranks without news are absent."""
        news = {}
        for rank in list_ranks(self._run_dir):
            file = self._files.setdefault(rank, SegmentReader(metrics_path(self._run_dir, rank)))
            if steps := self._read_all(file, self._newest.get(rank, -math.inf)):
                news[rank] = steps
                self._newest[rank] = steps[-1].time
        return news

    def _read_all(self, file: SegmentReader, newest: float) -> list[StepMetrics]:
        steps: list[StepMetrics] = []
        for block in file.read_new():
            good, num_damaged = (decode_past if block.is_past else decode)(block.lines)
            if block.is_past:
                # Who was away for long gets all of it, and knows some of it already.
                steps = [step for step in good if step.time > newest]
            else:
                steps += good
            self.num_damaged += num_damaged
        return steps


def list_ranks(run_dir: str) -> list[int]:
    """The ranks that have written metrics, in order."""
    return sorted(map(int, list_names(run_dir, r"metrics-(\d+)\.jsonl")))


def read(run_dir: str) -> dict[int, list[StepMetrics]]:
    """The metrics of every rank, in the order they were written. Damaged lines are passed over."""
    return MetricsReader(run_dir).read_new()
