"""What it was that held a worker up in the calls it shares with the other parts of its copy. Pure."""

from typing import NamedTuple


class Stall(NamedTuple):
    """In seconds: waiting for a part that was late, what the schedule makes any worker wait, and what moved."""

    wait: float
    bubble: float
    communicate: float


def divide_stall(stalled: float, late: float, compute: float, idle: float) -> Stall:
    """Divide what it took. `late` is by how much longer the busiest part was busy than we were.

    With equal parts a schedule would make us wait `idle` of what we `compute`. Nobody is to blame for that, nor for
    what is left then, which is moving what parts tell each other.
    """
    wait = min(stalled, late)
    bubble = min(stalled - wait, idle * compute)
    return Stall(wait, bubble, stalled - wait - bubble)
