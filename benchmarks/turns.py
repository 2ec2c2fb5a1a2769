"""Contenders that take turns inside the same worker processes: what they are, and how they are timed."""

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shoal
from benchmarks.workloads import Workload
from shoal.comm.connect import connect
from shoal.comm.group import Group
from shoal.train.steps import Batch

Step = Callable[[], object]
MakeOptimizer = Callable[..., torch.optim.Optimizer]
NUM_BATCHES = 4


def launch(function: Callable[..., Any], num_workers: int, *args: Any, threads: int = 1) -> list[Any]:
    """Call a function in new workers; what each returned. Their run folder is thrown away."""
    with tempfile.TemporaryDirectory() as home, mock.patch.dict(os.environ, SHOAL_HOME=home):
        return shoal.launch(function, num_workers, args, threads_per_worker=threads, is_quiet=True)


def plain_step(workload: Workload, model: nn.Module, optimizer: torch.optim.Optimizer, num_samples: int) -> Step:
    """The step everyone writes: the same few batches again and again, cut beforehand and at no cost."""
    data = workload.data(num_samples * NUM_BATCHES)
    batches = list(zip(*(part.split(num_samples) for part in data), strict=True))
    count = 0

    def step() -> None:
        nonlocal count
        optimizer.zero_grad()
        workload.loss(model, batches[count % NUM_BATCHES]).backward()
        optimizer.step()
        count += 1

    return step


def without_communication(workload: Workload, make_optimizer: MakeOptimizer, **options: Any) -> Step:
    model = workload.make()
    return plain_step(workload, model, make_optimizer(model.parameters(), **options), workload.samples)


def meeting_only(step: Step, group: Group) -> Step:
    """Copies that wait for each other after every step and exchange nothing: the limit of anything synchronous."""

    def step_and_meet() -> None:
        step()
        group.barrier()

    return step_and_meet


def with_ddp(workload: Workload, make_optimizer: MakeOptimizer, ddp: Mapping[str, Any], **options: Any) -> Step:
    model = DistributedDataParallel(workload.make(), **ddp)
    return plain_step(workload, model, make_optimizer(model.parameters(), **options), workload.samples)


class Ours:
    """A Trainer that can be asked for one step at a time, loading of data included."""

    def __init__(self, workload: Workload, make_optimizer: MakeOptimizer, num_samples: int, **settings: Any) -> None:
        model, data = workload.make(), workload.data(num_samples * NUM_BATCHES)
        self.trainer = shoal.Trainer(
            model, workload.loss, make_optimizer(model.parameters()), data, batch_size=num_samples, **settings
        )
        self._batches = self._endless()

    def _endless(self) -> Iterator[Batch]:
        while True:
            yield from self.trainer

    def __call__(self) -> float:
        return self.trainer.step(next(self._batches))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._batches.close()
        self.trainer.close()


@contextlib.contextmanager
def process_group() -> Iterator[int]:
    """gloo among the workers; gives this one's rank."""
    dist.init_process_group("gloo")
    try:
        yield dist.get_rank()
    finally:
        dist.barrier()
        dist.destroy_process_group()


def meet_in_memory() -> Group:
    """A group of ours among the workers of the process group."""
    store = dist.PrefixStore("meeting", dist.distributed_c10d._get_default_store())
    return connect(dist.get_rank(), dist.get_world_size(), store)


def take_turns(
    contenders: Mapping[str, Step | None], steps: int, rounds: int, *, warm_rounds: int = 1
) -> dict[str, list[float]]:
    """Seconds a step, of `steps` steps in a row, for each contender and round. Needs a process group.

    All workers begin a turn together. None is a turn in which this worker sleeps. Before each turn comes a step that
    does not count, and before the first round whole rounds; each round begins with another contender.
    """
    names = list(contenders)
    samples: dict[str, list[float]] = {name: [] for name, step in contenders.items() if step}
    for number in range(-warm_rounds, rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            step = contenders[name]
            seconds = _time(step, steps) if step else _sleep()
            if step and number >= 0:
                samples[name].append(seconds)
    return samples


def _time(step: Step, steps: int) -> float:
    step()
    dist.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    seconds = (time.perf_counter() - began) / steps
    dist.barrier()
    return seconds


def _sleep() -> float:
    dist.barrier()
    dist.barrier()
    return 0.0


def mean_over_workers(results: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Per round the mean of the workers that took part: without communication, each has its own speed."""
    merged: dict[str, list[float]] = {}
    for name in results[0]:
        parts = [result[name] for result in results if name in result]
        merged[name] = [sum(seconds) / len(seconds) for seconds in zip(*parts, strict=True)]
    return merged
