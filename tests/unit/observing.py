"""What the tests of `shoal.observe` share: a clock to turn by hand, and runs made up of numbers."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from shoal.observe import folder
from shoal.observe.metrics import encode, metrics_path
from shoal.spec.event import Event, StepMetrics

STEP = StepMetrics(
    step=1,
    time=1000.0,
    epoch=0,
    loss=0.5,
    num_samples=32,
    global_samples=64,
    lr=0.1,
    compute=0.016,
    communicate=0.002,
    wait=0.001,
    load=0.0005,
    other=0.0005,
)


@dataclass
class Clock:
    """A clock that stands still until it is moved."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def make_step(step: int = 1, **changes: Any) -> StepMetrics:
    return replace(STEP, step=step, **{"time": 1000.0 + 0.02 * step, **changes})


def make_steps(count: int, **changes: Any) -> list[StepMetrics]:
    return [make_step(step, **changes) for step in range(1, count + 1)]


def event(kind: str, time: float = 1000.0, rank: int | None = None, step: int | None = None, **data: Any) -> Event:
    return Event(kind=kind, time=time, rank=rank, step=step, data=data)


@dataclass
class Home:
    """A folder of runs to fill."""

    path: str
    random: Random = field(default_factory=lambda: Random(0))

    def add(self, script: str = "train.py", *, created: float = 1000.0, **facts: Any) -> folder.RunFolder:
        """A new run, held by this process."""
        facts = {"command": ["shoal", "run", script], "num_workers": 2, **facts}
        return folder.create(self.path, script, facts, created, self.random)

    def add_ended(self, script: str = "train.py", *, status: str = "finished", **facts: Any) -> str:
        """The path of a run that is over."""
        with self.add(script, **facts) as run:
            run.update(status=status, ended=run.facts["created"] + 50.0, exit_code=facts.get("exit_code", 0))
            return run.path


def write_metrics(run_dir: str, steps: dict[int, list[StepMetrics]]) -> None:
    for rank, rows in steps.items():
        Path(metrics_path(run_dir, rank)).write_bytes(b"".join(encode(row) + b"\n" for row in rows))


def write_log(run_dir: str, rank: int, text: str | bytes) -> Path:
    path = Path(run_dir, "logs", f"{rank}.log")
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path
