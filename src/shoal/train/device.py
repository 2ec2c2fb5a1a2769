"""What a worker computes with: its device, its precision, its threads. Each has its own, whatever the others have."""

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch
from torch import nn

from shoal.engine.env import WorkerFacts
from shoal.engine.machine import available_cores
from shoal.spec.errors import UserError
from shoal.train.settings import Precision, Settings

SIZE = 256
"""Rows and columns of the matrices that are multiplied to see which precision is faster: about a millisecond."""

FASTER = 0.8
"""Less than this part of the time counts as faster: bf16 costs accuracy."""


def choose_device(asked: str, local_rank: int, num_gpus: int) -> torch.device:
    """A worker's device: "auto" is the GPU with its number on this machine, or the CPU where there are fewer."""
    if asked == "auto":
        return torch.device("cuda", local_rank) if local_rank < num_gpus else torch.device("cpu")
    device = torch.device("cuda", local_rank) if asked == "cuda" else torch.device(asked)
    if device.type == "cuda" and (device.index or 0) >= num_gpus:
        raise UserError(
            f"device={asked!r} is not there: this worker would use {device}, and its machine has {num_gpus} GPU(s).",
            why="worker number n of a machine uses its GPU number n, or the one that was named",
            hint='use device="auto": workers without a GPU of their own compute on the CPU',
        )
    return device


def count_gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def place_model(
    model: nn.Module, optimizer: torch.optim.Optimizer, asked: str | None, facts: WorkerFacts
) -> torch.device:
    """Move the model, and what the optimizer keeps of it, to the device that was asked for; None: where it is."""
    if asked is not None:
        device = choose_device(asked, facts.local_rank, count_gpus())
        model.to(device)
        for state in optimizer.state.values():
            # Counters stay where the optimizer put them.
            state.update({k: v.to(device) for k, v in state.items() if isinstance(v, torch.Tensor) and v.dim()})
    device = next(model.parameters()).device
    if device.type == "cuda":
        _check_own(device, facts, count_gpus())
        torch.cuda.set_device(device)
    return device


def _check_own(device: torch.device, facts: WorkerFacts, num_gpus: int) -> None:
    """Where each worker has a GPU of its own, it must use that one."""
    if facts.local_world_size > 1 and facts.local_rank < num_gpus and device.index != facts.local_rank:
        raise UserError(
            f"The model is on {device}, but this worker's GPU is cuda:{facts.local_rank}.",
            why="all workers of this machine would share one GPU",
            hint='pass device="cuda" to Trainer, which moves the model to the worker\'s own GPU',
        )


def choose_precision(asked: Precision, is_faster: Callable[[], bool]) -> Precision:
    """ "auto" is bf16 where the device is faster with it, which is only then found out."""
    if asked != "auto":
        return asked
    return "bf16" if is_faster() else "float32"


def is_bf16_faster(device: torch.device) -> bool:
    """GPUs from the Ampere generation on have units for it; what a CPU makes of it is measured, some milliseconds."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return multiply_seconds(torch.bfloat16) < FASTER * multiply_seconds(torch.float32)


def multiply_seconds(dtype: torch.dtype) -> float:
    """How long the CPU takes to multiply two matrices: the median of a few, after one to warm up."""
    matrix = torch.ones(SIZE, SIZE, dtype=dtype)
    seconds = []
    for _ in range(6):
        started = time.perf_counter()
        torch.mm(matrix, matrix)
        seconds.append(time.perf_counter() - started)
    return median(seconds[1:])


def set_threads(settings: Settings, facts: WorkerFacts) -> None:
    """In exact mode the number of threads is part of the result: kernels split their own sums by it.

    "auto" is what this machine has for each of its workers.
    """
    threads = settings.threads or (1 if settings.exact else None)
    if threads == "auto":
        threads = max(1, available_cores() // facts.local_world_size)
    if threads is not None:
        torch.set_num_threads(threads)


def await_computed(device: torch.device) -> None:
    """Return when a GPU has done what it was given so far; a CPU always has. Only then it is known how long it took.

    What travels in the meantime goes on.
    """
    if device.type == "cuda":
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(device))
        done.synchronize()


def equip(
    settings: Settings, model: nn.Module, optimizer: torch.optim.Optimizer, facts: WorkerFacts
) -> tuple[Settings, torch.device]:
    """Get ready to compute here; returns the settings with what was left to this worker, and its device."""
    set_threads(settings, facts)
    device = place_model(model, optimizer, settings.device, facts)
    precision = choose_precision(settings.precision, lambda: is_bf16_faster(device))
    return replace(settings, precision=precision), device
