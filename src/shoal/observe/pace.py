"""How fast a rank is going and where its time goes, over the last seconds."""

import math
from typing import Any

from shoal.spec.event import StepMetrics

HORIZON_SECONDS = 10.0


class Pace:
    """Sums of recent steps, in which older ones count less and less.

    `add` is what every step pays, about a microsecond; the rest happens when someone asks. The first step is left out
    of speeds and shares: it pays for warming up and would spoil the first minute of both.
    """

    def __init__(self, start: float) -> None:
        self._newest: StepMetrics | None = None
        self._since = start
        # Seconds, steps, samples; then compute, communicate, wait, load, other.
        self._recent = [0.0] * 8
        self._total = [0.0] * 8

    def add(self, metrics: StepMetrics, now: float) -> None:
        """Take one step that ended at `now`."""
        if self._newest is None:
            self._since = now
        else:
            recent = self._recent
            recent[1] += 1
            recent[2] += metrics.global_samples
            recent[3] += metrics.compute
            recent[4] += metrics.communicate
            recent[5] += metrics.wait
            recent[6] += metrics.load
            recent[7] += metrics.other
        self._newest = metrics

    def summarize(self, now: float, num_steps: int | None, num_workers: int) -> dict[str, Any]:
        """What a `progress` event says. `eta_seconds` is missing where the end is not known.

        Metrics number steps and epochs from 0. Here `step` is how many are done, and `epoch` counts from 1.
        """
        newest = self._newest
        if newest is None:
            return {}
        self._merge(now)
        seconds, steps, samples, *shares = self._total
        busy = sum(shares) or 1.0
        data: dict[str, Any] = {
            "step": newest.step + 1,
            "num_steps": num_steps,
            "epoch": newest.epoch + 1,
            "loss": newest.loss,
            "samples_per_second": round(samples / seconds, 3) if seconds > 0 else None,
            "workers": num_workers,
        }
        if num_steps is not None and steps:
            data["eta_seconds"] = round(max(0, num_steps - newest.step - 1) * seconds / steps, 1)
        if steps:
            names = ("compute", "communicate", "wait", "load")
            data |= {name: round(share / busy, 4) for name, share in zip(names, shares, strict=False)}
        return data

    def _merge(self, now: float) -> None:
        if not self._recent[1]:
            return
        self._recent[0] = now - self._since
        fading = math.exp(-self._recent[0] / HORIZON_SECONDS)
        self._total = [old * fading + new for old, new in zip(self._total, self._recent, strict=True)]
        self._recent = [0.0] * 8
        self._since = now
