"""Predictions of a run's speed, a line each in its `predictions.jsonl`, and how good they were."""

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from shoal.observe.breakdown import median
from shoal.observe.decoding import decode_lines
from shoal.observe.lines import Appender, open_file
from shoal.spec.prediction import Prediction

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Prediction)
MAX_BYTES = 1 << 20
"""A run has a prediction for each configuration it had: more than this is not one of ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """How good predictions were. `num_within`: within two of their own standard deviations."""

    num_made: int
    median_error: float
    num_within: int


def judge(predictions: Sequence[Prediction]) -> Accuracy | None:
    """None where none was made."""
    if not predictions:
        return None
    logs = [abs(math.log(made.expected_seconds / made.measured_seconds)) for made in predictions]
    return Accuracy(
        num_made=len(predictions),
        median_error=median([abs(made.error) for made in predictions]),
        num_within=sum(log <= 2 * made.spread for log, made in zip(logs, predictions, strict=True)),
    )


def predictions_path(run_dir: str) -> str:
    return os.path.join(run_dir, "predictions.jsonl")


def append_predictions(run_dir: str, predictions: Iterable[Prediction]) -> None:
    """Add lines to the file of a run. A disk that fails loses them, and nothing else."""
    lines = b"".join(_encoder.encode(made) + b"\n" for made in predictions)
    if lines:
        file = Appender(predictions_path(run_dir))
        file.append(lines)
        file.close()


def read_predictions(run_dir: str) -> list[Prediction]:
    """All that were made of a run, in order; lines that cannot be read, or make no sense, are passed over."""
    try:
        with open_file(predictions_path(run_dir)) as file:
            found = decode_lines(file.read(MAX_BYTES), _decoder)[0]
    except OSError:
        return []
    return [made for made in found if made.expected_seconds > 0 and made.measured_seconds > 0 and made.spread >= 0]
