"""Wiring: a worker that does not go on is named, with what it is doing."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from shoal.elastic.stall import Stall, Stalled
from shoal.engine.entry import stacks_file
from shoal.engine.native import Look, read_look
from shoal.engine.requests import ask
from shoal.engine.stacks import Stack, read_text
from shoal.engine.story import ranks as name_ranks
from shoal.observe.clean import clean
from shoal.observe.runs import RunInfo
from shoal.spec.errors import UserError
from shoal.spec.event import Event

LOOK_SECONDS = 60.0

TakeStacks = Callable[[str], Mapping[int, Stack]]
"""(reason) -> what every worker that runs is doing now."""


class HangWatch:
    """Tells who holds up a run of fixed size. Nothing is done between calls of `look`."""

    def __init__(
        self, run_dir: str, take_stacks: TakeStacks, write: Callable[[Event], None], show: Callable[[str], None]
    ) -> None:
        self._run_dir, self._take_stacks, self._write, self._show = run_dir, take_stacks, write, show
        self._stall = Stall()

    def hear(self, event: Event) -> None:
        """A worker said that it waits, or how far it is: at the start, too, with what it computes with.

        What makes no sense comes from the user's own code.
        """
        rank, now = event.rank or 0, time.monotonic()
        try:
            if event.kind == "waiting":
                self._stall.waiting(rank, event.data["members"], float(event.data["seconds"]), now)
            elif event.kind in ("worker_settings", "progress") and event.step is not None:
                self._stall.stepped(rank, event.step, now)
        except (KeyError, TypeError, ValueError, AttributeError):
            return

    def look(self) -> None:
        """Tell what is new."""
        now = time.monotonic()
        if (over := self._stall.ended(now)) is not None:
            self._tell_over(over, now - self._stall.since)
        if (stalled := self._stall.look(now)) is not None:
            self._tell(stalled)

    def _tell(self, stalled: Stalled) -> None:
        words = tell_stall(stalled)
        stacks = self._take_stacks(words)
        self._show(words)
        for rank in stalled.ranks:
            data = {name: value for name, value in asdict(stalled).items() if name != "ranks"}
            data |= stacks[rank].facts() if rank in stacks else {}
            self._write(Event(kind="worker_hung", time=time.time(), rank=rank, data=data))
            if rank in stacks:
                self._show(tell_stack(stacks[rank]))
        self._show(tell_where(stacks_file(self._run_dir, 0)))

    def _tell_over(self, stalled: Stalled, seconds: float) -> None:
        self._show(f"{name_ranks(stalled.ranks)} went on after {seconds:.0f} s")
        for rank in stalled.ranks:
            data = {"waited_seconds": round(seconds, 3)}
            self._write(Event(kind="worker_went_on", time=time.time(), rank=rank, data=data))


def tell_stall(stalled: Stalled) -> str:
    """Who hangs, in a line."""
    names, seconds = name_ranks(stalled.ranks), stalled.waited_seconds
    if set(stalled.ranks) <= set(stalled.waited_by):
        return f"{names} wait for each other, for {seconds:.1f} s now"
    word = "hang" if len(stalled.ranks) > 1 else "hangs"
    them = "them" if len(stalled.ranks) > 1 else "it"
    return f"{names} {word}: {name_ranks(stalled.waited_by)} waited {seconds:.1f} s for {them}"


def tell_stack(stack: Stack) -> str:
    return f"  rank {stack.rank} is in {stack.tell()}" if stack.thread else f"  rank {stack.rank}: {stack.why_none}"


def check_running(run: RunInfo) -> None:
    """Raise UserError where the launcher of a run is not there any more."""
    if run.status != "running":
        ended = "was killed" if run.status == "lost" else f"has ended: {run.status}"
        raise UserError(
            f"Run {run.name} {ended}.", why="nobody is there to ask", hint="`shoal ps` lists those that run"
        )


def ask_running(run: RunInfo, request: Mapping[str, Any]) -> dict[str, Any]:
    """Ask the launcher of a run that goes on; raises UserError where nobody is there, or it refuses."""
    check_running(run)
    return {"run": run.name, **ask(run.path, request)}


def read_stacks(answer: Sequence[Mapping[str, Any]], ranks: Sequence[int]) -> list[Stack]:
    """The stacks that a launcher says are there, of these ranks or of all."""
    known = [int(each["rank"]) for each in answer]
    if missing := [rank for rank in ranks if rank not in known]:
        raise UserError(
            f"There is no rank {missing[0]} that runs.",
            why=f"these are: {', '.join(map(str, known))}" if known else "none is",
            hint="name one of those",
        )
    wanted = [each for each in answer if not ranks or each["rank"] in ranks]
    return [Stack(**{**each, "text": read_text(each["path"], each["begin"])}) for each in wanted]


def add_native(run: RunInfo, stacks: Sequence[Stack], *, is_wanted: bool) -> dict[int, str]:
    """What py-spy sees from outside, by rank: of all if that is wanted, else of those that do not answer.

    It runs on the machine of each. Raises UserError where it is wanted and on none of them.
    """
    silent = [stack.rank for stack in stacks if is_wanted or not stack.thread]
    if not silent:
        return {}
    asked = ask_running(run, {"verb": "look", "ranks": silent})
    looks = _await_looks(run.path, str(asked["id"]), asked["ranks"])
    if is_wanted and looks and not any(look.has_program for look in looks.values()):
        raise UserError(
            "py-spy is not installed.", hint="run `pip install 'shoal[py-spy]'` on each machine of the run"
        )
    found = {
        rank: clean_lines(look.text) or clean(look.why) for rank, look in looks.items() if look.text or is_wanted
    }
    nothing = f"nothing was seen of it within {LOOK_SECONDS:.0f} s" if is_wanted else ""
    return found | {rank: nothing for rank in silent if nothing and rank not in found}


def _await_looks(run_dir: str, word: str, ranks: Sequence[int]) -> dict[int, Look]:
    """Machines look at the same time, each into several workers at once."""
    found: dict[int, Look] = {}
    deadline = time.monotonic() + LOOK_SECONDS
    while len(found) < len(ranks) and time.monotonic() < deadline:
        time.sleep(0.02)
        looks = {rank: read_look(run_dir, word, rank) for rank in ranks if rank not in found}
        found |= {rank: look for rank, look in looks.items() if look is not None}
    return found


def clean_lines(text: str) -> str:
    return "\n".join(clean(line) for line in text.split("\n"))


def tell_all(stacks: Sequence[Stack], native: Mapping[int, str] | None = None) -> str:
    """Where each is, in a line, and then in full: as py-spy sees it, where that was asked, else as it says itself."""
    short = [tell_stack(stack).strip() for stack in stacks]
    texts = {stack.rank: stack.text.strip() or stack.why_none for stack in stacks} | dict(native or {})
    full = [f"--- rank {stack.rank}, process {stack.pid}\n{texts[stack.rank]}" for stack in stacks]
    return "\n".join([*short, "", *full])


def tell_where(stacks_path: str) -> str:
    """Where the rest of it is."""
    folder, home = os.path.dirname(stacks_path), os.path.expanduser("~")
    return f"  stacks of all ranks: {folder.replace(home, '~', 1) if folder.startswith(home + os.sep) else folder}"
