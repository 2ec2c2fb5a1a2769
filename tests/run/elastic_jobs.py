"""Jobs for runs under fire: `python elastic_jobs.py NAME ...`. Each says in the end what came out of it.

A clean run of all of them in one process takes a few seconds. Under fire a job slows down while a fault that is due
has not struck, because the worker it is meant for is being replaced: so all strike, on any machine, in few steps.
"""

import functools
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import shoal
from shoal.train import team
from shoal.train.sync import sharded_host, sharded_ring
from shoal.train.sync.shared import SharedMemorySync

NUM_SAMPLES, BATCH, WIDTH = 256, 32, 16
RUN_DIR = os.environ.get("SHOAL_RUN_DIR", "")
FAULTS = json.loads(os.environ.get("SHOAL_FAULTS", "[]"))
WANTED = int(os.environ.get("ELASTIC_WANTED", "0"))
"""Steps are slow while there are fewer workers than this."""
PAUSE = float(os.environ.get("ELASTIC_PAUSE", "0"))
"""Seconds that every step lasts at least, for runs that something is done to from outside."""
HURRY = os.environ.get("ELASTIC_HURRY", "")
"""Where this file is, steps last no longer than they must."""
BUCKET = int(os.environ.get("ELASTIC_BUCKET", "0"))
"""Elements of a bucket of gradients, where they pass through a ring: with small ones workers wait in backward."""


class Pace:
    """Once a step: wait for those who are to be struck, longer and longer."""

    def __init__(self) -> None:
        self.trainer: shoal.Trainer | None = None
        self._last = -1
        self._num_short = 0
        self._due = {number: fault["step"] for number, fault in enumerate(FAULTS) if "step" in fault}

    def keep(self) -> None:
        step = self.trainer.place.step if self.trainer else self._last
        if step == self._last:
            return
        self._last = step
        self._due = {n: at for n, at in self._due.items() if not Path(RUN_DIR, "faults", str(n)).exists()}
        is_short = self.trainer is not None and self.trainer.world_size < WANTED
        self._num_short = self._num_short + 1 if is_short else 0
        late = max([self._num_short, *(step - at for at in self._due.values())])
        pause = 0.0 if HURRY and Path(HURRY).exists() else PAUSE
        time.sleep(max(pause, min(0.5, 0.01 * 1.25**late) if late > 0 else 0.0))


PACE = Pace()


def data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_SAMPLES, WIDTH, generator=source)
    return x, torch.randint(0, 10, (NUM_SAMPLES,), generator=source), torch.arange(NUM_SAMPLES)


class Counting(nn.Module):
    """A network, and a parameter that counts how often each sample was trained on.

    The loss has the mean of the counts of a batch's samples in it, so the gradient of each is 1 / BATCH, and SGD with
    a learning rate of BATCH takes exactly 1 off: counts are minus the number of times, in the model itself.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.counts = nn.Parameter(torch.zeros(NUM_SAMPLES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def groups(self, **options: Any) -> list[dict[str, Any]]:
        return [{"params": self.net.parameters(), **options}, {"params": [self.counts], "lr": float(BATCH)}]

    def times(self) -> list[int]:
        return sorted({round(-value) for value in self.counts.tolist()})


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    PACE.keep()
    x, y, ids = batch
    error = F.cross_entropy(model(x), y)
    return error + model.counts[ids].mean() if isinstance(model, Counting) else error


def error(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def make_net(*, is_plain: bool = False, hidden: int = 64) -> nn.Module:
    torch.manual_seed(0)
    more = [] if is_plain else [nn.BatchNorm1d(hidden), nn.Dropout(0.2)]
    return nn.Sequential(nn.Linear(WIDTH, hidden), nn.ReLU(), *more, nn.Linear(hidden, hidden), nn.Linear(hidden, 10))


def make_trainer(model: nn.Module, optimizer: torch.optim.Optimizer, dataset: Any, **settings: Any) -> shoal.Trainer:
    settings = {"batch_size": BATCH, "exact": True, "balance": False, "shards": 4, **settings}
    PACE.trainer = shoal.Trainer(model, settings.pop("loss", loss), optimizer, dataset, **settings)
    return PACE.trainer


def say(name: str, trainer: shoal.Trainer, **more: Any) -> None:
    times = trainer.model.times() if isinstance(trainer.model, Counting) else None
    told = {"job": name, "step": trainer.place.step, "digest": trainer.digest(), "times": times, **more}
    told["norms"] = [float(value.double().norm()) for value in trainer.model.state_dict().values()]
    print("ended", json.dumps(told, sort_keys=True), flush=True)


def sgd(name: str) -> None:
    """Momentum, a scheduler, BatchNorm, dropout, micro-batches, checkpoints."""
    model = Counting(make_net())
    optimizer = torch.optim.SGD(model.groups(momentum=0.9, weight_decay=1e-4), lr=0.01)
    with make_trainer(
        model,
        optimizer,
        data(),
        scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.97**step, lambda step: 1.0]),
        microbatch_size=4,
        shards=8,
        checkpoint_every=10,
    ) as trainer:
        trainer.fit(epochs=7)
        say(name, trainer)


def adamw(name: str) -> None:
    """Clipping, a moving average, a scheduler, and enough parameters for several batches of an update."""
    model = make_net(is_plain=True, hidden=900)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with make_trainer(
        model,
        optimizer,
        data(),
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 56),
        max_norm=0.5,
        ema=0.9,
        checkpoint_every=10,
    ) as trainer:
        trainer.fit(epochs=7)
        say(name, trainer)


def loop(name: str) -> None:
    """The user's own loop, with something to do after every step that all take part in, whoever comes meanwhile.

    The optimizer looks at whole tensors and so cannot be divided.
    """
    model = make_net()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.02)
    held_out = data()[:2]

    def measure(model: nn.Module, batch: Any) -> torch.Tensor:
        if PACE.trainer is not None and PACE.trainer.place.step == 40:
            die_once("measuring", 1)
        return error(model, batch)

    with make_trainer(model, optimizer, data(), ema=0.9) as trainer:
        for _ in range(9):
            for batch in trainer:
                trainer.step(batch)
                trainer.evaluate(held_out, measure)
        say(name, trainer)


class Map(torch.utils.data.Dataset[Any]):
    """A dataset of samples that are asked for one by one."""

    def __init__(self) -> None:
        self._data = data()

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        return tuple(part[index] for part in self._data)


class Stream(torch.utils.data.IterableDataset[Any]):
    """The same, in its own order."""

    def __iter__(self) -> Iterator[Any]:
        return iter(zip(*data(), strict=True))


def die_once(name: str, worker: int) -> None:
    """End this process as `kill -9` does, if it is the first of that worker."""
    if os.environ.get("RANK") == str(worker) and RUN_DIR and WANTED:
        try:
            Path(RUN_DIR, f"died-{name}").touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()


def let_die_while_joining() -> None:
    """Have workers die between two Worlds: the one that hands its state over, and the newcomer that takes it."""
    share = team.share_facts

    def share_or_die(group: Any, facts: Any, source: int) -> Any:
        if group.size > 1:
            die_once("handing over", 0)
            if os.environ.get("SHOAL_INCARNATION") != "0":
                die_once("joining", 1)
        return share(group, facts, source)

    make = SharedMemorySync._make_slots

    def make_or_die(sync: SharedMemorySync, num_shards: int) -> None:
        if sync._group.size > 1 and os.environ.get("SHOAL_INCARNATION") != "0":
            die_once("making room", 2)
        make(sync, num_shards)

    if WANTED:
        team.share_facts = share_or_die
        SharedMemorySync._make_slots = make_or_die


def calls(name: str) -> None:
    """Every call of a script, with data from processes; workers die inside evaluate and predict."""
    model = Counting(make_net())
    optimizer = torch.optim.SGD(model.groups(momentum=0.9), lr=0.01)
    held_out = data()[:2]

    def measure(model: nn.Module, batch: Any) -> torch.Tensor:
        die_once("evaluate", 1)
        return error(model, batch)

    def answer(model: nn.Module, batch: Any) -> torch.Tensor:
        die_once("predict", 2)
        return model(batch[0])

    def again(model: nn.Module, batch: Any) -> torch.Tensor:
        die_once("again", 0)
        return error(model, batch)

    with make_trainer(model, optimizer, Map(), loaders=1) as trainer:
        trainer.fit(epochs=2)
        first = trainer.evaluate(held_out, measure)
        trainer.fit(epochs=5)
        rows = trainer.predict(held_out, answer)
        second = trainer.evaluate(held_out, again)
        for batch in trainer:
            trainer.step(batch)
        trainer.save(wait=True)
        say(name, trainer, first=first, second=second, rows=float(rows.double().sum()))


def left(name: str) -> None:
    """A loop that is left early, then what a worker that comes later must make by itself."""
    model = make_net()
    held_out = data()[:2]
    with make_trainer(model, torch.optim.AdamW(model.parameters(), 1e-3), data(), ema=0.9) as trainer:
        for batch in trainer:
            trainer.step(batch)
            if trainer.place.step == 5:
                break
        own = trainer.predict(held_out)
        with trainer.averaged():
            averaged = trainer.predict(held_out)
            measured = trainer.evaluate(held_out, error)
        trainer.fit(steps=30)
        say(name, trainer, sums=[float(rows.double().sum()) for rows in (own, averaged)], measured=measured)


def stream(name: str) -> None:
    """A dataset without an order that could be asked for; workers die while others join."""
    let_die_while_joining()
    model = Counting(make_net(is_plain=True))
    optimizer = torch.optim.SGD(model.groups(), lr=0.01)
    with make_trainer(model, optimizer, Stream(), checkpoint_every=10) as trainer:
        trainer.fit(epochs=8)
        say(name, trainer)


def long(name: str, epochs: int = 20) -> None:
    """Many quick steps."""
    model = Counting(make_net())
    optimizer = torch.optim.SGD(model.groups(momentum=0.9), lr=0.01)
    with make_trainer(model, optimizer, data(), checkpoint_every=5) as trainer:
        trainer.fit(epochs=epochs)
        say(name, trainer)


def two(name: str) -> None:
    """Two trainers, one after the other."""
    digests = []
    for epochs in (2, 6):
        model = Counting(make_net(is_plain=True))
        with make_trainer(model, torch.optim.SGD(model.groups(momentum=0.9), lr=0.01), data()) as trainer:
            trainer.fit(epochs=epochs)
            digests.append(trainer.digest())
            if epochs == 6:
                say(name, trainer, digests=digests)


def plain(name: str) -> None:
    """An optimizer that keeps nothing, a moving average, and a script that spoils the model when it has to go."""
    model = make_net(is_plain=True)
    with make_trainer(model, torch.optim.SGD(model.parameters(), 0.05), data(), ema=0.9) as trainer:
        try:
            trainer.fit(epochs=4)
        except SystemExit:
            deadline = time.monotonic() + 1.0  # the others take steps meanwhile
            while time.monotonic() < deadline:
                for parameter in model.parameters():
                    parameter.data.zero_()
            raise
        with trainer.averaged():
            average = trainer.digest()
        say(name, trainer, average=average)


def memory(name: str) -> None:
    """Where parameters are, and how much shared memory is mapped, from a worker's second step to its last.

    Nothing waits for the garbage collector.
    """
    gc.disable()
    model = make_net(is_plain=True)
    seen = []
    with make_trainer(model, torch.optim.AdamW(model.parameters(), 1e-3), data(), ema=0.9) as trainer:
        for _ in range(6):
            for batch in trainer:
                trainer.step(batch)
                maps = Path("/proc/self/maps").read_text().count("/memfd:shoal")
                seen.append((next(model.parameters()).data_ptr(), maps))
        nothing = (0, 0)  # seen by who came back after the last step
        second, last = (seen[min(1, len(seen) - 1)], seen[-1]) if seen else (nothing, nothing)
        say(name, trainer, has_moved=second[0] != last[0], has_grown=second[1] < last[1])
    gc.enable()


JOBS: dict[str, Callable[[str], None]] = {
    "sgd": sgd,
    "adamw": adamw,
    "loop": loop,
    "calls": calls,
    "left": left,
    "stream": stream,
    "two": two,
    "plain": plain,
    "memory": memory,
    "short": functools.partial(long, epochs=8),
    "long": long,
}

if __name__ == "__main__":
    if BUCKET:
        sharded_host.BUCKET_ELEMENTS = sharded_ring.BUCKET_ELEMENTS = BUCKET
    for job in sys.argv[1:] or JOBS:
        JOBS[job](job)
