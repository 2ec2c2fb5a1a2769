"""What a rank is asked to record while it trains: a small file of the run folder, which it looks at between steps.

The launcher writes it, when it is asked itself. It names the process that is meant, so that the next one with the
same rank does not take it for its own. What becomes of it is told in the journal, as `recording` and `recorded`.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from shoal.observe.clean import clean, one_line
from shoal.observe.fold import name_ranks
from shoal.observe.journal import JournalReader
from shoal.observe.metrics import list_ranks
from shoal.observe.runs import is_held
from shoal.spec.errors import UserError
from shoal.spec.event import Event

WHATS = ("profile", "spans")
MAX_STEPS = 10_000
LOOK_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Record `what` for so many steps. `id` is said again in what is told of it."""

    id: str
    what: str
    rank: int
    pid: int
    num_steps: int


def ask_path(run_dir: str, rank: int) -> str:
    return os.path.join(run_dir, "asked", f"{rank}.json")


def write_ask(run_dir: str, ask: Ask) -> None:
    """Put it where the rank looks, in one step. Raises OSError where the disk refuses."""
    path = ask_path(run_dir, ask.rank)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    passing = f"{path}.{os.getpid()}"
    try:
        with open(passing, "w", encoding="utf-8") as file:
            json.dump(asdict(ask), file)
        os.replace(passing, path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(passing)


def read_ask(path: str) -> Ask | None:
    """What is asked there; None where that makes no sense."""
    try:
        with open(path, encoding="utf-8") as file:
            ask = Ask(**json.load(file))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    numbers = (ask.rank, ask.pid, ask.num_steps)
    is_good = all(isinstance(number, int) for number in numbers) and 0 < ask.num_steps <= MAX_STEPS
    return ask if is_good and ask.what in WHATS else None


class Answers:
    """What becomes of something that is asked, followed in the journal from the moment at which this is made.

    `recorded` has what every rank that is done has said, `lost` why one will never be. `begun` are those that record.
    """

    def __init__(self, run_dir: str) -> None:
        self.recorded: dict[int, dict[str, Any]] = {}
        self.lost: dict[int, str] = {}
        self.begun: set[int] = set()
        self._run_dir, self._id, self._ranks = run_dir, "", frozenset[int]()
        self._journal = JournalReader(run_dir)
        self._journal.read_new()

    def follow(
        self, word: str, ranks: Iterable[int], told: TextIO | None = None, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        """Return when all these ranks have recorded what was asked under that word, or never will.

        Who is waited for is said to `told` when it takes longer than a second.
        """
        self._id, self._ranks = word, frozenset(ranks)
        due, line = time.monotonic() + 1.0, ""
        while not self._is_over():
            self._look()
            if told is not None and time.monotonic() > due and (text := self._waiting()) != line:
                line = text
                told.write(f"{text}\n")
                told.flush()
            if not self._is_over():
                sleep(LOOK_SECONDS)

    def recorded_steps(self) -> str:
        """The steps of which spans were recorded, as `--steps` has them; raises UserError where nobody recorded any.

        Who was lost, or could not, is passed over if somebody else has.
        """
        good = [facts for facts in self.recorded.values() if "problem" not in facts]
        firsts = [int(facts["first_step"]) for facts in good if facts.get("num_spans")]
        if not firsts:
            problems = [str(facts["problem"]) for facts in self.recorded.values() if "problem" in facts]
            why = "; ".join([*problems, *self.lost.values()]) or "nothing happened in those steps"
            raise UserError("No rank has recorded anything.", why=why, hint="ask again while the run trains")
        return f"{min(firsts)}:{max(firsts) + max(int(facts['num_steps']) for facts in good)}"

    def _waiting(self) -> str:
        left = self._ranks - self.recorded.keys() - self.lost.keys()
        beginning = left - self.begun
        if beginning:
            return f"waiting for the end of a step of rank {name_ranks(beginning)}"
        return f"rank {name_ranks(left)} is recording" if left else ""

    def _is_over(self) -> bool:
        return all(rank in self.recorded or rank in self.lost for rank in self._ranks)

    def _look(self) -> None:
        is_alive = is_held(self._run_dir)  # first, so that what it wrote last is read
        for event in self._journal.read_new():
            if event.rank in self._ranks:
                self._take(event)
        for rank in self._ranks - self.recorded.keys() if not is_alive else ():
            self.lost.setdefault(rank, "the run has ended")

    def _take(self, event: Event) -> None:
        assert event.rank is not None
        is_ours = event.data.get("id") == self._id
        if event.kind == "recording" and is_ours:
            self.begun.add(event.rank)
        elif event.kind == "recorded" and is_ours:
            self.recorded[event.rank] = dict(event.data)
        elif event.kind == "worker_exited" and event.rank not in self.recorded:
            code = event.data.get("code")
            how = f"signal {-code}" if isinstance(code, int) and code < 0 else f"exit code {code}"
            self.lost[event.rank] = f"its process ended meanwhile ({how})"


def check_records(run_dir: str, rank: int | None) -> None:
    """Raise UserError where nobody would hear: only a Trainer records steps, and looks between them."""
    known = list_ranks(run_dir)
    if not known or (rank is not None and rank not in known):
        whom = "This run has" if rank is None or not known else f"Rank {rank} has"
        raise UserError(
            f"{whom} recorded no step so far.",
            why="only ranks that train with `shoal.Trainer` can be asked, between two steps",
            hint="wait for its first step; for other scripts there is `shoal stacks RUN`",
        )


def tell_profile(facts: Mapping[str, Any], table: Mapping[str, Any], num_rows: int = 20) -> str:
    """The operators that took most time of their own, and where the rest is."""
    rows = table.get("operators", [])
    total = sum(row["self_cpu_seconds"] + row["self_device_seconds"] for row in rows) or 1.0
    has_device = any(row["self_device_seconds"] for row in rows)
    title = (
        f"{'SHARE':>6} {'OWN CPU':>9} {'CPU':>9}"
        + (f" {'OWN GPU':>9}" if has_device else "")
        + f" {'CALLS':>8}  OPERATOR"
    )
    inside = f"operators took {total:.3g} s of it; the rest is Python, waiting, and what is between steps"
    lines = [f"{facts['num_steps']} steps in {facts['seconds']:.3g} s; {inside}", "", title]
    for row in rows[:num_rows]:
        own = row["self_cpu_seconds"] + row["self_device_seconds"]
        text = f"{100 * own / total:>5.1f}% {_ms(row['self_cpu_seconds'])} {_ms(row['cpu_seconds'])}"
        text += f" {_ms(row['self_device_seconds'])}" if has_device else ""
        lines.append(f"{text} {row['num_calls']:>8}  {one_line(row['name'])[:80]}")
    more = len(rows) - num_rows
    lines += [f"and {more} more: {clean(str(facts['table']))}"] if more > 0 else []
    lines += ["", f"{clean(str(facts['path']))}", "  open it in https://ui.perfetto.dev or chrome://tracing"]
    return "\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:>7.2f}ms"


def read_table(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The operators that a rank wrote down; none where the file is on another machine."""
    try:
        with open(str(facts.get("table")), encoding="utf-8") as file:
            table = json.load(file)
    except (OSError, ValueError, RecursionError):
        return {}
    return table if isinstance(table, dict) else {}
