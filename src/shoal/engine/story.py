"""What became of a run, as people read it. Pure: failures and exits in, text out."""

from collections.abc import Iterable, Sequence

from shoal.engine.cause import Failure, failure_of
from shoal.spec.errors import WorkerError
from shoal.spec.event import Event
from shoal.spec.job import WorkerExit

MAX_LINE = 160


def as_error(failure: Failure) -> WorkerError:
    """A failure as an exception of the process that started the worker."""
    error = WorkerError(
        failure.message,
        why=failure.why,
        hint=failure.hint,
        where=failure.where,
        rank=failure.rank,
        step=failure.step,
        remote_traceback=failure.traceback,
    )
    error.exit_code = failure.exit_code
    return error


def tell_error(event: Event) -> str:
    """What a worker said to have gone wrong."""
    return as_error(failure_of(event)).render()


def tell_failures(failures: Sequence[Failure], exits: Iterable[WorkerExit], logs: str) -> str:
    """The first cause in full, every other worker in a line or less, and where to read more."""
    first, *rest = failures
    lines = [as_error(first).render()]
    same = [failure.rank for failure in rest if failure.message == first.message and failure.rank is not None]
    if same:
        lines.append(f" also: {ranks(same)} with the same error")
    lines += [f" also: {_in_a_line(failure, first)}" for failure in rest if failure.message != first.message]
    failed = {failure.rank for failure in failures}
    stopped = [end.rank for end in exits if end.rank not in failed and end.code != 0]
    if stopped:
        lines.append(f" also: {ranks(stopped)} stopped by shoal, because of this")
    lines.append(f" logs: {logs}")
    return "\n".join(lines)


def _in_a_line(failure: Failure, first: Failure) -> str:
    place = f" ({failure.where})" if failure.where else ""
    message = failure.message.partition("\n")[0]
    text = f"rank {failure.rank}{place}, {_when(failure.time - first.time)}: {message}"
    return text if len(text) <= MAX_LINE else text[: MAX_LINE - 1] + "…"


def _when(seconds: float) -> str:
    if abs(seconds) < 0.05:
        return "at the same time"
    return f"{abs(seconds):.1f} s {'later' if seconds > 0 else 'earlier'}"


def ranks(numbers: Iterable[int]) -> str:
    """`rank 1`, or `ranks 0-2, 5`."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    shown = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"ranks {shown}" if len(spans) > 1 or spans[0][0] != spans[0][1] else f"rank {shown}"
