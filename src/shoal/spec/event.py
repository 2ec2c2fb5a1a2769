"""Something that happened in a run, as it is journaled and sent."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One fact about a run.

    `kind` is a word from `docs/glossary.md`; `time` is seconds since the epoch; `data` holds plain JSON values.
    `rank` is None for what the launcher saw.
    """

    kind: str
    time: float
    rank: int | None = None
    step: int | None = None
    generation: int = 0
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """What one rank measured in one step. Durations are seconds and add up to the step's time.

    compute: forward and backward. communicate: moving and summing gradients, and the optimizer's share of it.
    wait: idle until others arrived. load: idle until the data was there. other: what is left. `bubble` is how much of
    wait is nobody's fault: what the schedule of a pipeline makes every stage wait.
    `waited_for` is the rank that arrived last, or None where nobody was waited for. `num_values` is how many numbers
    the samples had, such as their tokens or pixels; 0 where that is not known. `grad_signal` and `grad_variance` are
    estimates of |G|^2 and of the trace of a sample's covariance, in the few steps in which that was looked at.

    Of steps long ago several are merged into one: see `observe/merged.py`.
    """

    step: int
    time: float
    epoch: int
    loss: float
    num_samples: int
    global_samples: int
    lr: float
    compute: float
    communicate: float
    wait: float
    load: float
    other: float
    waited_for: int | None = None
    grad_norm: float | None = None
    num_values: int = 0
    bubble: float = 0.0
    grad_signal: float | None = None
    grad_variance: float | None = None

    @property
    def num_steps(self) -> int:
        """How many steps this stands for."""
        return 1
