"""Traces of Shockwave (NSDI '23): jobs of known epochs that change their batch size, and with it their speed."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal.place.cluster import Allocation, Node, Queued
from shoal.place.traces.gavel import Speeds, Throughputs, queued_of, read_tabbed, speeds_for
from shoal.place.traces.table import Row

KIND = "v100"
STOP_SECONDS = 20.0
SAMPLES = {"ResNet-18": 50_000, "ResNet-50": 100_000, "Transformer": 10_000, "LM": 59_675, "Recommendation": 117_907}
LARGEST = {"ResNet-18": 256, "ResNet-50": 128, "Transformer": 128, "LM": 80, "Recommendation": 8192}
DOUBLES_AT: Mapping[tuple[str, int, int], Sequence[int]] = {
    ("ResNet-18", 16, 1): (31, 41, 51, 71),
    ("ResNet-18", 32, 1): (21, 31, 51),
    ("ResNet-18", 64, 1): (11, 31),
    ("ResNet-18", 128, 1): (11,),
    ("ResNet-18", 16, 2): (21, 31, 91, 111),
    ("ResNet-18", 32, 2): (11, 21, 41),
    ("ResNet-18", 64, 2): (21, 41),
    ("ResNet-18", 128, 2): (41,),
    ("ResNet-18", 16, 4): (11, 21, 81, 91),
    ("ResNet-18", 32, 4): (21, 31, 61),
    ("ResNet-18", 64, 4): (11, 61),
    ("ResNet-18", 128, 4): (11,),
    ("ResNet-50", 64, 1): (101,),
    ("ResNet-50", 32, 2): (101, 111),
    ("ResNet-50", 64, 2): (81,),
    ("ResNet-50", 32, 4): (131, 221),
    ("ResNet-50", 64, 4): (191,),
    ("LM", 5, 1): (31, 41, 61, 71),
    ("LM", 10, 1): (11, 21, 41),
    ("LM", 20, 1): (11, 41),
    ("LM", 40, 1): (11,),
    ("LM", 5, 2): (31, 51, 61, 71),
    ("LM", 10, 2): (11, 31, 41),
    ("LM", 20, 2): (31, 41),
    ("LM", 40, 2): (11,),
    ("LM", 5, 4): (11, 31, 71, 91),
    ("LM", 10, 4): (11, 31, 61),
    ("LM", 20, 4): (11, 61),
    ("LM", 40, 4): (61,),
    ("Recommendation", 512, 1): (21, 41, 71, 91),
    ("Recommendation", 1024, 1): (21, 51, 91),
    ("Recommendation", 2048, 1): (21, 41),
    ("Recommendation", 4096, 1): (41,),
}
"""Mode gns: epochs at which the batch doubles, by model, first batch size and workers."""

OVERTIME = 1.5
"""A job that ran so many times as long as it takes alone is over, as in the original."""

_TYPE = re.compile(r"(\S+) \(batch size (\d+)\)")


def batch_at(model: str, first: int, workers: int, mode: str, epoch: int) -> int:
    """The batch size a job would have in an epoch."""
    if mode == "gns":
        doublings = sum(epoch >= at for at in DOUBLES_AT.get((model, first, workers), ()))
        return min(first * 2**doublings, LARGEST[model]) if doublings else first
    if mode == "accordion" and not is_critical(model, first, epoch):
        return LARGEST[model]
    return first


def is_critical(model: str, first: int, epoch: int) -> bool:
    """Mode accordion: whether the gradient changes so quickly in this epoch that the batch stays small."""
    if model == "LM":
        return epoch < 10
    if model == "Recommendation":
        return epoch < {512: 30, 1024: 30, 2048: 40}.get(first, 10)
    if model == "ResNet-50":
        return epoch % 30 < 10
    if model == "ResNet-18":
        return epoch < (20 if first == 256 else 10) or 150 <= epoch < 160 or 250 <= epoch < 260
    return True


def batches_alone(model: str, first: int, workers: int, mode: str, epochs: int) -> list[int]:
    """The batch size of every epoch by which fairness is measured.

    As published it differs from what jobs then do: accordion keeps the first 30 % small, and two more parts of
    Recommendation; the last epoch of gns has the batch of the one doubling at most.
    """
    sizes = [batch_at(model, first, workers, mode, epoch) for epoch in range(epochs)]
    if mode == "accordion":
        for epoch in range(epochs):
            stays = model == "Recommendation" and (60 <= epoch < 70 or 80 <= epoch < 90)
            if stays or epoch <= epochs * 0.3:
                sizes[epoch] = first
    marks = DOUBLES_AT.get((model, first, workers), ())
    if mode == "gns" and len(marks) > 1 and epochs > marks[1]:
        sizes[-1] = first
    return sizes


@dataclass(slots=True)
class EpochsWork:
    """A job of `steps` steps of `batch`, `done` of them done; both are counted anew when its batch changes.

    `alone_seconds` is how long it takes by itself. Policies that may know its length see the steps left at the speed
    of now: not what its batch will be later. The batch changes after the round behind the epoch that called for it.
    """

    queued: Queued
    table: Throughputs
    model: str
    mode: str
    first: int
    steps: int
    alone_seconds: float
    is_length_known: bool = True
    batch: int = field(init=False)
    speed: float = field(init=False)
    done: int = 0
    ran: float = 0.0
    pause: float = 0.0
    wants: int | None = None

    def __post_init__(self) -> None:
        self.batch = self.first
        self.speed = self._speed(self.first) or 0.0

    def seen(self) -> Queued:
        job = self.queued.having(rate=Speeds({KIND: self.speed}))
        return job.having(remaining_seconds=(self.steps - self.done) / self.speed) if self.is_length_known else job

    def place(self, allocation: Allocation, nodes: Mapping[str, Node]) -> None:
        # A change of place counts too; in the original only a job that did not run before pauses.
        self.pause = self.queued.stop_seconds if allocation else 0.0

    def work(self, seconds: float) -> float | None:
        steps = min(int(self.speed * seconds), self.steps - self.done)
        spent = after = steps / self.speed
        if self.pause and spent > seconds - 5.0:
            # Who would end in this round does so, as in the original: a pause would leave it a few steps for another.
            steps = int(steps * (spent - self.pause) / spent)
            spent -= self.pause
        self.pause = 0.0
        self.done += steps
        self.ran += spent
        if self.done >= self.steps or self.ran > int(self.alone_seconds * OVERTIME):
            return after
        self._rescale()
        self.wants = self._wanted()
        return None

    def _speed(self, batch: int) -> float | None:
        return self.table.steps.get((KIND, f"{self.model} (batch size {batch})", self.queued.min_workers))

    def _per_epoch(self, batch: int) -> int:
        return math.ceil(SAMPLES[self.model] / batch)

    def _wanted(self) -> int | None:
        """The batch it asks for after this round; gns doubles once at a time."""
        epoch = math.ceil(self.done / self._per_epoch(self.batch))
        ahead = (epoch, epoch + 1) if self.mode == "gns" else (epoch,)
        batch = max(batch_at(self.model, self.first, self.queued.min_workers, self.mode, at) for at in ahead)
        if self.mode == "gns":
            return 2 * self.batch if batch > self.batch else None
        return batch if batch != self.batch else None

    def _rescale(self) -> None:
        """Take the batch it asked for: the same epochs in other steps, the begun one counted as done."""
        batch, self.wants = self.wants, None
        speed = None if batch is None or self.first == LARGEST[self.model] else self._speed(batch)
        if batch is None or speed is None:
            return
        epochs = math.ceil(self.steps / self._per_epoch(self.batch))
        steps = math.ceil(self.steps * self.batch / batch)
        if math.ceil(steps / self._per_epoch(batch)) != epochs:
            steps = self._per_epoch(batch) * epochs
        self.done = math.ceil(self.done / self._per_epoch(self.batch)) * self._per_epoch(batch)
        self.steps, self.batch, self.speed = steps, batch, speed


def read_shockwave(path: Path, table: Throughputs, *, is_length_known: bool = True) -> list[EpochsWork]:
    """Jobs of a trace, on nodes of kind v100, with a pause of 20 s after each start or change."""
    return [_job(row, table, is_length_known) for row in read_tabbed(path, (12,))]


def _job(row: Row, table: Throughputs, is_length_known: bool) -> EpochsWork:
    match = _TYPE.fullmatch(row.text("type"))
    if match is None or match[1] not in SAMPLES:
        raise row.error("type", f"{row.text('type')!r} is none of {', '.join(SAMPLES)} with its batch size")
    mode = row.text("mode")
    if mode not in ("static", "accordion", "gns"):
        raise row.error("mode", f"{mode!r} is none of static, accordion, gns")
    model, first, workers = match[1], int(match[2]), row.whole("workers", least=1)
    speeds = speeds_for(row, table, match[0], workers)
    steps = row.whole("steps", least=1)
    epochs = math.ceil(steps / math.ceil(SAMPLES[model] / first))
    sizes = batches_alone(model, first, workers, mode, epochs)
    alone = sum(
        SAMPLES[model] / size / speeds_for(row, table, f"{model} (batch size {size})", workers)[KIND]
        for size in sizes
    )
    queued = queued_of(row, Speeds(speeds), STOP_SECONDS)
    return EpochsWork(queued, table, model, mode, first, steps, alone, is_length_known)
