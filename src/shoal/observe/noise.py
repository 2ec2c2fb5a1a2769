"""The gradient noise scale of a run: how many samples a batch needs for its gradient to be as large as its noise."""

from collections.abc import Iterable
from dataclasses import dataclass

from shoal.spec.event import StepMetrics

KEPT = 0.98
"""How much of what was known before stays with each further look: some 50 of them count, or 800 steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseScale:
    """Estimates of single steps, smoothed: each is far off, and their ratio further.

    `signal` is |G|^2 and `variance` the trace of a sample's covariance, the newest looks counting most.
    """

    signal: float = 0.0
    variance: float = 0.0
    weight: float = 0.0
    num_looks: int = 0

    def with_step(self, row: StepMetrics) -> "NoiseScale":
        """With what one more step tells, if it does."""
        if row.grad_signal is None or row.grad_variance is None:
            return self
        weight = KEPT * self.weight + 1.0
        return NoiseScale(
            signal=self.signal + (row.grad_signal - self.signal) / weight,
            variance=self.variance + (row.grad_variance - self.variance) / weight,
            weight=weight,
            num_looks=self.num_looks + 1,
        )

    @property
    def samples(self) -> float | None:
        """The noise scale; None where nothing was looked at, or the gradient drowns in noise."""
        if not self.num_looks or self.signal <= 0:
            return None
        return max(self.variance, 0.0) / self.signal


def find_noise(rows: Iterable[StepMetrics]) -> NoiseScale | None:
    """Of the steps of one rank, in order; None where none was looked at."""
    scale = NoiseScale()
    for row in rows:
        scale = scale.with_step(row)
    return scale if scale.num_looks else None
