"""The metrics of all workers as one list of steps, each of which counts once. Pure.

In an elastic run a worker's file has gaps (it was away, or died with its last half second unwritten), and where
everybody was lost the run goes back to a checkpoint and steps are taken again.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import merge
from operator import itemgetter

from shoal.observe.merged import align
from shoal.spec.event import Event, StepMetrics

PASSED_ON = 0.8
"""Who waits for so much of what others wait for it does not make them wait."""


@dataclass(slots=True)
class Turn:
    """One step as it was taken once, by those whose metrics of it are known: worker -> metrics.

    `is_undone`: the run went back to before it, and took the step again. `is_again`: the step had been taken, and
    only what a lost worker had learned of it alone was learned once more.
    """

    step: int
    metrics: dict[int, StepMetrics] = field(default_factory=dict)
    is_undone: bool = False
    is_again: bool = False

    @property
    def lead(self) -> StepMetrics:
        """What is the same for all, from the lowest worker that is known."""
        return self.metrics[min(self.metrics)] if len(self.metrics) > 1 else next(iter(self.metrics.values()))

    @property
    def end(self) -> float:
        """When the first of them had it committed."""
        return min(one.time for one in self.metrics.values())

    @property
    def num_steps(self) -> int:
        """How many steps this stands for: more than one where it is long ago, and they were merged."""
        return self.lead.num_steps

    @property
    def seconds(self) -> float:
        return step_seconds(self.lead)


def step_seconds(step: StepMetrics) -> float:
    """How long a step took on the rank that measured it."""
    return step.compute + step.communicate + step.wait + step.load + step.other


def waits_in(turn: Turn) -> Iterator[tuple[int, int, float]]:
    """Who waited in a turn, for whom, and how many seconds.

    Who itself waited for another nearly as long only passed that on. What a schedule makes all wait is no one's.
    """
    for rank, row in turn.metrics.items():
        last, seconds, seen = row.waited_for, row.wait - row.bubble, {rank}
        while last in turn.metrics and last not in seen:
            seen.add(last)
            its = turn.metrics[last]
            if its.waited_for is None or its.waited_for in seen or its.wait - its.bubble < PASSED_ON * seconds:
                break
            last = its.waited_for
        if last is not None and last != rank:
            yield rank, last, seconds


def merge_turns(metrics: Mapping[int, Sequence[StepMetrics]], events: Sequence[Event] = ()) -> list[Turn]:
    """All turns in the order they were taken.

    Workers run in lockstep, so metrics of one step stand together once all are sorted by time. A worker that is
    already in a turn begins another: its script has a second trainer, or went back to a checkpoint. Which of the two
    is told by events.
    """
    metrics = align(metrics)
    files = list(metrics.values())
    numbers = [[row.step for row in steps] for steps in files]
    is_straight = not any(is_way_back(event) or event.kind == "relearning" for event in events)
    if is_straight and all(each == numbers[0] for each in numbers):
        # Everybody took every step: this is how nearly all runs are, and the merge would be the slowest part.
        return [Turn(rows[0].step, dict(zip(metrics, rows, strict=True))) for rows in zip(*files, strict=True)]
    turns = _merge(metrics)
    _mark_undone(turns, events)
    _mark_again(turns, events)
    return turns


def _merge(metrics: Mapping[int, Sequence[StepMetrics]]) -> list[Turn]:
    # The lines of one worker never change places, whatever its clock does.
    timed = ([(row.time, worker, row) for row in steps] for worker, steps in metrics.items())
    rows = merge(*timed, key=itemgetter(0))
    turns: list[Turn] = []
    newest: dict[int, Turn] = {}
    ceiling = -1
    for _, worker, row in rows:
        turn = newest.get(row.step)
        if turn is None or worker in turn.metrics:
            if row.step <= ceiling:
                # It has begun anew: nobody adds to what was before.
                newest = {step: known for step, known in newest.items() if step < row.step}
            ceiling = row.step
            turn = newest[row.step] = Turn(row.step)
            turns.append(turn)
        turn.metrics[worker] = row
    return turns


def _mark_undone(turns: Sequence[Turn], events: Iterable[Event]) -> None:
    """What was taken before the run went back, and taken again after it, does not count."""
    for event in filter(is_way_back, events):
        back_to = event.step or 0
        again = {turn.step for turn in turns if turn.end > event.time}
        for turn in turns:
            if turn.end <= event.time and turn.step >= back_to and turn.step in again:
                turn.is_undone = True


def _mark_again(turns: Sequence[Turn], events: Iterable[Event]) -> None:
    """Where copies train by themselves, a loss makes the others take steps again, each with what is missing of it."""
    for event in events:
        until = event.data.get("until")
        if event.kind == "relearning" and isinstance(until, int):
            missing = range(event.step or 0, until)
            known = {turn.step for turn in turns if turn.end <= event.time and turn.step in missing}
            for turn in turns:
                if turn.end > event.time and turn.step in known:
                    turn.is_again = True
                    known.remove(turn.step)


def is_way_back(event: Event) -> bool:
    """Whether workers went on from a checkpoint: they say so, or nobody in a later World has worked before."""
    if event.kind == "world" and event.data.get("generation") != 0:
        return event.data.get("members") == event.data.get("joined")
    return event.kind == "resumed"
