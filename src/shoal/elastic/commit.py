"""Whether a step counts, everywhere or nowhere. Pure; for the worker's side.

Every step that members take together is a *turn*, counted from 1 and across Worlds. A member votes for a turn when it
holds all that the update needs. A turn is committed exactly if every member of its World voted for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

NOTHING = -1
"""The last committed turn of one who has no state: a newcomer."""


def is_committed(votes: Sequence[int], turn: int) -> bool:
    """All members of the World voted for `turn`: `votes` has the last turn of each, those of the dead included."""
    return bool(votes) and min(votes) >= turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a member brings into a new World, told to all in its first gather.

    `committed` is the last turn it knows to be committed, `voted` the last it voted for: with that it promises to
    vote for nothing more in the old World. Where memory is shared, look at the votes there *after* this promise.
    """

    committed: int
    voted: int = NOTHING


class Act(Enum):
    """What a member does to stand where all others stand."""

    KEEP = "keep"  # it has committed the last turn that counts; what it voted for beyond is thrown away
    APPLY = "apply"  # it voted for that turn and holds the sum: it updates now
    FETCH = "fetch"  # it takes everything from a source


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Where the new World begins: `turn` is the last that counts, and `acts` has what each rank does, in rank order.

    `source` is the rank to fetch from, after its own act; None where nobody has a state.
    """

    turn: int
    acts: tuple[Act, ...]
    source: int | None


def outcome_of(reports: Sequence[Report]) -> Outcome:
    """Settle the last turn from what the members of the new World report. All compute the same.

    If one of them knows a turn to be committed, it is: whoever voted for it applies it. If none does, somebody's
    vote is missing, and nobody can ever see it come: its owner is dead, or promised not to cast it.
    """
    turn = max(report.committed for report in reports)
    acts = tuple(_act(report, turn) for report in reports)
    for wanted in (Act.KEEP, Act.APPLY):
        if turn > NOTHING and wanted in acts:
            return Outcome(turn=turn, acts=acts, source=acts.index(wanted))
    return Outcome(turn=turn, acts=acts, source=None)


def _act(report: Report, turn: int) -> Act:
    if report.committed == NOTHING:
        return Act.FETCH
    if report.committed == turn:
        return Act.KEEP
    return Act.APPLY if report.committed == turn - 1 and report.voted >= turn else Act.FETCH
