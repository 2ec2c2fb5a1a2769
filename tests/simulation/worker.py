"""A simulated worker: what a trainer does, without the training. A generator that sleeps and waits by yielding."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from shoal.elastic import commit
from shoal.elastic.message import read_world
from shoal.elastic.recent import Patience
from shoal.spec.world import World
from tests.simulation.job import SHARDS, State, call_of, is_end
from tests.simulation.memory import Memory

if TYPE_CHECKING:
    from tests.simulation.simulator import Simulation

Moves = Iterator[float | None]
"""Seconds to sleep, or None to wait until something changes."""

RETRYABLE = 75


class Ended(Exception):
    """The process ends with this code."""


class Renewed(Exception):
    """A newer World is there: the current one can do nothing more."""


class Worker:
    """One process. `known` is what came through the pipe; a thread reads it whenever the process is not frozen."""

    def __init__(self, sim: "Simulation", number: int, incarnation: int, pid: int) -> None:
        self.sim, self.number, self.pid = sim, number, pid
        self.id = f"{number}.{incarnation}"
        self.newest: World | None = None
        self.world: World | None = None
        self.hold = -1
        self.gathered: dict[int, list[dict[str, int]]] = {}
        self.history: set[int] = set()
        self.passed: frozenset[int] = frozenset()
        self.is_stopped = False
        self.state: State | None = None
        self.pending: tuple[int, int] | None = None  # turn and generation of the sum it holds
        self.voted = commit.NOTHING
        self.call = 0
        self.generation = -1
        self.memory: Memory | None = None
        self.rank = -1
        self.is_standing = False
        self.waits_for: tuple[str, int] | None = None
        self.waits_since = 0.0
        self.patience = Patience()
        # How the process is doing; the simulation changes these.
        self.is_alive = True
        self.has_begun = False
        self.is_scheduled = True  # importing
        self.frozen_until = 0.0
        self.cut_until = 0.0
        self.severed = ""  # "up": nothing it says arrives, "down": it hears nothing, or "both"
        self.severed_until = 0.0
        self.slowness = 1.0
        self.moves = self.run()

    @property
    def is_mute(self) -> bool:
        return self.severed in ("up", "both")

    @property
    def is_deaf(self) -> bool:
        return self.severed in ("down", "both")

    # The pipe.

    def told(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "world":
            world = read_world(message)
            self.sim.saw_world(world)
            if self.newest is None:
                self.passed = frozenset(self.history)
            if self.newest is None or world.generation > self.newest.generation:
                self.newest = world
        elif kind == "gathered":
            self.gathered[message["generation"]] = message["values"]
        elif kind == "hold":
            self.hold = max(self.hold, message["generation"])
        elif kind == "called":
            self.history |= {call["call"] for call in message["calls"]}
        elif kind == "stop":
            self.is_stopped = True

    def say(self, kind: str, **data: Any) -> None:
        self.sim.send(self, kind, {"member": self.id, **data})

    def beat(self) -> None:
        """Every quarter of a second, from a thread."""
        step = self.state.turn if self.state is not None else 0
        self.say("beat", generation=self.generation, trainer=0, call=self.call, step=step, is_stepping=True)
        if self.waits_for is None or self.memory is None:
            return
        seconds = self.sim.now - self.waits_since
        if self.patience.is_unusual(seconds, self.sim.now):
            what, turn = self.waits_for
            late = self.memory.late(turn, what, self.rank)
            self.say("waiting", generation=self.generation, members=late, seconds=seconds)

    # The script.

    def run(self) -> Moves:
        yield from self.find_place()
        while True:
            try:
                yield from self.enter()
                while True:
                    yield from self.turn()
            except Renewed:
                continue

    def find_place(self) -> Moves:
        """Pass over finished calls until the one the others are in, then wait to be let in."""
        asked = -1
        while self.newest is None:
            if self.is_stopped or self.call >= self.sim.num_calls:
                raise Ended(0)
            if self.call in self.history:
                yield self.sim.delay(0.01)
                self.call += 1
            elif asked != self.call:
                asked = self.call
                self.say("ready", trainer=0, call=self.call, process={"pid": self.pid, "node": "here"})
            else:
                yield None

    def look(self) -> None:
        """Whoever waits looks whether there is a newer World."""
        if self.newest is not self.world:
            raise Renewed

    def enter(self) -> Moves:
        """Report, hear the reports of all, and come to stand where all stand."""
        self.world = world = self.newest
        assert world is not None
        self.is_standing = self.memory is None or self.is_standing
        self.waits_for = None
        if self.id not in world.ids:
            raise Ended(0)
        self.is_standing = True
        committed = self.report()
        self.say("gather", generation=world.generation, trainer=0, key="enter", value=committed)
        while world.generation not in self.gathered:
            self.look()
            yield None
        values = self.gathered[world.generation]
        reports = [commit.Report(committed=value["committed"], voted=value["voted"]) for value in values]
        yield from self.settle(world, commit.outcome_of(reports), max(value["call"] for value in values))
        self.memory, self.rank = self.sim.memory_of(world), world.rank_of(self.id)
        self.sim.entered(self, world)
        self.is_standing = False
        self.voted, self.pending = self.state.turn, None
        self.call = call_of(self.state.turn + 1)
        self.generation = world.generation
        if world.is_fresh:  # calls that a checkpoint has behind it
            for call in range(self.call):
                self.say("called", trainer=0, call=call, name="fit", result=None)
        self.end_if_done()

    def report(self) -> dict[str, int]:
        """The last turn known to be committed, and the last one voted for. No vote is cast after this."""
        if self.state is None:
            return {"committed": commit.NOTHING, "voted": commit.NOTHING, "call": self.call}
        if self.pending is not None and self.memory is not None:
            votes = self.sim.votes_that_count(self.memory, self.rank, self.world)
            if commit.is_committed(votes, self.pending[0]):
                self.apply()
        return {"committed": self.state.turn, "voted": self.voted, "call": self.call}

    def settle(self, world: World, outcome: commit.Outcome, newest_call: int) -> Moves:
        act = outcome.acts[world.rank_of(self.id)]
        is_newcomer = self.state is None
        if outcome.source is None:
            # Nobody has a state. Who passed over calls cannot begin at the beginning; a new process can.
            if newest_call > 0 and not world.is_fresh:
                raise Ended(RETRYABLE)
            self.sim.check(self.state is None, f"{self.id} throws away what it has")
            self.state = self.sim.restore(world)
            return
        if act is commit.Act.APPLY:
            yield self.sim.delay(0.005)
            self.apply()
        elif act is commit.Act.FETCH:
            while not self.sim.is_settled(world, outcome):
                self.look()
                yield self.sim.delay(0.01)
            yield self.sim.delay(0.05)
            self.look()
            self.state = self.sim.fetch(world, outcome)
        begin = outcome.turn
        if is_end(begin + 1) and newest_call > call_of(begin + 1):
            # Somebody who is dead now had ended the call and said so; one of us has passed over it since.
            begin += 1
            if self.state.turn < begin:
                self.state = self.state.after(world.generation)
                self.sim.applied(self, self.state)
        self.sim.check(self.state.turn == begin, f"{self.id} begins at {self.state.turn}, not {begin}")
        if is_newcomer:
            while self.call in self.history - self.passed:  # it ended while this one was being let in
                self.call += 1
            self.sim.check(self.call == call_of(self.state.turn + 1), f"{self.id} came in at the wrong call")

    def turn(self) -> Moves:
        """One step with everybody, or the end of a call."""
        turn, memory, rank = self.state.turn + 1, self.memory, self.rank
        yield self.sim.delay(self.sim.step_seconds) * self.slowness
        self.look()
        self.sim.writes(self, memory)
        if memory.is_shared or not self.severed:  # a sum by messages needs both ways
            memory.post(rank, turn, self.hold >= memory.world.generation)
        self.sim.poke_members(memory.world)
        yield from self.wait("post", turn)
        is_held = any(post[1] for post in memory.posts)
        covered = memory.sum_of(turn)
        yield self.sim.delay(0.004)
        self.pending = turn, memory.world.generation
        self.sim.writes(self, memory)
        memory.vote(rank, turn, lambda reader: self.sim.send_vote(self, memory, rank, reader, turn))
        self.voted = turn
        self.sim.poke_members(memory.world)
        while not commit.is_committed(memory.seen[rank], turn):
            yield from self.wait_once("vote", turn)
        self.sim.check(covered == list(range(SHARDS)), f"turn {turn} counts shards {covered}")
        yield self.sim.delay(0.004)
        self.sim.writes(self, memory)
        self.apply()
        if memory.is_shared:
            memory.updated[rank] = turn
            self.sim.poke_members(memory.world)
            yield from self.wait("update", turn)
        self.waits_for = None
        yield from self.after_turn(turn, is_held)

    def after_turn(self, turn: int, is_held: bool) -> Moves:
        self.call = call_of(turn + 1)
        if self.rank == 0 and is_end(turn):
            self.sim.saved(self.state)
        self.end_if_done()
        if is_held:
            self.is_standing = True
            self.say("boundary", generation=self.generation, trainer=0, call=self.call, step=turn)
            while True:
                self.look()
                yield None

    def wait(self, what: str, turn: int) -> Moves:
        began = self.sim.now
        while not self.memory.is_there(turn, what, self.rank):
            yield from self.wait_once(what, turn)
        self.patience.waited(self.sim.now - began, self.sim.now)

    def wait_once(self, what: str, turn: int) -> Moves:
        if self.waits_for != (what, turn):
            self.waits_for, self.waits_since = (what, turn), self.sim.now
        self.look()
        yield None

    def apply(self) -> None:
        """Take the turn whose sum is held."""
        turn, generation = self.pending
        self.sim.check(turn == self.state.turn + 1, f"{self.id} applies {turn} after {self.state.turn}")
        self.sim.check(
            min(self.sim.memories[generation].cast) >= turn, f"{self.id} applies {turn}: votes are missing"
        )
        self.state = self.state.after(generation)
        self.pending = None
        self.sim.applied(self, self.state)
        if is_end(turn):  # everyone says so: a single one could die first, and newcomers would wait in vain
            self.say("called", trainer=0, call=call_of(turn), name="fit", result=None)

    def end_if_done(self) -> None:
        if self.call == self.sim.num_calls:
            raise Ended(0)
