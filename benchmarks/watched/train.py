"""A Trainer whose steps are 20 ms of sleep and a small model: `-m benchmarks.watched.train FOLDER WARM TURNS STEPS`.

After so many steps of warming up, so many turns of so many steps: with everything that is kept of a run, and with
nothing, as `plan` says. Nothing means that neither the trainer nor the script writes down or tells anything, and that
the launcher and its exporters are stopped. Who came when is found out in both: that is part of how workers meet. Each
rank leaves the time of each step; rank 0 also what processors did in each turn for all of the run's processes.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shoal
from benchmarks.harness import keep_priority
from shoal.observe.recorder import Recorder
from shoal.train import own_numbers

STEP_SECONDS = 0.02
WAYS = ("on", "off", "off", "on")


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    time.sleep(STEP_SECONDS)
    return nn.functional.mse_loss(model(batch[0]), batch[1])


class Switch:
    """Everything on, or off."""

    def __init__(self) -> None:
        self.is_on = True
        self._helpers = [os.getppid(), *_exporters(os.getppid())] if os.environ["RANK"] == "0" else []
        self._recorders: list[Recorder] = []
        for name in ("step", "event"):
            setattr(Recorder, name, self._unless_off(getattr(Recorder, name)))

    def _unless_off(self, act: Any) -> Any:
        def do(recorder: Recorder, *args: Any, **named: Any) -> None:
            if recorder not in self._recorders:
                self._recorders.append(recorder)
            if self.is_on:
                act(recorder, *args, **named)

        return do

    def turn(self, way: str) -> None:
        """From now on; what was written so far is not left to the turn that comes."""
        self.is_on = way == "on"
        for recorder in self._recorders:
            recorder.flush()
        own_numbers._book().flush()
        self._signal(signal.SIGCONT if self.is_on else signal.SIGSTOP)

    @contextmanager
    def ending_on(self) -> Iterator[None]:
        """Leave no process stopped, whatever happens."""
        try:
            yield
        finally:
            self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for pid in self._helpers:
            os.kill(pid, number)

    def processor_seconds(self) -> float:
        """What the run's processes have used so far, of rank 0; the others tell of themselves alone."""
        return time.process_time() + sum(map(_used, self._helpers))


def _exporters(launcher: int) -> list[int]:
    """The processes beside the launcher that take numbers to other tools."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (folder / "cmdline").read_bytes()
        except OSError:  # it has ended
            continue
        if int(words[1]) == launcher and b"shoal.observe.send" in command:
            found.append(int(folder.name))
    return found


def _used(pid: int) -> float:
    """All threads of a process."""
    each = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(path.read_text().split()[0]) for path in each) / 1e9


def main() -> None:
    folder, (num_warm, num_turns, num_steps) = Path(sys.argv[1]), map(int, sys.argv[2:])
    keep_priority()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
    data = torch.randn(4096, 32), torch.randn(4096, 8)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    trainer = shoal.Trainer(model, loss, optimizer, data, batch_size=128, shards=4, balance=False, threads=1)
    switch = Switch()
    batches = endless(trainer)

    def step() -> float:
        value = trainer.step(next(batches))
        if switch.is_on:
            shoal.log({f"own/{number}": value for number in range(10)})
        return time.perf_counter()

    turns = []
    with switch.ending_on():
        for _ in range(num_warm):
            step()
        for number in range(num_turns):
            way = WAYS[number % len(WAYS)]
            switch.turn(way)
            ended, used, seconds = step(), switch.processor_seconds(), []  # the first one bears the switching
            for _ in range(num_steps):
                began, ended = ended, step()
                seconds.append(ended - began)
            used = (switch.processor_seconds() - used) / num_steps
            turns.append({"way": way, "seconds": seconds, "processor": used})
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(turns))


def endless(trainer: shoal.Trainer) -> Iterator[Any]:
    while True:
        yield from trainer


main()
