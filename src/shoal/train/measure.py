"""Measuring the first steps of a job, for `-n auto`: then the run ends."""

import time

from shoal.observe.recorder import Recorder

WARMUP_STEPS = 3
SECONDS = 1.5


class Measurement:
    """Counts steps after warm-up and ends the process when there were enough.

    How many are enough is decided from numbers that all workers share, so that all of them end after the same step.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._num_steps = 0
        self._last_step = 0
        self._num_samples = 0
        self._started = 0.0

    def add(self, count: int, seconds_per_sample: tuple[float, ...]) -> None:
        """A step of `count` samples is over. Raises SystemExit after the last."""
        self._num_steps += 1
        if self._num_steps < WARMUP_STEPS:
            return
        if self._num_steps == WARMUP_STEPS:
            step_seconds = max(1e-4, max(seconds_per_sample) * count / len(seconds_per_sample))
            self._last_step = WARMUP_STEPS + max(3, min(200, int(SECONDS / step_seconds)))
            self._started = time.perf_counter()
            return
        self._num_samples += count
        if self._num_steps == self._last_step:
            self.end()

    def end(self) -> None:
        """Say how fast the steps were and end the process; a job without enough steps just goes on."""
        if not self._num_samples:
            return
        speed = self._num_samples / (time.perf_counter() - self._started)
        if self._recorder.rank == 0:
            self._recorder.event("measured", None, samples_per_second=speed)
        raise SystemExit(0)
