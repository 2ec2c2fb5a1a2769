"""What was thought of a job's speed before it was seen."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What was expected of a configuration before it ran, and what it was, kept to show how good they are.

    `spread` is one standard deviation of the logarithm; `num_observations` is how many configurations were known.
    """

    job: str
    time: float
    expected_seconds: float
    spread: float
    measured_seconds: float
    num_observations: int = 0
    nodes: int = 1
    workers: int = 1
    micro_batch: float = 0.0
    accumulation: int = 0
    kind: str = ""

    @property
    def error(self) -> float:
        """Relative: 0.1 where a step took 10 % less than expected."""
        return self.expected_seconds / self.measured_seconds - 1
