"""What happens inside of steps, taken down while somebody wants to know it. Usually nobody does.

`SPANS` is the one of this process: who takes something down need not be told by whom it was asked.
"""

import threading
import time
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

MAX_SPANS = 50_000
"""So many are kept at most: 10 MB of memory, and half a second to write."""
_MAIN = threading.main_thread().ident


class Taken(NamedTuple):
    """A span as it is taken down: `began` is that of `time.perf_counter`."""

    name: str
    kind: str
    began: float
    seconds: float
    step: int
    args: dict[str, Any]


class Spans:
    """Takes down spans between `start` and `stop`, at most so many. `step` is the one that is under way.

    What happens in another thread than the main one beside the step has the name of that `thread` among its `args`.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.step = 0
        self.num_dropped = 0
        self._taken: list[Taken] = []
        self._most = MAX_SPANS

    def start(self, most: int = MAX_SPANS) -> None:
        self._taken, self.num_dropped, self._most, self.is_on = [], 0, most, True

    def add(self, name: str, kind: str, began: float, **args: Any) -> None:
        """Something is over that began then."""
        if threading.get_ident() != _MAIN:
            args["thread"] = threading.current_thread().name
        if len(self._taken) < self._most:
            self._taken.append(Taken(name, kind, began, time.perf_counter() - began, self.step, args))
        else:
            self.num_dropped += 1

    def stop(self) -> list[Taken]:
        self.is_on = False
        taken, self._taken = self._taken, []
        return taken


SPANS = Spans()


def timed(name: str, kind: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Have calls of a function taken down. While nobody wants to know, that costs a tenth of a microsecond a call."""

    def wrap(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def call(*args: P.args, **named: P.kwargs) -> T:
            if not SPANS.is_on:
                return function(*args, **named)
            began = time.perf_counter()
            try:
                return function(*args, **named)
            finally:
                SPANS.add(name, kind, began, **_sizes(args))

        return call

    return wrap


def _sizes(args: tuple[object, ...]) -> dict[str, int]:
    """How much the first tensor among the arguments holds."""
    return next(({"bytes": int(size)} for each in args if (size := getattr(each, "nbytes", None)) is not None), {})


def timed_calls(*names: str) -> Callable[[type[T]], type[T]]:
    """Have calls of these methods of a class taken down, as communication."""

    def wrap(cls: type[T]) -> type[T]:
        for name in names:
            setattr(cls, name, timed(name, "collective")(getattr(cls, name)))
        return cls

    return wrap
