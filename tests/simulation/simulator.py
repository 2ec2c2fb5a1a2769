"""A deterministic world for the real coordinator: simulated processes, pipes and time, all drawn from one seed."""

import heapq
import random
from collections.abc import Callable
from typing import Any

from shoal.elastic.coordinator import Coordinator
from shoal.elastic.decision import Decision, Fail, Kill, Note, Start, Tell
from shoal.spec.world import World
from tests.simulation.job import State, last_turn, samples_of
from tests.simulation.memory import Memory
from tests.simulation.schedule import Schedule
from tests.simulation.worker import RETRYABLE, Ended, Worker

LONGEST_SECONDS = 150.0


class Violation(AssertionError):
    """Something that must never happen did."""


class Simulation:
    """One run under one schedule. `run` returns when it has ended; it raises Violation where a promise is broken."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.random = random.Random(schedule.seed)
        self.coordinator = Coordinator(min_workers=schedule.min_workers, max_workers=schedule.max_workers)
        self.num_calls, self.step_seconds = schedule.num_calls, schedule.step_seconds
        self.now = 0.0
        self.heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.counter = 0
        self.starved_until = 0.0
        self.last_heard: dict[Any, float] = {}
        self.workers: dict[int, Worker] = {}
        self.starting: set[int] = set()
        self.incarnations: dict[int, int] = {}
        self.worlds: dict[int, World] = {}
        self.memories: dict[int, Memory] = {}
        self.commits: dict[int, dict[str, int]] = {}
        self.checkpoint = State()
        self.finished: list[State] = []
        self.trace: list[Any] = []
        self.room: int | None = None
        self.failure: Fail | None = None
        self.is_over = False
        self.notes: list[Note] = []

    # Time.

    def at(self, when: float, act: Callable[..., None], *args: Any) -> None:
        self.counter += 1
        heapq.heappush(self.heap, (when, self.counter, act, args))

    def delay(self, seconds: float) -> float:
        """About so long; one in fifty takes much longer."""
        draw = self.random.random()
        return seconds * (0.5 + draw) if draw < 0.98 else seconds * 5

    def run(self) -> "Simulation":
        for worker in range(self.schedule.num_workers):
            self.start(worker)
        for when, act, args in self.schedule.faults:
            self.at(when, getattr(self, act), *args)
        self.at(0.1, self.tick)
        heap = self.heap
        while heap and not self.is_over:
            self.now, _, act, args = heapq.heappop(heap)
            if self.now > LONGEST_SECONDS:
                self.check(self.is_paused(), "the run does not end")
                return self
            act(*args)
        self.check_end()
        return self

    def is_paused(self) -> bool:
        """Somebody stopped everyone who is left: nobody could do anything better than wait."""
        return all(process.frozen_until > self.now for process in self.workers.values())

    # Processes.

    def start(self, worker: int) -> None:
        self.check(worker not in self.starting and worker not in self.workers, f"two processes for worker {worker}")
        self.starting.add(worker)
        self.at(self.now + 0.01, self.started, worker)

    def started(self, worker: int) -> None:
        """The process is there; importing takes a while."""
        self.starting.discard(worker)
        self.incarnations[worker] = incarnation = self.incarnations.get(worker, -1) + 1
        process = Worker(self, worker, incarnation, pid=100 * incarnation + worker)
        self.workers[worker] = process
        self.coordinate(self.coordinator.started, worker, process.pid)
        self.at(self.now + self.delay(0.3), self.begin, process)

    def begin(self, process: Worker) -> None:
        process.has_begun = process.is_alive and self.now >= process.frozen_until
        self.beat(process)
        self.resume(process)

    def resume(self, process: Worker) -> None:
        """Let it run until it sleeps or waits."""
        process.is_scheduled = False
        if not process.is_alive:
            return
        if self.now < process.frozen_until:
            self.wake(process, process.frozen_until)
            return
        try:
            pause = next(process.moves)
        except Ended as end:
            self.die(process, end.args[0])
            return
        if pause is not None:
            self.wake(process, self.now + pause)

    def wake(self, process: Worker, when: float) -> None:
        process.is_scheduled = True
        if when < LONGEST_SECONDS:
            self.at(when, self.resume, process)

    def poke(self, process: Worker) -> None:
        """What it waits for may have come. Who sleeps is not disturbed."""
        if process.is_alive and not process.is_scheduled:
            self.wake(process, self.now + self.delay(0.001))

    def poke_members(self, world: World) -> None:
        for member in world.members:
            process = self.workers.get(member.worker)
            if process is not None and process.id == member.id:
                self.poke(process)

    def beat(self, process: Worker) -> None:
        if not process.is_alive:
            return
        if self.now >= process.frozen_until:
            process.beat()
        pause = 0.25 if self.now >= process.frozen_until else min(process.frozen_until - self.now, LONGEST_SECONDS)
        self.at(self.now + pause, self.beat, process)

    def die(self, process: Worker, code: int) -> None:
        """The end of a process. The launcher reads what is left in its pipe, and then reports it."""
        if not process.is_alive:
            return
        process.is_alive = False
        if code == 0 and process.state is not None and process.state.turn == last_turn(self.num_calls):
            self.finished.append(process.state)
        if code != 0 and not self.schedule.is_shared:
            for digests in self.commits.values():
                digests.pop(process.id, None)
        self.at(self.now + self.delay(0.02), self.reap, process, code)

    def reap(self, process: Worker, code: int) -> None:
        if self.now < self.starved_until:
            self.at(self.starved_until, self.reap, process, code)
            return
        if not self.schedule.is_remote:
            self.drain(process)
        del self.workers[process.number]
        self.coordinate(self.coordinator.exited, process.number, code, is_retryable=code > 0)
        self.is_over |= self.coordinator.is_over and not self.starting

    def drain(self, process: Worker) -> None:
        """Deliver what is still in the pipe, in order."""
        left = sorted(item for item in self.heap if item[2] == self.hear and item[3][0] is process)
        self.heap[:] = [item for item in self.heap if not (item[2] == self.hear and item[3][0] is process)]
        heapq.heapify(self.heap)
        for item in left:
            self.hear(*item[3])

    # Faults.

    def kill(self, worker: int) -> None:
        process = self.workers.get(worker)
        if process is not None:
            self.die(process, -9)

    def freeze(self, worker: int, seconds: float) -> None:
        """One that has not said a word yet is not known to be silent; it is frozen for a while only."""
        process = self.workers.get(worker)
        if process is not None:
            seconds = seconds if process.has_begun else min(seconds, 2.0)
            process.frozen_until = max(process.frozen_until, self.now + seconds)

    def cut(self, worker: int, seconds: float) -> None:
        """Nothing passes to or from this worker for a while; then all of it does."""
        process = self.workers.get(worker)
        if process is not None:
            process.cut_until = max(process.cut_until, self.now + seconds)

    def sever(self, worker: int, way: str, seconds: float) -> None:
        """A connection breaks: what passes this way is lost, also what is on it already; later the worker ends of it.

        Pipes and sockets lose nothing out of their middle, so nobody is promised to go on after such a loss. But one
        side may know before the other, and the worker lives on until it does.
        """
        process = self.workers.get(worker)
        if process is not None and not process.severed:
            process.severed, process.severed_until = way, self.now + seconds
            self.at(process.severed_until, self.die, process, -9)

    def slow(self, worker: int, factor: float) -> None:
        process = self.workers.get(worker)
        if process is not None:
            process.slowness = factor

    def starve(self, seconds: float) -> None:
        """The coordinator does not run."""
        self.starved_until = max(self.starved_until, self.now + seconds)

    def resize(self, num_workers: int) -> None:
        self.coordinate(self.coordinator.resized, num_workers)

    def lose_room(self, room: int, seconds: float) -> None:
        """Machines go, with all that is on them; after a while they are back."""
        self.change_room(room)
        for worker in sorted(self.workers, key=lambda _: self.random.random())[room:]:
            self.kill(worker)
        self.at(self.now + seconds, self.change_room, self.schedule.max_workers)

    def change_room(self, room: int) -> None:
        self.room = room
        self.coordinate(self.coordinator.roomed, room)

    # Pipes.

    def _arrival(self, channel: Any, cut_until: float) -> float:
        """When a message arrives: in order through a pipe, in any order from afar."""
        when = max(self.now, cut_until) + self.delay(0.002 if not self.schedule.is_remote else 0.02)
        if not self.schedule.is_remote:
            when = self.last_heard[channel] = max(when, self.last_heard.get(channel, 0.0))
        return when

    def send(self, process: Worker, kind: str, data: dict[str, Any]) -> None:
        when = self._arrival((process.id, "up"), process.cut_until)
        self.at(when, self.hear, process, kind, data)
        if self.schedule.is_remote and self.random.random() < 0.2:
            self.at(when + self.delay(0.4), self.hear, process, kind, data)

    def hear(self, process: Worker, kind: str, data: dict[str, Any]) -> None:
        if process.is_mute:
            return
        if self.now < self.starved_until:
            when = self.starved_until
            self.at(when, self.hear, process, kind, data)
            return
        if process.is_alive or self.schedule.is_remote or self.workers.get(process.number) is process:
            self.coordinate(self.coordinator.heard, process.number, kind, data)

    def tell(self, worker: int, message: Any) -> None:
        process = self.workers.get(worker)
        if process is None:
            return
        when = self._arrival((process.id, "down"), process.cut_until)
        self.at(when, self.deliver, process, message)
        if self.schedule.is_remote and self.random.random() < 0.2:
            self.at(when + self.delay(0.4), self.deliver, process, message)

    def deliver(self, process: Worker, message: Any) -> None:
        if not process.is_alive or process.is_deaf:
            return
        if self.now < process.frozen_until:
            if process.frozen_until < LONGEST_SECONDS:
                self.at(process.frozen_until, self.deliver, process, message)
            return
        process.told(message)
        self.poke(process)

    def send_vote(self, process: Worker, memory: Memory, rank: int, reader: int, turn: int) -> None:
        when = self._arrival((process.id, reader, memory.world.generation), process.cut_until)
        self.at(when, self.deliver_vote, process, memory, rank, reader, turn)

    def deliver_vote(self, process: Worker, memory: Memory, rank: int, reader: int, turn: int) -> None:
        if not process.is_alive and self.random.random() < 0.5:
            return  # it died with the message in its hands
        member = memory.world.members[reader]
        target = self.workers.get(member.worker)
        if process.is_mute or (target is not None and target.id == member.id and target.is_deaf):
            return
        memory.seen[reader][rank] = max(memory.seen[reader][rank], turn)
        if target is not None and target.id == member.id:
            self.poke(target)

    # The launcher.

    def tick(self) -> None:
        if self.now < self.starved_until:
            self.at(self.starved_until, self.tick)
            return
        self.coordinate(self.coordinator.ticked)
        self.at(self.now + 0.1, self.tick)

    def coordinate(self, ask: Callable[..., list[Decision]], *args: Any, **more: Any) -> None:
        before = self.coordinator.world
        decisions = ask(*args, self.now, **more)
        if self.coordinator.world is not before:
            self.check_published(self.coordinator.world)
        for decision in decisions:
            self.carry_out(decision)

    def carry_out(self, decision: Decision) -> None:
        if isinstance(decision, Tell):
            self.tell(decision.worker, decision.message)
        elif isinstance(decision, Start):
            num_there = len(self.workers) + len(self.starting)
            self.check(self.room is None or num_there < self.room, f"no room for worker {decision.worker}")
            self.start(decision.worker)
        elif isinstance(decision, Kill):
            self.check_kill(decision)
            process = self.workers[decision.worker]
            unreachable_until = max(process.cut_until, process.severed_until if process.is_deaf else 0.0)
            self.at(max(self.now, unreachable_until) + self.delay(0.01), self.die, process, -9)
        elif isinstance(decision, Fail):
            self.failure, self.is_over = decision, True
        else:
            self.notes.append(decision)

    # What the workers share.

    def memory_of(self, world: World) -> Memory:
        if world.generation not in self.memories:
            self.memories[world.generation] = Memory(world, self.schedule.is_shared)
        return self.memories[world.generation]

    def votes_that_count(self, memory: Memory, rank: int, newest: World | None) -> list[int]:
        return memory.seen[rank]

    def restore(self, world: World) -> State:
        """A World in which nobody has a state begins at the last checkpoint; what came after is undone."""
        self.commits = {turn: seen for turn, seen in self.commits.items() if turn <= self.checkpoint.turn}
        return self.checkpoint

    def saved(self, state: State) -> None:
        if state.turn > self.checkpoint.turn:
            self.checkpoint = state

    def source_of(self, world: World, rank: int) -> Worker | None:
        member = world.members[rank]
        process = self.workers.get(member.worker)
        return process if process is not None and process.id == member.id and process.is_alive else None

    def is_settled(self, world: World, outcome: Any) -> bool:
        source = self.source_of(world, outcome.source)
        return source is not None and source.state is not None and source.state.turn >= outcome.turn

    def fetch(self, world: World, outcome: Any) -> State:
        source = self.source_of(world, outcome.source)
        if source is None or source.state is None:
            raise Ended(RETRYABLE)
        return source.state

    # Promises.

    def check(self, holds: bool, message: str) -> None:
        if not holds:
            raise Violation(f"seed {self.schedule.seed}, {self.now:.3f} s: {message}")

    def saw_world(self, world: World) -> None:
        known = self.worlds.setdefault(world.generation, world)
        self.check(known == world, f"two Worlds of generation {world.generation}")

    def check_published(self, world: World | None) -> None:
        """Whoever was in an earlier World and is not in this one is dead, or stands still."""
        assert world is not None
        self.check(world.size >= self.schedule.min_workers or self.coordinator.state.is_ending, "too few in a World")
        self.saw_world(world)
        self.trace.append((round(self.now, 6), world.generation, world.ids))
        for process in self.workers.values():
            if process.is_alive and process.memory is not None and process.id not in world.ids:
                self.check(process.is_standing, f"{process.id} is outside World {world.generation} and can write")

    def entered(self, process: Worker, world: World) -> None:
        """A member has settled the past: older Worlds are closed."""
        for generation, memory in self.memories.items():
            if generation < world.generation:
                memory.is_closed = True

    def writes(self, process: Worker, memory: Memory) -> None:
        self.check(not memory.is_closed, f"{process.id} writes in World {memory.world.generation}, which is over")

    def applied(self, process: Worker, state: State) -> None:
        """All who take a turn take the same one."""
        digests = self.commits.setdefault(state.turn, {})
        digests[process.id] = state.digest
        self.check(len(set(digests.values())) == 1, f"turn {state.turn} was committed twice")
        self.trace.append((round(self.now, 6), process.id, state.turn, state.digest))

    def check_kill(self, decision: Kill) -> None:
        """Nobody is ended for being silent who was neither frozen, nor cut off, nor extremely slow."""
        process = self.workers[decision.worker]
        if decision.why in ("it is frozen", "it is hung", "it is silent"):
            troubled = max(process.frozen_until, process.cut_until, process.severed_until) > self.now - 1.0
            troubled |= process.slowness > 2.0 and decision.why == "it is hung"
            self.check(troubled, f"{process.id} is well, and ended because {decision.why}")

    def check_end(self) -> None:
        if self.failure is not None:
            self.check(self.schedule.num_kills >= 3, f"the run failed: {self.failure.message}")
            return
        self.check(bool(self.finished), "nobody finished")
        self.check(len(set(self.finished)) == 1, "members ended with different states")
        state = self.finished[0]
        self.check(state.turn == last_turn(self.num_calls), f"ended at turn {state.turn}")
        self.check(state.samples == samples_of(self.num_calls), f"counted {state.samples} samples")
