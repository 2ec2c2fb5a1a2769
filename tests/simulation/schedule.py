"""What happens in a simulated run, drawn from a seed: how many workers, how they talk, and what befalls them."""

import random
from dataclasses import dataclass
from typing import Any

Fault = tuple[float, str, tuple[Any, ...]]
FOREVER = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One run. `is_shared`: workers share memory; else votes travel. `is_remote`: control messages come twice, and late."""

    seed: int
    num_workers: int
    min_workers: int
    max_workers: int
    num_calls: int
    step_seconds: float
    is_shared: bool
    is_remote: bool
    faults: tuple[Fault, ...]

    @property
    def num_kills(self) -> int:
        return sum(act in ("kill", "freeze", "cut", "slow") for _, act, _ in self.faults)


def draw_schedule(seed: int) -> Schedule:
    """Two in three runs lose someone; one in three has several troubles close together."""
    source = random.Random(f"schedule {seed}")
    num_workers = source.randint(2, 4)
    max_workers = num_workers + source.randint(0, 1)
    step_seconds = source.choice((0.01, 0.03, 0.08))
    num_calls = source.randint(2, 4)
    length = 0.4 + num_calls * 4 * step_seconds * 1.6
    return Schedule(
        seed=seed,
        num_workers=num_workers,
        min_workers=source.randint(1, 2),
        max_workers=max_workers,
        num_calls=num_calls,
        step_seconds=step_seconds,
        is_shared=source.random() < 0.5,
        is_remote=source.random() < 0.35,
        faults=tuple(_draw_faults(source, max_workers, length)),
    )


def _draw_faults(source: random.Random, max_workers: int, length: float) -> list[Fault]:
    when = source.uniform(0.1, length)
    faults: list[Fault] = []
    for _ in range(source.choice((1, 1, 2, 3, 4))):
        faults.append((when, *_draw_fault(source, max_workers)))
        when += source.choice((0.0, 0.005, 0.03, 0.3, 0.8)) * source.random()
    return faults


def _draw_fault(source: random.Random, max_workers: int) -> tuple[str, tuple[Any, ...]]:
    worker = source.randrange(max_workers)
    draw = source.random()
    if draw < 0.6:
        return "kill", (worker,)
    if draw < 0.67:
        return "freeze", (worker, source.choice((0.5, 1.0, 2.5, FOREVER)))
    if draw < 0.72:
        return "cut", (worker, source.choice((0.5, 1.0, 3.0)))
    if draw < 0.78:
        return "starve", (source.choice((0.3, 1.0, 4.0)),)
    if draw < 0.80:
        return "slow", (worker, 5.0)
    return "resize", (source.randint(1, max_workers),)
