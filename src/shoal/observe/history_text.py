"""The history of an elastic run as text. Pure."""

from collections.abc import Iterator, Sequence

from shoal.observe.breakdown import median
from shoal.observe.clean import one_line
from shoal.observe.finding import ms, percent
from shoal.observe.fold import name_ranks
from shoal.observe.history import History, Spent
from shoal.observe.losses import Join, Loss, worker_of
from shoal.observe.status import count, duration
from shoal.observe.timeline import Era

MAX_ROWS = 10
_HEIGHTS = "▁▂▃▄▅▆▇█"
_REBUILT = {
    "copy": "from another copy",
    "mirror": "from its mirror",
    "checkpoint": "from the checkpoint",
    "start": "from the start",
}


def write_history(history: History, start: float, end: float, width: int, *, is_ascii: bool) -> Iterator[str]:
    """The lines of the section, not indented. `start` and `end` are those of the run; times are since `start`."""
    sizes = [len(era.members) for era in history.eras]
    fewest, most = min(sizes), max(sizes)
    workers = _number(most, "worker") if fewest == most else f"{fewest} to {most} workers"
    changes = f"{_number(len(history.losses), 'loss', 'losses')}, {_number(len(history.joins), 'join')}"
    yield f"{workers}, {history.mean_workers:.1f} on average; {changes}"
    if len(history.eras) > 1:
        yield ""
        yield from _strip(history.eras, start, end, width, is_ascii)
    yield ""
    yield from _some([_era(era, start) for era in history.eras], "Worlds")
    if history.losses:
        yield ""
        yield f"{'lost':>8}  {'rank':<5}{'next step':>10}{'back after':>11}{'slower by':>10}  why"
        yield from _some([_loss(loss, start) for loss in history.losses], "losses")
    if history.joins:
        yield ""
        yield f"{'joined':>8}  {'rank':<5}{'started in':>11}{'held up all':>12}"
        yield from _some([_join(join, start) for join in history.joins], "joins")
    yield ""
    yield from _sums(history)


def _strip(eras: Sequence[Era], start: float, end: float, width: int, is_ascii: bool) -> Iterator[str]:
    """How many workers there were over time, a character for each moment."""
    columns = max(10, min(width - 12, 60))
    most = max(len(era.members) for era in eras)
    marks, index = "", 0
    for column in range(columns):
        moment = start + (column + 0.5) / columns * (end - start)
        while index + 1 < len(eras) and eras[index + 1].time <= moment:
            index += 1
        size = len(eras[index].members) if eras[index].time <= moment else 0
        marks += _mark(size, most, is_ascii)
    yield f"workers  {marks}"
    yield f"         0:00{duration(end - start):>{columns - 4}}"


def _mark(size: int, most: int, is_ascii: bool) -> str:
    if not size:
        return " "
    if is_ascii:
        return str(size) if size < 10 else "+"
    return _HEIGHTS[max(0, round(size / most * len(_HEIGHTS)) - 1)]


def _era(era: Era, start: float) -> str:
    ranks = name_ranks(worker_of(member) for member in era.members)
    who = f"{len(era.members)} worker{'s' * (len(era.members) != 1)} ({ranks})"
    steps = _number(era.num_steps, "step")
    return f"{_since(era.time, start)}  World {era.generation:<4} {who:<18} {steps:>10}  {one_line(era.reason)}"


def _loss(loss: Loss, start: float) -> str:
    why = one_line(loss.reason).removeprefix(f"rank {loss.worker} was ")
    return (
        f"{_since(loss.time, start)}  {loss.worker:<5}{_seconds(loss.recovery_seconds):>10}"
        f"{_seconds(loss.away_seconds):>11}{_seconds(loss.slower_seconds):>10}  {why}"
    )


def _join(join: Join, start: float) -> str:
    return (
        f"{_since(join.time, start)}  {join.worker:<5}{_seconds(join.start_seconds):>11}"
        f"{_seconds(join.cost_seconds):>12}"
    )


def _sums(history: History) -> Iterator[str]:
    recoveries = [loss.recovery_seconds for loss in history.losses if loss.recovery_seconds is not None]
    if recoveries:
        middle = f"{ms(min(recoveries))} to {ms(max(recoveries))}" if len(recoveries) > 1 else ms(recoveries[0])
        typical = f", median {ms(median(recoveries))}" if len(recoveries) > 2 else ""
        yield f"from a loss to the next step: {middle}{typical}"
    if history.spent and history.effective_ratio is not None:
        yield f"effective training time: {100 * history.effective_ratio:.1f} % of {ms(history.spent.wall)}"
        yield f"  the rest: {_rest(history.spent)}"
    told = [f"{count(history.num_samples)} samples in steps that count, each counted once"]
    if history.num_interrupted:
        again = max(0, history.num_interrupted - history.num_completed)
        completed = f"{history.num_completed} completed by the survivors"
        told.append(f"{_number(history.num_interrupted, 'step')} interrupted: {completed}, {again} taken again")
    if history.rebuilt:
        ways = [f"{_REBUILT.get(source, one_line(source))} {_times(n)}" for source, n in history.rebuilt.items()]
        told.append(f"what only the lost held came back {', '.join(ways)}")
    if history.num_redone:
        told.append(f"{_number(history.num_redone, 'step')} redone from a checkpoint")
    if history.num_skipped:
        told.append(f"{_number(history.num_skipped, 'step')} skipped")
    if history.num_unused:
        told.append(f"{_number(history.num_unused, 'worker')} ended without being let in")
    yield from told


def _rest(spent: Spent) -> str:
    parts = {
        "losses": spent.losses,
        "joins": spent.joins,
        "steps redone": spent.redone,
        "between steps": spent.between,
    }
    shown = [
        f"{name} {ms(seconds)} ({percent(seconds / spent.wall)})" for name, seconds in parts.items() if seconds > 1e-4
    ]
    return ", ".join(shown) or "nothing"


def _some(rows: Sequence[str], name: str) -> Iterator[str]:
    """All rows, or the first and the last where they are many."""
    if len(rows) <= MAX_ROWS:
        yield from rows
        return
    half = MAX_ROWS // 2
    yield from rows[:half]
    yield f"{'...':>8}  {len(rows) - 2 * half} more {name}: `--json` has all"
    yield from rows[-half:]


def _since(moment: float, start: float) -> str:
    seconds = max(0.0, moment - start)
    return f"{seconds:>7.1f}s" if seconds < 1000 else f"{duration(seconds):>8}"


def _times(value: int) -> str:
    return {1: "once", 2: "twice"}.get(value, f"{value} times")


def _seconds(value: float | None) -> str:
    return ms(value) if value else "-"


def _number(value: int, one: str, many: str = "") -> str:
    return f"{value} {one if value == 1 else many or one + 's'}"
