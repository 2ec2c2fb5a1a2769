"""Where an error happened: rank, step, and what was being computed, added on its way up."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shoal.spec.errors import ShoalError
from shoal.train.loss import describe


@contextmanager
def place_errors(rank: int, step: Callable[[], int | None] = lambda: None) -> Iterator[None]:
    """Tell errors of ours that pass through where in the run they happened."""
    try:
        yield
    except ShoalError as error:
        error.at(rank=rank, step=step())
        raise


@contextmanager
def in_user_code(rank: int, step: int | None, batch: Any, what: str) -> Iterator[None]:
    """An exception of the user's own code keeps its type and traceback, and gains a note that places it."""
    try:
        yield
    except ShoalError:
        raise
    except Exception as error:
        at = f"rank {rank}" if step is None else f"rank {rank}, step {step}"
        error.add_note(f"shoal: in {what}, {at}, with a batch of {describe(batch)}")
        if isinstance(error, torch.OutOfMemoryError):
            error.add_note("shoal: set `microbatch_size=` to compute fewer samples at once")
        raise
