"""Runs of other tools as run folders, so that they stand beside our own."""

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shoal.observe.clean import one_line
from shoal.observe.folder import create
from shoal.observe.journal import Journal
from shoal.observe.lines import Appender
from shoal.observe.points import BOUND, MAX_NAME, MAX_NAMES, Point, encode, points_path
from shoal.observe.runs import list_runs
from shoal.observe.scalars import tag_of
from shoal.observe.segments import BoundedAppender
from shoal.observe.series import NAMES
from shoal.observe.tfevents import Number, Reading, find_folders, read_numbers
from shoal.spec.errors import UserError
from shoal.spec.event import Event

if TYPE_CHECKING:
    from random import Random

STATUS = "imported"
LATEST = 253402300799.0  # the end of the year 9999
BLOCK_LINES = 2000
TOGETHER_SECONDS = 1.0
"""Numbers of one step that come within this time are one point."""
_LOSS = re.compile(
    r"(?:train(?:ing)?[/_])?loss(?:[/_](?:train(?:ing)?|step|total))?|train(?:ing)?[/_]total_loss", re.I
)
_RATE = re.compile(r"(?:train(?:ing)?[/_])?(?:lr|learning_rate|lr-[A-Za-z]+)", re.I)
_OURS = {tag_of(name): name for name in NAMES}


@dataclass(slots=True)
class Imported:
    """What became of one folder of event files. `name` is None where nothing was made; `why` says why not."""

    source: str
    name: str | None = None
    path: str | None = None
    num_numbers: int = 0
    num_names: int = 0
    num_steps: int = 0
    why: str = ""
    notes: list[str] = field(default_factory=list)


class Names:
    """What a tag is called here: the tags of our own files and the usual words for loss and learning rate as ours.

    Names are single lines that do nothing to a terminal. Two tags never get one name. Those beyond a thousand are
    left out: most likely a name has a number in it.
    """

    def __init__(self) -> None:
        self._names: dict[str, str | None] = {}
        self._taken: set[str] = set()
        self.num_left_out = 0

    def __len__(self) -> int:
        return len(self._taken)

    def of(self, tag: str) -> str | None:
        """The name of a tag, or None for one that is left out."""
        if tag not in self._names:
            if len(self._taken) >= MAX_NAMES:
                self.num_left_out += 1
                if self.num_left_out > MAX_NAMES:
                    return None  # not even remembered
                self._names[tag] = None
            else:
                self._names[tag] = self._choose(tag)
        return self._names[tag]

    def _choose(self, tag: str) -> str:
        wanted = _OURS.get(tag)
        if wanted is None:
            wanted = "loss" if _LOSS.fullmatch(tag) else "lr" if _RATE.fullmatch(tag) else tag
        name = wanted if wanted not in self._taken else tag
        name = base = one_line(name.encode("utf-8", "replace").decode())[:MAX_NAME] or "unnamed"
        number = 2
        while name in self._taken:
            name, number = f"{base[: MAX_NAME - 8]} ({number})", number + 1
        self._taken.add(name)
        return name


def import_tensorboard(
    home: str,
    root: str,
    random: "Random",
    progress: Callable[[str, Reading], None] | None = None,
) -> list[Imported]:
    """Make a run of every folder under `root` that holds event files. One that was imported before is left alone."""
    folders = find_folders(root)
    if not folders:
        raise UserError(
            f"There are no event files of TensorBoard under {one_line(root)}.",
            why="no file there has `tfevents` in its name" if os.path.isdir(root) else "there is no such folder",
            hint="name the folder that you give to `tensorboard --logdir`",
        )
    known = {str(run.facts.get("imported_from")): run.name for run in list_runs(home) if run.status == STATUS}
    results = []
    for folder, files in folders.items():
        source = os.path.abspath(folder)
        if source in known:
            why = f"it was imported before, as {known[source]}; remove that folder to import it again"
            results.append(Imported(source=source, why=why))
        else:
            results.append(_import_folder(home, os.path.abspath(root), source, files, random, progress))
    return results


def _import_folder(
    home: str,
    root: str,
    source: str,
    files: Sequence[str],
    random: "Random",
    progress: Callable[[str, Reading], None] | None,
) -> Imported:
    result, reading, names = Imported(source=source), Reading(), Names()
    numbers = _in_order(files, reading)
    first = next(numbers, None)
    if first is None:
        result.why = "there are no numbers in it" + (f" ({reading.damage[0]})" if reading.damage else "")
        return result
    begin = _moment(first.time, files[0])
    inner = os.path.relpath(source, root)
    title = os.path.basename(root) if inner == "." else inner.replace(os.sep, "-")
    facts = {"command": ["imported", title], "imported_from": source, "host": "", "pid": None}
    with create(home, title, facts, begin, random) as run:
        points = BoundedAppender(points_path(run.path, 0), BOUND)
        newest, last_loss = first, None
        lines: list[bytes] = []
        with Journal(os.path.join(run.path, "journal.jsonl")) as journal:
            journal.write(Event(kind="imported", time=begin, data={"source": source, "num_files": len(files)}))
            for point in _points(_chain(first, numbers), names, journal, begin):
                lines.append(encode(point) + b"\n")
                last_loss = point.values.get("loss", last_loss)
                newest = (
                    newest if newest.step > point.step else Number(tag="", step=point.step, time=point.time, value=0)
                )
                if len(lines) >= BLOCK_LINES:
                    _keep(points, lines, run.path)
                    lines.clear()
                    if progress is not None:
                        progress(source, reading)
        _keep(points, lines, run.path)
        points.close()
        ended = max(begin, _moment(newest.time, files[-1]))
        run.update(status=STATUS, ended=ended, num_steps=newest.step + 1, loss=_plain(last_loss))
        result.name, result.path = run.name, run.path
    result.num_numbers, result.num_names, result.num_steps = reading.num_numbers, len(names), newest.step + 1
    result.notes = list(reading.damage)
    if names.num_left_out:
        result.notes.append(f"{names.num_left_out} names beyond the first {MAX_NAMES} were left out")
    return result


def _in_order(files: Iterable[str], reading: Reading) -> Iterator[Number]:
    for path in files:
        yield from read_numbers(path, reading)


def _chain(first: Number, rest: Iterator[Number]) -> Iterator[Number]:
    yield first
    yield from rest


def _points(numbers: Iterable[Number], names: Names, journal: Journal, begin: float) -> Iterator[Point]:
    """Numbers of one step together. Where steps go back, a run was begun again, and the journal says so."""
    point = Point(step=-1, time=begin, values={})
    newest: dict[str, int] = {}
    for number in numbers:
        name = names.of(number.tag)
        if name is None:
            continue
        time = number.time if 0 <= number.time <= LATEST else point.time
        if number.step < newest.get(name, -1):
            if point.values:
                yield point
                point = Point(step=-1, time=time, values={})
            # A moment before it: what was taken until then, from this step on, does not count.
            journal.write(Event(kind="resumed", time=time - 1e-3, rank=0, step=number.step, data={"path": None}))
            newest = {each: step for each, step in newest.items() if step < number.step}
        newest[name] = number.step
        is_same = number.step == point.step and abs(time - point.time) <= TOGETHER_SECONDS
        if is_same and name not in point.values:
            point.values[name] = number.value
        else:
            if point.values:
                yield point
            point = Point(step=number.step, time=time, values={name: number.value})
    if point.values:
        yield point


def _keep(file: Appender, lines: Sequence[bytes], path: str) -> None:
    data = b"".join(lines)
    if file.append(data) < len(data):
        raise UserError(
            f"Cannot write {path}.", why="the disk refused", hint="free some space, and remove that folder"
        )


def _moment(time: float, path: str) -> float:
    """When something was written: what the file says, if that can be."""
    if 0 < time <= LATEST:
        return time
    try:
        return os.path.getmtime(path)
    except OSError:
        return 0.0


def _plain(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)


def as_json(results: Sequence[Imported]) -> str:
    from dataclasses import asdict

    return json.dumps([asdict(result) for result in results])
