"""Where an error happened: rank, step, and what was being computed, added on its way up."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch

from shoal.data.ledger import Place
from shoal.spec.errors import MemberLost, ShoalError, UserError
from shoal.spec.where import place_of_function
from shoal.train.loss import describe


@contextmanager
def place_errors(rank: int, step: Callable[[], int | None] = lambda: None) -> Iterator[None]:
    """Tell errors of ours that pass through where in the run they happened."""
    try:
        yield
    except ShoalError as error:
        error.at(rank=rank, step=step())
        if isinstance(error, MemberLost):
            which = "".join(f" --rank {rank}" for rank in error.ranks)
            error.hint = f"look at what it printed last: `shoal logs last{which}`"
        raise


class Running(Protocol):
    """What knows where in a run it is."""

    _is_closed: bool

    @property
    def rank(self) -> int: ...
    @property
    def place(self) -> Place: ...


T = TypeVar("T", bound=Running)
P = ParamSpec("P")
R = TypeVar("R")


def in_run(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """A method that needs an open trainer, and whose errors say where in the run they happened."""

    @wraps(method)
    def run(trainer: T, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with place_errors(trainer.rank, lambda: trainer.place.step):
            if trainer._is_closed:
                raise UserError(
                    f"The trainer is closed: {method.__name__}() cannot be used any more.",
                    why="it has given up its workers' shared memory and its run folder",
                    hint="call it before close(), inside the `with` block, or make another Trainer",
                )
            return method(trainer, *args, **kwargs)

    return run


@contextmanager
def in_user_code(rank: int, step: int | None, batch: Any, what: str, function: Any = None) -> Iterator[None]:
    """An exception of the user's own code keeps its type and traceback, and gains a note that places it.

    One of ours, about what `function` returned, is placed at that function.
    """
    try:
        yield
    except ShoalError as error:
        error.at(rank=rank, step=step, where=place_of_function(function))
        raise
    except Exception as error:
        at = f"rank {rank}" if step is None else f"rank {rank}, step {step}"
        error.add_note(f"shoal: in {what}, {at}, with a batch of {describe(batch)}")
        if isinstance(error, torch.OutOfMemoryError):
            error.add_note("shoal: set `microbatch_size=` to compute fewer samples at once")
        with suppress(AttributeError):  # a class with slots
            error.shoal_step = step  # type: ignore[attr-defined]  # for whoever tells the launcher
        raise
