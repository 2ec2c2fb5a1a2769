"""Wiring: `shoal.map`, from items to results, through workers that may come and go."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, overload

from shoal.engine.call import name_of, pack_call
from shoal.engine.env import is_loading_call
from shoal.engine.machine import available_cores
from shoal.run import Keep, job_of, note_end, open_folder
from shoal.spec.errors import UserError
from shoal.spec.job import Job
from shoal.spec.where import place_of
from shoal.task_crew import TaskCrew
from shoal.tasks.decision import GiveUp
from shoal.tasks.errors import ItemError, ItemsError, ending_of, from_worker, given_up
from shoal.tasks.handout import Handout
from shoal.tasks.packing import Packed, cannot_send, pack, unpack
from shoal.tasks.serve import OK, RETRY

Item = TypeVar("Item")
Result = TypeVar("Result")

PULL_SECONDS = 0.005
"""Items are pulled for so long at a time, before anybody else has a turn."""
TICK_SECONDS = 0.05


@overload
def map(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    workers: int | None = None,
    *,
    retries: int = 2,
    timeout_seconds: float | None = None,
    on_error: str = "raise",
    is_lazy: Literal[False] = False,
    env: Mapping[str, str] | None = None,
    run_dir: str | None = None,
    threads_per_worker: int | None = None,
    is_quiet: bool = False,
) -> list[Result]: ...


@overload
def map(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    workers: int | None = None,
    *,
    retries: int = 2,
    timeout_seconds: float | None = None,
    on_error: str = "raise",
    is_lazy: Literal[True],
    env: Mapping[str, str] | None = None,
    run_dir: str | None = None,
    threads_per_worker: int | None = None,
    is_quiet: bool = False,
) -> Iterator[Result]: ...


def map(
    function: Callable[[Any], Any],
    items: Iterable[Any],
    workers: int | None = None,
    *,
    retries: int = 2,
    timeout_seconds: float | None = None,
    on_error: str = "raise",
    is_lazy: bool = False,
    env: Mapping[str, str] | None = None,
    run_dir: str | None = None,
    threads_per_worker: int | None = None,
    is_quiet: bool = False,
) -> list[Any] | Iterator[Any]:
    """Call `function(item)` for every item in worker processes; returns the results in the order of the items.

    `workers` None is one a core. Items may be any iterable; it is pulled as workers need more. Whoever is free gets
    the next one. Where a worker dies in an item, is in it for longer than `timeout_seconds`, or the function raises
    `shoal.Retryable`, the item is given to another, up to `retries` times. Each result is delivered once; a function
    may be called more than once for an item whose worker was lost. An exception of the function ends the map with
    an error that has `item`, `results` (what was done, by number) and the exception as its cause; with
    `on_error="return"` that error stands in place of the result.

    `is_lazy` returns an iterator instead of a list: results as soon as all before them were delivered, and memory
    for a bounded number of them. Close it, or use it up, to end the workers. Interrupting ends them too.
    """
    order = Order(function=function, retries=retries, timeout_seconds=timeout_seconds, on_error=on_error)
    source = _check(order, items, workers)
    workers = workers or available_cores()
    job = job_of(function, workers, threads_per_worker, env)
    total = len(items) if isinstance(items, Sized) else None
    keep = Keep(dir=run_dir, command=("shoal.map", name_of(function)))
    results = _results(order, source, total, job, keep, is_lazy=is_lazy, is_quiet=is_quiet, call=_pack(function))
    return results if is_lazy else _collect(results)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What is to be done with each item."""

    function: Callable[[Any], Any]
    retries: int
    timeout_seconds: float | None
    on_error: str


def _check(order: Order, items: Iterable[Any], workers: int | None) -> Iterator[Any]:
    function: object = order.function
    if not callable(function):
        kind = type(function).__name__
        raise UserError(f"map needs a function, not a {kind}.", hint="for example: `shoal.map(work, items)`")
    _check_whole("workers", workers if workers is not None else 1, 1)
    _check_whole("retries", order.retries, 0)
    seconds = order.timeout_seconds
    if seconds is not None and not (isinstance(seconds, int | float) and seconds > 0):
        raise UserError(f"timeout_seconds is {seconds!r}.", hint="give seconds, more than 0, or None for no limit")
    if order.on_error not in ("raise", "return"):
        raise UserError(f"on_error is {order.on_error!r}.", hint="use 'raise' or 'return'")
    if is_loading_call():
        raise UserError(
            "shoal.map was called while a worker imported the module of its function.",
            why="every worker would start workers of its own, without end",
            hint='put the call under `if __name__ == "__main__":`',
        )
    try:
        return iter(items)
    except TypeError:
        raise UserError(
            f"map needs something to go through, not a {type(items).__name__}.",
            hint="give it a list, a range, a generator or the like",
        ) from None


def _check_whole(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(f"{name} is {value!r}.", hint=f"give a whole number, {least} or more")


def _pack(function: Callable[[Any], Any]) -> tuple[bytes, bytes]:
    """What workers need before the function, and the function."""
    header, _, _ = pack_call(abs, (), {}).partition(b"\n")
    try:
        packed = pack(function)
    except Exception as error:
        raise cannot_send(f"The function {name_of(function)}", error) from error
    try:
        if packed.fd < 0:
            return header, packed.data
    finally:
        packed.close()
    # Large arrays that a function carries with it go inside: they are sent once a worker, not once an item.
    import cloudpickle

    return header, bytes(cloudpickle.dumps(function))


def _collect(results: Iterator[Any]) -> list[Any]:
    done: list[Any] = []
    try:
        # Not `list(results)`, which would lose what it has when one raises.
        done.extend(results)
    except (ItemError, ItemsError) as error:
        error.results = {**dict(enumerate(done)), **error.results}
        error.hint = _hint(error.hint, len(error.results))
        raise
    return done


def _hint(hint: str, num_results: int) -> str:
    kept = f"what was done is in `error.results`, by item ({num_results} results)" if num_results else ""
    return "; ".join(filter(None, (hint, kept)))


def _results(
    order: Order,
    source: Iterator[Any],
    total: int | None,
    job: Job,
    keep: Keep,
    *,
    is_lazy: bool,
    is_quiet: bool,
    call: tuple[bytes, bytes],
) -> Iterator[Any]:
    """One map from its start to its end. Whoever stops listening ends it."""
    with open_folder(job, keep) as folder:
        try:
            with TaskCrew(job, folder, call, None if is_quiet else sys.stdout) as crew:
                yield from TaskRun(order, source, total, crew, is_lazy=is_lazy).results()
        except BaseException as error:
            note_end(folder, *ending_of(error))
            raise
        note_end(folder, *ending_of(None))


class TaskRun:
    """Items on their way: pulled, packed, with workers, done, and delivered in order."""

    def __init__(
        self, order: Order, source: Iterator[Any], total: int | None, crew: TaskCrew, *, is_lazy: bool
    ) -> None:
        self._order, self._source, self._total, self._crew, self._is_lazy = order, source, total, crew, is_lazy
        self._handout = Handout(crew.num_workers, retries=order.retries, timeout_seconds=order.timeout_seconds)
        self._packed: dict[int, Packed] = {}
        self._done: dict[int, Any] = {}
        self._num_delivered = 0
        self._mean_bytes = 0.0
        self._is_exhausted = False
        self._source_error: ItemsError | None = None

    def results(self) -> Iterator[Any]:
        """Everything that becomes of the items, in their order."""
        handout, crew = self._handout, self._crew
        try:
            while True:
                self._pull()
                for given_up_item in crew.carry_out(handout.decide(time.monotonic()), handout, self._packed):
                    self._give_up(given_up_item)
                yield from self._deliver()
                crew.progress.told(handout.num_done, self._total, handout.num_usable, handout.num_retries)
                if handout.is_over:
                    break
                self._wait()
            if self._source_error is not None:
                raise self._source_error
            crew.finish()
        except (ItemError, ItemsError) as error:
            error.results = {n: value for n, value in self._done.items() if not isinstance(value, ItemError)}
            raise
        finally:
            crew.progress.ended(handout.num_done, self._total, handout.num_usable, handout.num_retries)
            for packed in self._packed.values():
                packed.close()

    def _pull(self) -> None:
        """Take as many items as workers can use soon."""
        room, until = self._room(), time.monotonic() + PULL_SECONDS
        first = number = self._handout.num_added
        errors: dict[int, ItemError] = {}
        while number - first < room:
            try:
                item = next(self._source)
            except StopIteration:
                self._is_exhausted = True
                break
            except Exception as error:
                self._source_error = _items_error(error, number)
                self._is_exhausted = True
                break
            try:
                self._packed[number] = pack(item)
            except Exception as error:
                errors[number] = _unsendable(number, error)
            number += 1
            if time.monotonic() > until:
                break
        self._add(first, number, errors)

    def _room(self) -> int:
        """How many items are wanted now."""
        if self._is_exhausted:
            return 0
        num_kept = self._handout.num_added - self._num_delivered if self._is_lazy else self._handout.num_open
        return self._handout.room(num_kept)

    def _add(self, first: int, end: int, errors: dict[int, ItemError]) -> None:
        """Hand over new items, and what is known of them by now."""
        handout = self._handout
        if end > first:
            handout.added(end - first)
            sizes = [self._packed[number].num_bytes for number in range(first, end) if number in self._packed]
            self._mean_bytes = (self._mean_bytes + sum(sizes) / max(1, len(sizes))) / 2
            handout.limit_batch(self._mean_bytes)
        if self._is_exhausted and not handout.is_complete:
            handout.completed()
            self._total = handout.num_added
        for number, error in errors.items():
            handout.skipped(number)
            self._fail(number, error)

    def _wait(self) -> None:
        """Hear what has happened, for at most a moment."""
        handout, crew = self._handout, self._crew
        until_due = max(0.0, handout.next_due() - time.monotonic())
        patience = 0.0 if self._room() > 0 else min(TICK_SECONDS, until_due)
        for line, message, fd in crew.listen(patience, handout):
            self._hear(line.worker, line.incarnation, message, fd)

    def _hear(self, worker: int, incarnation: int, message: Any, fd: int) -> None:
        now, handout = time.monotonic(), self._handout
        match message:
            case ("ready",):
                handout.ready(worker, incarnation, now)
            case ("done", done, seconds):
                handout.worked(len(done), seconds)
                for number, kind, value in done:
                    self._take(worker, incarnation, number, kind, value, now)
            case ("large", number, data, spans):
                packed = Packed(data, spans, fd)
                self._take(worker, incarnation, number, OK, packed, now)
                packed.close()
            case ("returned", numbers):
                handout.returned(worker, incarnation, numbers, now)

    def _take(self, worker: int, incarnation: int, number: int, kind: int, value: Any, now: float) -> None:
        """A worker is done with an item. What does not count is not even unpacked."""
        if kind == RETRY:
            self._handout.retryable(worker, incarnation, number, value, now)
            return
        if not self._handout.finished(worker, incarnation, number, now):
            return
        self._packed.pop(number).close()
        if kind != OK:
            self._fail(number, from_worker(number, value, worker))
            return
        try:
            self._done[number] = unpack(value if isinstance(value, Packed) else Packed(value))
        except Exception as error:
            found = ItemError(
                f"The result for item {number} could not be read.",
                why=f"{type(error).__name__}: {error}",
                rank=worker,
            )
            found.item, found.__cause__ = number, error
            self._fail(number, found)

    def _give_up(self, decision: GiveUp) -> None:
        self._packed.pop(decision.number).close()
        self._fail(decision.number, given_up(decision))

    def _fail(self, number: int, error: ItemError) -> None:
        """Keep an error for its place in the order, unless it ends everything now."""
        self._crew.note_failure(number, error)
        self._done[number] = error
        if self._order.on_error == "raise" and not self._is_lazy:
            raise error

    def _deliver(self) -> Iterator[Any]:
        while self._num_delivered in self._done:
            value = self._done.pop(self._num_delivered)
            if isinstance(value, ItemError) and self._order.on_error == "raise":
                raise value
            self._num_delivered += 1
            yield value


def _items_error(error: Exception, number: int) -> ItemsError:
    found = ItemsError(
        f"The items ended with an error after {number} of them: {type(error).__name__}: {error}",
        where=place_of(error),
        why="it was raised where they come from, not in the function",
    )
    found.__cause__ = error
    return found


def _unsendable(number: int, error: Exception) -> ItemError:
    told = cannot_send(f"Item {number}", error)
    found = ItemError(told.message, why=told.why, hint=told.hint)
    found.item, found.__cause__ = number, error
    return found
