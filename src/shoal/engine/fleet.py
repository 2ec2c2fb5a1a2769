"""Workers on several machines: an agent on each starts them, and one engine here speaks with all agents."""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from shoal.engine.agent import versions
from shoal.engine.agents import AgentLine, Agents
from shoal.engine.berths import Berth, Slot, check_memory, choose, name_machine, seats_of
from shoal.engine.engine import Listener
from shoal.engine.ground import Arranged, Ground
from shoal.engine.log import LIMIT_BYTES, Log
from shoal.engine.ways import TRY_SECONDS, Blocked, no_way, ways_to_try
from shoal.spec.errors import UserError
from shoal.spec.job import Seat, WorkerExit, WorkerSpec
from shoal.spec.system import SystemSample

if TYPE_CHECKING:
    from shoal.engine.stacks import Stack

REPLY_SECONDS = 20.0
STACKS_SECONDS = 1.0
STOP_SECONDS = 4.0
PATIENCE_SECONDS = 3.0
"""An elastic run that could begin waits so long for the rest of its machines."""
COME_SECONDS = 5.0
FIRST_WORD_SECONDS, WORD_SECONDS = 1.0, 8.0
"""When whoever waits for machines is told what is missing, and how often then."""
GROUND_SECONDS = 0.25
"""How often the ground is looked at."""
MAX_UNREAD_BYTES = 8 << 20
"""What may be on its way to one worker."""
MAX_LATE_BYTES = 32 << 20
"""Output that may wait here for the next `poll`."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Worker:
    """One worker that runs, as far as is known here."""

    rank: int
    pid: int
    agent: AgentLine
    slot: Slot
    log: Log
    num_unread: int = 0
    is_deaf: bool = False


class Fleet:
    """The engine for many machines. Nothing happens between calls, but for what agents do by themselves."""

    def __init__(
        self,
        ground: Ground,
        listener: Listener | None = None,
        num_slots: int = 1,
        *,
        wake_fds: Sequence[int] = (),
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """`should_stop` is asked while machines are waited for; True there raises KeyboardInterrupt."""
        self._ground, self._listener, self._num_slots = ground, listener or Listener(), num_slots
        self._wake_fds, self._should_stop = wake_fds, should_stop
        self._agents = Agents(self._act, self._listener.problem)
        self._workers: dict[int, _Worker] = {}
        self._slots: dict[int, Slot] = {}
        self._seats: dict[int, Seat] = {}
        self._known: set[str] = set()
        self._told: set[str] = set()
        self._spare: set[str] = set()
        self._given_up: set[str] = set()
        self._is_elastic = self._is_gathered = self._has_started = False
        self._is_listening = False
        self._late: list[tuple[AgentLine, list[Any]]] = []
        self._looks: dict[str, str] = {}
        self._num_late_bytes = 0
        self._exits: list[WorkerExit] = []
        self._ground_due = 0.0

    # Machines.

    def seat(self, ranks: Sequence[int], least: int) -> Mapping[int, Seat]:
        self._open(least)
        seats = {rank: self._seats[rank] for rank in self._workers}
        if new := [rank for rank in ranks if rank not in seats]:
            self._is_elastic |= least < len(ranks) or self._has_started
            if not self._is_gathered:
                self._await_room(least)
                self._is_gathered = True
            running = {rank: worker.slot for rank, worker in self._workers.items()}
            slots = self._find_slots(running, new, least - (len(ranks) - len(new)))
            if not running:
                check_memory(self._berths(), slots)
            self._check_ways([*running.values(), *slots.values()])
            self._slots |= slots
            seats |= self._new_seats(slots, seats)
            self._seats |= seats
        return {rank: seats[rank] for rank in ranks if rank in seats}

    def _new_seats(self, slots: Mapping[int, Slot], held: Mapping[int, Seat]) -> dict[int, Seat]:
        """Seats for those who are to come. Who runs with an agent that is being lost has no part in this."""
        berths = self._berths()
        there = {berth.agent for berth in berths}
        running = {rank: worker.slot for rank, worker in self._workers.items() if worker.slot.agent in there}
        return seats_of(berths, {**running, **slots}, is_elastic=self._is_elastic, held=held)

    def _check_ways(self, slots: Sequence[Slot]) -> None:
        """Raise UserError where machines that are new to the run and the others do not reach each other.

        Workers would wait for minutes, and say little. What works costs a moment.
        """
        used = {slot.agent for slot in slots}
        by_address = {berth.address: berth for berth in self._berths() if berth.agent in used}
        ways = ways_to_try([(berth.address, berth.bell) for berth in by_address.values()], self._known)
        reply, number = self._agents.new_question([by_address[address].agent for address in ways])
        for address, places in ways.items():
            if (agent := self._agents.find(by_address[address].agent)) is not None:
                self._agents.send(agent, ["try", number, places])
        self._agents.await_reply(number, TRY_SECONDS + 2.0, self._wait)
        if blocked := [Blocked(start=s, end=e, port=p, why=why) for told in reply.values for s, e, p, why in told]:
            for agent in [each for each in self._agents if each.berth and each.berth.address not in self._known]:
                if self._has_started:  # they take no part now, and are asked for again later
                    self._agents.hang_up(agent, EOFError())
            raise no_way(blocked)
        self._known |= by_address.keys()

    def _find_slots(self, running: Mapping[int, Slot], ranks: Sequence[int], least: int) -> dict[int, Slot]:
        """Free slots for these workers. Agents that were asked for may be on their way: they get a moment."""
        deadline = time.monotonic() + COME_SECONDS
        while True:
            slots = choose(self._berths(), running.values(), ranks, self._slots)
            if len(slots) >= least:
                return slots
            if time.monotonic() > deadline or sum(each.num_slots for each in self._berths()) >= self._num_slots:
                raise _no_room(ranks[-1])
            self._wait(0.05)

    @property
    def room(self) -> int | None:
        leaving = [worker for worker in self._workers.values() if worker.slot.agent in self._spare]
        return sum(berth.num_slots for berth in self._berths()) + len(leaving)

    def _berths(self) -> list[Berth]:
        """Where workers may be."""
        present = [agent.berth for agent in self._agents.present if agent.berth is not None]
        return [berth for berth in present if berth.agent not in self._spare]

    def arrange(self, nodes: Mapping[str, int]) -> frozenset[int]:
        """Have places for so many workers on each of these machines, and on no others; returns the workers who lose
        theirs. They keep it until they have ended, and then it is given back.
        """
        if not isinstance(self._ground, Arranged):
            raise UserError("This engine cannot be told which machines to use.", hint="`--engine ray` can")
        used = {worker.slot.agent for worker in self._workers.values()}
        self._spare = self._ground.arrange(nodes, used - self._spare)
        self._num_slots = sum(nodes.values())
        self._give_up_spare()
        return frozenset(rank for rank, worker in self._workers.items() if worker.slot.agent in self._spare)

    def _give_up_spare(self) -> None:
        """Let agents go that have no place in the run any more, when their workers have ended."""
        used = {worker.slot.agent for worker in self._workers.values()}
        for name in self._spare - used:
            for agent in [agent for agent in self._agents if agent.name == name]:
                self._agents.dismiss(agent)
                self._agents.forget(agent)
            self._spare.discard(name)
            self._given_up.add(name)
            assert isinstance(self._ground, Arranged)
            self._ground.give_up(name)

    def _open(self, least: int) -> None:
        """Let agents in, and have them come."""
        if not self._agents.is_open:
            invitation = self._agents.open(self._ground.host, self._wake_fds)
            self._num_slots = self._ground.open(invitation, self._num_slots, least)

    def _await_room(self, least: int) -> None:
        """Wait until there are slots for all workers there may ever be, or for enough and no more come soon."""
        began = time.monotonic()
        told_at = began + FIRST_WORD_SECONDS
        while (self.room or 0) < self._num_slots:
            if time.monotonic() > told_at:
                told_at += WORD_SECONDS
                missing = self._ground.waiting_for([agent.name for agent in self._agents.present])
                self._listener.problem(f"waiting for machines: {missing}")
            self._wait(0.1)
            if self._should_stop():
                raise KeyboardInterrupt
            self._tell_once(self._ground.look())
            if (self.room or 0) >= least and time.monotonic() > began + PATIENCE_SECONDS:
                return

    # Workers.

    def start(self, workers: Sequence[WorkerSpec]) -> None:
        self.seat([spec.rank for spec in workers], len(workers))
        by_agent: dict[str, list[WorkerSpec]] = {}
        for spec in workers:
            by_agent.setdefault(self._slots[spec.rank].agent, []).append(spec)
        agents = {name: agent for name in by_agent if (agent := self._agents.find(name)) is not None}
        if gone := set(by_agent) - set(agents):
            raise _lost_on_the_way(by_agent[gone.pop()][0].rank)
        logs = self._open_logs(workers)
        reply, number = self._agents.new_question(by_agent)
        for name, agent in agents.items():
            agent.line.put(["start", number, [asdict(spec) for spec in by_agent[name]]])
        for spec in workers:  # what they say may come before all of them have answered
            agent, slot = agents[self._slots[spec.rank].agent], self._slots[spec.rank]
            self._workers[spec.rank] = _Worker(rank=spec.rank, pid=0, agent=agent, slot=slot, log=logs[spec.rank])
        self._agents.await_reply(number, REPLY_SECONDS, self._wait)
        for rank, pid in [item for pids in reply.values for item in pids.items()]:
            if int(rank) in self._workers:
                self._workers[int(rank)].pid = pid
        if reply.refusal is not None or reply.waiting:
            self._take_back(workers)
            if reply.refusal is None:
                raise _lost_on_the_way(by_agent[next(iter(reply.waiting))][0].rank)
            message, why, hint = reply.refusal
            raise UserError(message, why=why, hint=hint)
        self._has_started = True

    def _open_logs(self, workers: Sequence[WorkerSpec]) -> dict[int, Log]:
        logs: dict[int, Log] = {}
        for spec in workers:
            try:
                logs[spec.rank] = Log(spec.log_path, self._listener.problem, spec.log_limit_bytes or LIMIT_BYTES)
            except OSError as error:
                for log in logs.values():
                    log.close()
                raise UserError(
                    f"Worker {spec.rank} could not be started.",
                    why=f"{error.strerror}: {spec.log_path}",
                    hint="check the run folder",
                ) from error
        return logs

    def _take_back(self, workers: Sequence[WorkerSpec]) -> None:
        """Not all could be started: end those that were, as if nobody had asked."""
        for spec in workers:
            self.kill(spec.rank)
        deadline = time.monotonic() + STOP_SECONDS
        ranks = {spec.rank for spec in workers if spec.rank in self._workers and self._workers[spec.rank].pid}
        while ranks & set(self._workers) and time.monotonic() < deadline:
            self._wait(0.05)
            self._catch_up()
        for spec in workers:
            self._bury(spec.rank, None)
        ended = {spec.rank for spec in workers}
        self._exits = [end for end in self._exits if end.rank not in ended]

    def poll(self, timeout_seconds: float = 0.0) -> Sequence[WorkerExit]:
        with self._listening():
            if not self._exits:
                self._wait(timeout_seconds)
        exits, self._exits = self._exits, []
        return exits

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """In here the listener is told what workers say; what they say at other times is told when this begins."""
        self._is_listening = True
        try:
            self._catch_up()
            yield
        finally:
            self._is_listening = False

    def _catch_up(self) -> None:
        late, self._late, self._num_late_bytes = self._late, [], 0
        for agent, message in late:
            self._act(agent, *message, is_late=True)

    def tell(self, rank: int, line: bytes) -> bool:
        worker = self._workers.get(rank)
        if worker is not None and worker.num_unread + len(line) > MAX_UNREAD_BYTES:
            self._wait(0.0)
        if worker is None or worker.is_deaf or worker.num_unread + len(line) > MAX_UNREAD_BYTES:
            return False
        worker.num_unread += len(line)
        self._agents.send(worker.agent, ["tell", rank, line])
        return True

    def kill(self, rank: int) -> bool:
        worker = self._workers.get(rank)
        if worker is None:
            return False
        self._agents.send(worker.agent, ["kill", rank])
        return True

    def signal(self, number: int, rank: int | None = None) -> None:
        for agent in self._agents:
            if rank is None or (rank in self._workers and self._workers[rank].agent is agent):
                self._agents.send(agent, ["signal", int(number), rank])

    def keep_spare(self, spec: WorkerSpec) -> bool:
        for agent in {id(worker.agent): worker.agent for worker in self._workers.values()}.values():
            self._agents.send(agent, ["spare", asdict(spec)])
        return bool(self._workers)

    def take_stacks(self, run_dir: str, reason: str, working_dir: str) -> "dict[int, Stack]":
        from shoal.engine.stacks import Stack, keep_text

        reply, number = self._agents.ask_all("stacks", run_dir, reason, working_dir)
        self._agents.await_reply(number, STACKS_SECONDS, self._wait)
        taken = [Stack(**facts) for answer in reply.values for facts in answer]
        return {stack.rank: keep_text(stack) for stack in taken if stack.rank in self._workers}

    def look_into(self, run_dir: str, ranks: Sequence[int], word: str) -> None:
        self._looks = {word: run_dir}
        for agent in self._agents:
            if mine := [rank for rank in ranks if rank in self._workers and self._workers[rank].agent is agent]:
                self._agents.send(agent, ["look", word, mine])

    def _keep_look(self, agent: AgentLine, word: str, facts: dict[str, Any]) -> None:
        from shoal.engine.native import Look, write_look

        look = msgspec.convert(facts, Look)
        worker = self._workers.get(look.rank)
        if word in self._looks and worker is not None and worker.agent is agent:
            write_look(self._looks[word], word, look)

    @property
    def pids(self) -> dict[int, int]:
        return {rank: worker.pid for rank, worker in self._workers.items()}

    def stop(self, grace_seconds: float) -> None:
        if not self._agents.is_open:
            return
        with self._listening():
            reply, number = self._agents.ask_all("stop", grace_seconds)
            self._agents.await_reply(number, grace_seconds + STOP_SECONDS, self._wait)
            for agent in [agent for agent in self._agents if agent.name in reply.waiting]:
                self._lose(agent)
            for rank in list(self._workers):
                self._bury(rank, -signal.SIGKILL)

    def close(self) -> None:
        if self._agents.is_open:
            self._agents.close()
            self._ground.close()

    # What agents say.

    def _wait(self, timeout_seconds: float) -> None:
        if not self._agents.is_open:
            return
        self._agents.wait(timeout_seconds)
        self._look_at_losses()
        if self._spare:
            self._give_up_spare()
        if self._is_gathered and time.monotonic() >= self._ground_due:
            self._ground_due = time.monotonic() + GROUND_SECONDS
            try:
                self._tell_once(self._ground.look())
            except UserError as error:  # those that run go on, whatever the ground says of others
                self._tell_once([error])

    def _tell_once(self, errors: Sequence[UserError]) -> None:
        for text in [f"{error.message} {error.why}".strip() for error in errors]:
            if text not in self._told:
                self._told.add(text)
                self._listener.problem(text)

    def _act(self, agent: AgentLine, kind: str, *facts: Any, is_late: bool = False) -> None:
        match kind:
            case "hello":
                self._welcome(agent, facts[0])
            case "output" | "control" | "exit" if not (self._is_listening or is_late):
                self._put_off(agent, [kind, *facts])
            case "output" | "control" | "exit" | "told":
                worker = self._workers.get(facts[0])
                if worker is not None and worker.agent is agent:
                    self._act_for(worker, kind, *facts[1:])
            case "started" | "stacks" | "tried" | "stopped" | "refused":
                self._agents.answer(agent, kind, *facts)
            case "clock":
                self._read_clock(agent, *facts)
            case "look":
                self._keep_look(agent, *facts)
            case "system" if self._is_listening and agent.berth is not None:
                sample = msgspec.convert(facts[0], SystemSample)
                self._listener.system(replace(sample, node=agent.berth.node))
            case "problem":
                self._listener.problem(f"{agent.name}: {facts[0]}")

    def _read_clock(self, agent: AgentLine, asked_at: float, theirs: float) -> None:
        agent.clock.add(time.monotonic() - asked_at, theirs, time.time())
        ranks = sorted(rank for rank, worker in self._workers.items() if worker.agent is agent)
        if agent.berth is not None and (news := agent.clock.news(agent.berth.node, ranks)) is not None:
            self._listener.clock(news)

    def _put_off(self, agent: AgentLine, message: list[Any]) -> None:
        """Nobody listens now. Who prints very much meanwhile is heard all the same: memory is not for that."""
        self._late.append((agent, message))
        self._num_late_bytes += len(message[2]) if message[0] == "output" else 0
        if self._num_late_bytes > MAX_LATE_BYTES:
            self._catch_up()

    def _act_for(self, worker: _Worker, kind: str, *facts: Any) -> None:
        match kind:
            case "output":
                worker.log.write(facts[0])
                self._listener.output(worker.rank, facts[0])
            case "control":
                self._listener.control(worker.rank, facts[0])
            case "exit":
                self._bury(worker.rank, facts[0], facts[1])
            case "told":
                worker.num_unread -= facts[0]
                worker.is_deaf |= not facts[1]

    def _welcome(self, agent: AgentLine, facts: Mapping[str, Any]) -> None:
        try:
            check_versions(facts["node"] or facts["host"], facts["versions"], versions())
        except UserError as error:
            if not self._is_gathered:
                raise
            self._listener.problem(f"{error.message} It takes no part.")
            self._agents.hang_up(agent, EOFError())
            return
        if facts["name"] in self._given_up:  # it was on its way
            self._agents.dismiss(agent)
            return
        agent.berth = Berth(
            agent=facts["name"],
            node=facts["node"] or facts["host"],
            order=facts["order"],
            address=facts["address"],
            interface=facts["interface"],
            num_slots=facts["num_slots"],
            ports=tuple(facts["ports"]),
            cores=facts["cores"],
            memory=facts["memory"],
            gpus=tuple(facts["gpus"]),
            bell=facts["bell"],
        )
        for other in [each for each in self._agents if each is not agent and each.name == agent.name]:
            self._agents.hang_up(other, EOFError())  # one that comes in its place knows that it is gone, or will be

    # Losses.

    def _look_at_losses(self) -> None:
        now = time.monotonic()
        for agent in self._agents:
            is_idle = all(worker.agent is not agent for worker in self._workers.values())
            if agent.lost_at is not None and now >= agent.lost_at and (self._is_listening or is_idle):
                self._lose(agent)

    def _lose(self, agent: AgentLine) -> None:
        self._agents.hang_up(agent, TimeoutError())
        self._agents.forget(agent)
        machine = name_machine(agent.berth.node, agent.berth.address) if agent.berth is not None else ""
        for rank in [rank for rank, worker in self._workers.items() if worker.agent is agent]:
            self._bury(rank, -signal.SIGKILL, machine=machine)
        if agent.berth is not None and self._agents.find(agent.name) is None:
            self._listener.problem(f"lost {machine}")
            if agent.name not in self._spare:
                self._ground.replace(agent.name)

    def _bury(self, rank: int, code: int | None, result: bytes | None = None, machine: str = "") -> None:
        """A worker has ended; without a code, nobody is told."""
        worker = self._workers.pop(rank, None)
        if worker is None:
            return
        worker.log.close()
        if code is not None:
            end = WorkerExit(rank=rank, code=code, time=time.time(), result=result, machine=machine)
            self._exits.append(end)


def _no_room(rank: int) -> UserError:
    return UserError(
        f"Worker {rank} could not be started.",
        why="there is no machine for it now",
        hint="`shoal nodes` shows which machines are there",
    )


def _lost_on_the_way(rank: int) -> UserError:
    return UserError(
        f"Worker {rank} could not be started.",
        why="its machine was lost at this moment, or does not answer",
        hint="`shoal nodes` shows which machines are there",
    )


def check_versions(node: str, theirs: Mapping[str, str], ours: Mapping[str, str]) -> None:
    """Raise UserError where a machine has another Python, torch or shoal than this one."""
    for name in ("shoal", "python", "torch"):
        if theirs.get(name) != ours.get(name):
            there, here = theirs.get(name, "none"), ours.get(name, "none")
            raise UserError(
                f"{node} has {name} {there}, and the launcher has {here}.",
                why="workers of different versions do not understand each other, or compute different numbers",
                hint=f"install {name} {here} on {node}, or {there} here",
            )
