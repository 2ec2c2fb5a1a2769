"""The job that simulated workers do: some calls of some steps, and a meeting at the end of each call."""

from dataclasses import dataclass

STEPS = 3
"""Steps of a call. A call ends with one more turn, in which all agree that it is over."""
SHARDS = 6
BATCH = 10


@dataclass(frozen=True, slots=True)
class State:
    """What is trained: turns behind it, samples counted, and a digest of the way here."""

    turn: int = 0
    samples: int = 0
    digest: int = 0

    def after(self, generation: int) -> "State":
        """The next turn applied. Computed again in another World it has another digest: a copy that did both shows.

        The end of a call changes nothing that is trained: it may be repeated by those who missed it.
        """
        turn = self.turn + 1
        if is_end(turn):
            return State(turn, self.samples, self.digest)
        samples = self.samples + BATCH
        return State(turn, samples, hash((self.digest, turn, samples, generation)))


def is_end(turn: int) -> bool:
    """The turn that ends a call."""
    return turn % (STEPS + 1) == 0


def call_of(turn: int) -> int:
    """The call that a turn belongs to; turns count from 1."""
    return (turn - 1) // (STEPS + 1)


def last_turn(num_calls: int) -> int:
    return num_calls * (STEPS + 1)


def samples_of(num_calls: int) -> int:
    return num_calls * STEPS * BATCH
