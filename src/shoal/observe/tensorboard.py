"""Metrics of a run as TensorBoard event files, written while it goes on."""

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

from shoal.observe.metrics import MetricsReader
from shoal.observe.turns import step_seconds
from shoal.spec.errors import UserError
from shoal.spec.event import StepMetrics

POLL_SECONDS = 2.0
AWAY_SECONDS = 5.0
"""A worker whose newest step is so much older than that of others is not there any more, or not yet again."""
_PARTS = ("compute", "communicate", "wait", "load", "other")


class TensorBoardExport:
    """Follows the metrics of a run and writes them to its `tensorboard/` folder.

    A step is written once all ranks that are there have reached it, with shares of time as the mean over them.
    `start` follows in a thread of its own, every two seconds; `close` writes the rest. Reads only files, so anybody
    who sees the run folder can do it, during the run or after. Raises UserError where TensorBoard is not installed.
    """

    def __init__(self, run_dir: str) -> None:
        self._writer = _open_writer(os.path.join(run_dir, "tensorboard"))
        self._reader = MetricsReader(run_dir)
        self._waiting: dict[int, deque[StepMetrics]] = {}
        self._newest: dict[int, float] = {}
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> Self:
        """Follow the run in the background until `close`."""
        self._thread = threading.Thread(target=self._run, name="shoal-tensorboard", daemon=True)
        self._thread.start()
        return self

    def poll(self) -> int:
        """Write what is new and complete; returns the number of steps."""
        for rank, steps in self._reader.read_new().items():
            self._waiting.setdefault(rank, deque()).extend(steps)
            self._newest[rank] = steps[-1].time
        count = 0
        present = self._present()
        while present and all(self._waiting[rank] for rank in present):
            count += self._write_next()
        return count

    def _present(self) -> list[int]:
        newest = max(self._newest.values(), default=0.0)
        return [rank for rank, moment in self._newest.items() if moment > newest - AWAY_SECONDS]

    def close(self) -> None:
        """Write everything there is and close the files. Safe to call twice."""
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        if self._thread:
            self._thread.join()
        self.poll()
        while any(self._waiting.values()):
            self._write_next()
        self._writer.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._is_closed.wait(POLL_SECONDS):
            self.poll()
            self._writer.flush()

    def _write_next(self) -> int:
        """Take the lowest step that waits, of every rank that has it, and write it."""
        number = min(queue[0].step for queue in self._waiting.values() if queue)
        steps = [queue.popleft() for queue in self._waiting.values() if queue and queue[0].step == number]
        self._writer.add_event(_event(steps[0], scalars(steps)))
        return 1


def scalars(steps: Sequence[StepMetrics]) -> Iterator[tuple[str, float]]:
    """Tags and values of one step, from the ranks that recorded it; what is global comes from the first of them."""
    first = steps[0]
    seconds = step_seconds(first)
    yield "train/loss", first.loss
    yield "train/lr", first.lr
    yield "train/epoch", first.epoch
    if first.grad_norm is not None:
        yield "train/grad_norm", first.grad_norm
    if seconds > 0:
        yield "speed/samples_per_second", first.global_samples / seconds
        yield "speed/step_seconds", seconds
    total = sum(map(step_seconds, steps))
    if total > 0:
        for part in _PARTS:
            yield f"time/{part}", sum(float(getattr(step, part)) for step in steps) / total


def export(run_dir: str) -> None:
    """Write the event files of a run that has ended."""
    TensorBoardExport(run_dir).close()


def check_installed() -> None:
    """Raise UserError where TensorBoard is missing; costs a look at the disk, no import."""
    from importlib.util import find_spec

    if find_spec("tensorboard") is None:
        raise _missing("no module named 'tensorboard'")


def _missing(why: str) -> UserError:
    hint = "run `pip install 'shoal[tensorboard]'`, or leave out `--tensorboard`"
    return UserError("TensorBoard is not installed.", why=why, hint=hint)


def _open_writer(folder: str) -> Any:
    try:
        # The package's own writer: it needs neither torch nor TensorFlow.
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError as error:
        raise _missing(str(error)) from error
    try:
        return EventFileWriter(folder)
    except OSError as error:
        raise UserError(
            f"Cannot write TensorBoard files to {folder}.", why=error.strerror or str(error), hint="check the folder"
        ) from error


def _event(step: StepMetrics, values: Iterable[tuple[str, float]]) -> Any:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values])
    return Event(wall_time=step.time, step=step.step, summary=summary)
