"""Who took part in an elastic run and when, and what changes of that cost. Pure: events and turns in, numbers out."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from shoal.observe.losses import Join, Loss, find_joins, find_losses
from shoal.observe.timeline import Era, Timeline
from shoal.observe.turns import Turn
from shoal.spec.event import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Where the time went between the start of the first step and the end of the last. The parts add up to `wall`.

    productive: steps that count; of one in which the World changed, what such a step usually takes.
    losses: from the last step before a loss to the first after it, beyond that step's usual time.
    joins: the same where workers came or went as agreed.
    redone: turns that were undone when the run went back to a checkpoint, and what was between them.
    between: everything else between steps, such as evaluating, saving, and the script's own work.
    """

    wall: float
    productive: float
    losses: float
    joins: float
    redone: float
    between: float


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """An elastic run, told by its Worlds.

    `num_redone` counts steps that were committed, undone by going back to a checkpoint, and taken again;
    `num_interrupted` those that were under way in a loss: the survivors completed `num_completed` of them, and took
    the others again. `num_unused` counts workers that ended before they were let in. `mean_workers` is over the time
    of steps. `rebuilt` counts how often what only the lost held came back, by where from: copy, mirror, checkpoint,
    start.
    """

    eras: tuple[Era, ...]
    losses: tuple[Loss, ...]
    joins: tuple[Join, ...]
    spent: Spent | None
    effective_ratio: float | None
    mean_workers: float
    num_samples: int
    num_redone: int = 0
    num_interrupted: int = 0
    num_completed: int = 0
    num_skipped: int = 0
    num_unused: int = 0
    rebuilt: Mapping[str, int] = field(default_factory=dict)


def tell_history(events: Sequence[Event], turns: Sequence[Turn]) -> History | None:
    """The history of an elastic run; None where there was no World: a run of fixed size, or one that never began."""
    if not any(event.kind == "world" for event in events):
        return None
    timeline = Timeline(events, turns)
    members = {member for era in timeline.eras for member in era.members}
    lost = [event for event in events if event.kind == "worker_lost"]
    spent = add_up(timeline)
    return History(
        eras=tuple(timeline.eras),
        losses=find_losses(events, timeline),
        joins=find_joins(events, timeline),
        spent=spent,
        effective_ratio=spent.productive / spent.wall if spent and spent.wall > 0 else None,
        mean_workers=_mean_workers(timeline),
        num_samples=sum(turn.lead.global_samples for turn in timeline.kept if not turn.is_again),
        num_redone=sum(turn.num_steps for turn in turns if turn.is_undone),
        num_interrupted=sum(map(timeline.is_interrupted, timeline.kept)),
        num_completed=sum(e.kind == "step_settled" and e.data.get("is_completed") is True for e in events),
        num_skipped=len({event.step for event in events if event.kind == "step_skipped"}),
        num_unused=sum(str(event.data.get("id")) not in members for event in lost),
        rebuilt=dict(Counter(str(event.data.get("from")) for event in events if event.kind == "state_rebuilt")),
    )


def add_up(timeline: Timeline) -> Spent | None:
    """Where the time since the first step went; None where there was no step."""
    turns = timeline.turns
    if not turns:
        return None
    start = turns[0].end - turns[0].seconds
    parts = dict.fromkeys(("productive", "losses", "joins", "redone", "between"), 0.0)
    for begin, turn in [(start, turns[0]), *((before.end, turn) for before, turn in pairwise(turns))]:
        length = max(0.0, turn.end - begin)
        own = 0.0 if turn.is_undone else min(length, timeline.own_seconds(turn))
        parts["productive"] += own
        parts[_name_rest(timeline, begin, turn)] += length - own
    return Spent(wall=turns[-1].end - start, **parts)


def _name_rest(timeline: Timeline, begin: float, turn: Turn) -> str:
    """What the time was for that passed since the step before and was not this step's own."""
    if turn.is_undone:
        return "redone"
    if timeline.has_loss(begin, turn.end):
        return "losses"
    return "joins" if timeline.eras_between(begin, turn.end) else "between"


def _mean_workers(timeline: Timeline) -> float:
    seconds = sum(turn.seconds for turn in timeline.kept)
    return sum(turn.seconds * timeline.num_members(turn.end) for turn in timeline.kept) / seconds if seconds else 0.0
