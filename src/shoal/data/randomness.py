"""Random numbers of data code: the same for a sample whoever reads it, and never mixed with those of training.

Augmentation draws from the generators of the process (`random`, `numpy.random`, `torch`), which the training thread
uses too. So such code runs in a process of its own, or between two steps with the generators put back afterwards;
and it is seeded with (seed, epoch, sample), never with the worker.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from shoal.data.shuffle import mix


def seed_generators(*words: int) -> None:
    """Set the three generators of this process to a state made of these integers only. About 20 microseconds."""
    number = mix(*words)
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)
    torch.default_generator.manual_seed(number)


def read_generators() -> tuple[Any, Any, torch.Tensor]:
    return random.getstate(), np.random.get_state(), torch.default_generator.get_state()


def write_generators(states: tuple[Any, Any, torch.Tensor]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.default_generator.set_state(states[2])


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Put the generators back to where they were, whatever is drawn inside. About 60 microseconds."""
    states = read_generators()
    try:
        yield
    finally:
        write_generators(states)


def drew_from_generators(read: Callable[[], Any]) -> bool:
    """Whether `read` draws from a generator of the process, which is left as it was."""
    with preserved_generators():
        seed_generators(0)
        before = read_generators()
        read()
        after = read_generators()
    same_numpy = before[1][2:] == after[1][2:] and np.array_equal(before[1][1], after[1][1])
    return not (before[0] == after[0] and same_numpy and torch.equal(before[2], after[2]))
