"""What happens in a simulated run, drawn from a seed: how many workers, how they talk, and what befalls them."""

import random
from dataclasses import dataclass
from typing import Any

Fault = tuple[float, str, tuple[Any, ...]]
FOREVER = 1e9
WEIGHTS = {"kill": 60, "freeze": 7, "cut": 5, "sever": 6, "starve": 6, "slow": 2, "resize": 20}
"""How often something happens. Those that take seconds to be found out are rarer: they cost time here, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One run. `is_shared`: workers share memory; else votes travel.

    `is_remote`: control messages come late, in another order, and twice.
    """

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
        return sum(act in ("kill", "freeze", "cut", "sever", "slow", "lose_room") for _, act, _ in self.faults)


def draw_schedule(seed: int, kinds: tuple[str, ...] = (), remote_share: float = 0.35) -> Schedule:
    """Most runs lose someone, many have several troubles close together. `kinds` limits what may happen."""
    source = random.Random(f"schedule {seed}")
    num_workers = source.randint(2, 4)
    max_workers = num_workers + source.randint(0, 1)
    step_seconds = source.choice((0.01, 0.03, 0.08))
    num_calls = source.randint(2, 3)
    length = 0.4 + num_calls * 3 * step_seconds * 1.6
    return Schedule(
        seed=seed,
        num_workers=num_workers,
        min_workers=source.randint(1, 2),
        max_workers=max_workers,
        num_calls=num_calls,
        step_seconds=step_seconds,
        is_shared=source.random() < 0.5,
        is_remote=source.random() < remote_share,
        faults=tuple(_draw_faults(source, max_workers, length, kinds)),
    )


def _draw_faults(source: random.Random, max_workers: int, length: float, kinds: tuple[str, ...]) -> list[Fault]:
    when = source.uniform(0.1, length)
    faults: list[Fault] = []
    for _ in range(source.choice((1, 1, 2, 3, 4))):
        kind = source.choice(kinds) if kinds else source.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        faults.append((when, kind, _draw_details(source, kind, max_workers)))
        when += source.choice((0.0, 0.005, 0.03, 0.3, 0.8)) * source.random()
    return faults


def _draw_details(source: random.Random, kind: str, max_workers: int) -> tuple[Any, ...]:
    worker = source.randrange(max_workers)
    if kind == "sever":  # by itself: a draw more for all kinds would make other runs of all seeds
        return worker, source.choice(("up", "down", "both")), source.choice((0.2, 1.0, 3.0))
    if kind == "lose_room":
        return source.randint(1, max_workers), source.choice((0.0, 0.05, 0.5, 3.0))
    return {
        "kill": (worker,),
        "freeze": (worker, source.choice((0.5, 1.0, 2.5, FOREVER))),
        "cut": (worker, source.choice((0.5, 1.0, 3.0))),
        "starve": (source.choice((0.3, 1.0, 1.5, 4.0)),),
        "slow": (worker, 5.0),
        "resize": (source.randint(1, max_workers),),
    }[kind]
