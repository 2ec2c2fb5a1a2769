"""In which order the workers of a pipeline take forwards and backwards. Pure functions of a few integers.

A model is cut into chunks; worker `chunk % size` has it. A chunk of a micro-batch can be computed once the chunk
before it was (forwards), or the one after it (backwards). Nothing that is handed on makes its sender wait, so any
order in which each micro-batch goes forwards before it comes back gets through; what differs is who waits, and how
much is kept.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.spec.strategy import Order

CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved": 2}
"""How many chunks of the model each worker has."""


@dataclass(frozen=True, slots=True)
class Op:
    """A forward, or a backward, of one chunk for one micro-batch."""

    is_forward: bool
    chunk: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Message:
    """What an op hands on: activations to the next chunk, or gradients to the one before; `chunk` is who gets it."""

    is_forward: bool
    chunk: int
    microbatch: int


def plan_order(schedule: Order, size: int, worker: int, num_microbatches: int) -> tuple[Op, ...]:
    """What one of `size` workers does, in order. Backwards of a chunk come in the order of micro-batches."""
    if schedule == "interleaved":
        return _interleave(size, worker, num_microbatches)
    forwards = [Op(True, worker, number) for number in range(num_microbatches)]
    backwards = [Op(False, worker, number) for number in range(num_microbatches)]
    # Before its first backward a worker has as many micro-batches under way as there are stages from it on.
    ahead = num_microbatches if schedule == "gpipe" else min(num_microbatches, size - worker - 1)
    return _alternate(forwards, backwards, ahead)


def _interleave(size: int, worker: int, num_microbatches: int) -> tuple[Op, ...]:
    """Rounds of `size` micro-batches go through one chunk of each worker, then through the next.

    The last round may be a short one: it is planned as if it were whole, and what is not there is left out.
    """
    num_chunks = CHUNKS["interleaved"]
    rounds = -(-num_microbatches // size)
    turns = [
        (turn, number * size + index)
        for number in range(rounds)
        for turn in range(num_chunks)
        for index in range(size)
    ]
    forwards = [Op(True, turn * size + worker, number) for turn, number in turns]
    backwards = [Op(False, (num_chunks - 1 - turn) * size + worker, number) for turn, number in turns]
    ahead = min(len(turns), 2 * (size - worker - 1) + (num_chunks - 1) * size)
    return tuple(op for op in _alternate(forwards, backwards, ahead) if op.microbatch < num_microbatches)


def _alternate(forwards: Sequence[Op], backwards: Sequence[Op], ahead: int) -> tuple[Op, ...]:
    """So many forwards first, then one of each in turn, then the backwards that are left."""
    pairs = zip(forwards[ahead:], backwards, strict=False)
    steady = [op for pair in pairs for op in pair]
    return (*forwards[:ahead], *steady, *backwards[len(forwards) - ahead :])


def list_messages(order: Sequence[Op], size: int, to: int) -> list[Message]:
    """What whoever follows this order sends to worker `to`, in order."""
    num_chunks = 1 + max((op.chunk for op in order), default=0) // size
    found = []
    for op in order:
        chunk = op.chunk + 1 if op.is_forward else op.chunk - 1
        if 0 <= chunk < num_chunks * size and chunk % size == to:
            found.append(Message(op.is_forward, chunk, op.microbatch))
    return found


def count_kept(schedule: Order, size: int, num_microbatches: int) -> list[int]:
    """Of each chunk, the most micro-batches that have gone forwards through it and not yet come back."""
    kept = [0] * (CHUNKS[schedule] * size)
    for worker in range(size):
        under_way: Counter[int] = Counter()
        for op in plan_order(schedule, size, worker, num_microbatches):
            under_way[op.chunk] += 1 if op.is_forward else -1
            kept[op.chunk] = max(kept[op.chunk], under_way[op.chunk])
    return kept


def ideal_bubble(schedule: Order, size: int, num_microbatches: int) -> float:
    """The part of a step in which a worker waits, if all chunks take equally long and handing on takes no time."""
    return (size - 1) / (CHUNKS[schedule] * num_microbatches + size - 1)


def idle_of(schedule: Order, size: int, num_microbatches: int) -> float:
    """The same as a part of what the worker computes."""
    return (size - 1) / (CHUNKS[schedule] * num_microbatches) if num_microbatches else 0.0
