"""Everybody who starts workers for us on other machines: their lines, who is silent, what they answer."""

import contextlib
import selectors
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from shoal.engine.agent import BEAT_SECONDS, LEASE_SECONDS
from shoal.engine.berths import Berth
from shoal.engine.clock import ClockReadings
from shoal.engine.door import Door
from shoal.engine.engine import ignore
from shoal.engine.wire import Invitation, Line, Refused

SILENT_SECONDS = LEASE_SECONDS + 2.0
"""After so long a silence an agent has killed its workers, if it could not be heard because it could not hear."""
ORPHANED_SECONDS = 0.3
"""So long after an agent hung up its workers are dead. Where it was killed, its guard hangs up, after them."""


@dataclass(slots=True, kw_only=True, eq=False)
class AgentLine:
    """The line to one that has proved itself. `berth` is None before its hello; `lost_at` is set when it hung up."""

    line: Line
    heard_at: float
    berth: Berth | None = None
    is_watched_for_room: bool = False
    lost_at: float | None = None
    clock: ClockReadings = field(default_factory=ClockReadings)

    @property
    def name(self) -> str:
        return self.berth.agent if self.berth is not None else ""


@dataclass(slots=True)
class Reply:
    """What agents answer to one question; `waiting` are those that have not."""

    waiting: set[str]
    values: list[Any] = field(default_factory=list)
    refusal: tuple[str, str, str] | None = None


class Agents:
    """All of them, from the moment at which they have proved themselves. Nothing is heard between calls of `wait`.

    A thread lets them know that this process lives: it may be kept from waiting for as long as it likes, by a
    terminal that is held or a disk that is slow. One that is stopped as a whole loses its workers.
    """

    def __init__(self, act: Callable[..., None], problem: Callable[[str], None]) -> None:
        """`act` is called with an agent, the kind of a message of it and what is in that, from within `wait`."""
        self._act, self._problem = act, problem
        self._agents: list[AgentLine] = []
        self._replies: dict[int, Reply] = {}
        self._num_asked = 0
        self._is_closed = threading.Event()
        self._selector: selectors.BaseSelector | None = None
        self._door: Door | None = None

    @property
    def is_open(self) -> bool:
        return self._selector is not None

    def open(self, host: str, wake_fds: Sequence[int]) -> Invitation:
        """Let them in, who reach this machine at `host`. What comes on `wake_fds` cuts waiting short."""
        self._selector = selectors.DefaultSelector()
        for fd in wake_fds:
            self._selector.register(fd, selectors.EVENT_READ, ignore)
        self._door = Door(self._selector, host, self._let_in, self._problem)
        self._is_closed.clear()
        threading.Thread(target=self._keep_beating, name="shoal beats", daemon=True).start()
        return self._door.invitation

    def __iter__(self) -> Iterator[AgentLine]:
        return iter(list(self._agents))

    @property
    def present(self) -> list[AgentLine]:
        """Those that have said hello, and have not hung up."""
        return [agent for agent in self._agents if agent.berth is not None and agent.lost_at is None]

    def find(self, name: str) -> AgentLine | None:
        return next((agent for agent in self._agents if agent.name == name and agent.lost_at is None), None)

    def wait(self, timeout_seconds: float) -> None:
        """Hear what they say, until somebody says something or the time is over."""
        assert self._selector is not None
        assert self._door is not None
        pending = any(agent.lost_at is not None for agent in self._agents)
        most = min(timeout_seconds, BEAT_SECONDS, 0.05 if pending else timeout_seconds)
        for key, _ in self._selector.select(max(0.0, most)):
            key.data()
        now = time.monotonic()
        self._door.turn_away_slow(now)
        for agent in self:
            if agent.lost_at is None and now - agent.heard_at > SILENT_SECONDS:
                self.hang_up(agent, TimeoutError())

    def close(self) -> None:
        """Have all of them end."""
        self._is_closed.set()
        for agent in self._agents:
            with contextlib.suppress(OSError):
                agent.line.put(["end"])
                agent.line.flush()
            agent.line.close()
        self._agents.clear()
        if self._door is not None:
            self._door.close()
        if self._selector is not None:
            self._selector.close()
        self._selector = self._door = None

    # Lines.

    def _let_in(self, line: Line) -> None:
        """Somebody has proved to be an agent of ours."""
        assert self._selector is not None
        agent = AgentLine(line=line, heard_at=time.monotonic())
        self._agents.append(agent)
        self._selector.register(line, selectors.EVENT_READ, partial(self._hear, agent))

    def _keep_beating(self) -> None:
        """Runs in a thread of its own, and touches nothing but lines."""
        while not self._is_closed.wait(BEAT_SECONDS):
            for agent in self:
                with contextlib.suppress(OSError):  # whoever reads from it hears of its end
                    if agent.lost_at is None:
                        agent.line.put(["beat", time.monotonic()])
                        agent.line.flush()

    def send(self, agent: AgentLine, message: list[Any]) -> None:
        """Send without ever waiting; what the network does not take now goes when it does."""
        if agent.lost_at is not None:
            return
        agent.line.put(message)
        self._flush(agent)

    def _flush(self, agent: AgentLine) -> None:
        assert self._selector is not None
        if agent.lost_at is not None:
            return
        try:
            is_waiting = agent.line.flush()
        except OSError as error:
            self.hang_up(agent, error)
            return
        if is_waiting != agent.is_watched_for_room:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if is_waiting else 0)
            self._selector.modify(agent.line, events, partial(self._hear, agent))
            agent.is_watched_for_room = is_waiting

    def _hear(self, agent: AgentLine) -> None:
        if agent.is_watched_for_room:
            self._flush(agent)
        heard = agent.line.num_heard_bytes
        try:
            messages = agent.line.receive() if agent.lost_at is None else []
        except (OSError, EOFError, Refused) as error:
            self.hang_up(agent, error)
            return
        if agent.line.num_heard_bytes > heard:
            agent.heard_at = time.monotonic()
        for message in messages:
            self._act(agent, *message)

    def hang_up(self, agent: AgentLine, error: Exception) -> None:
        """An agent is gone, or cannot be reached. Its workers count as ended when they must have.

        Where its machine says that it is gone, that is in a moment. Where only the way there is broken, it has to
        find out by the silence.
        """
        assert self._selector is not None
        if agent.lost_at is None:
            agent.lost_at = time.monotonic() + ORPHANED_SECONDS
            if not isinstance(error, (EOFError, ConnectionError)):
                agent.lost_at = max(agent.lost_at, agent.heard_at + SILENT_SECONDS)
            self._selector.unregister(agent.line)
            agent.line.close()

    def dismiss(self, agent: AgentLine) -> None:
        """It is not needed any more."""
        self.send(agent, ["end"])
        self.hang_up(agent, EOFError())

    def forget(self, agent: AgentLine) -> None:
        self._agents.remove(agent)

    # Questions.

    def new_question(self, agents: Sequence[str] | Mapping[str, Any]) -> tuple[Reply, int]:
        self._num_asked += 1
        reply = self._replies[self._num_asked] = Reply(set(agents))
        return reply, self._num_asked

    def ask_all(self, kind: str, *facts: Any) -> tuple[Reply, int]:
        present = self.present
        reply, number = self.new_question([agent.name for agent in present])
        for agent in present:
            self.send(agent, [kind, number, *facts])
        return reply, number

    def answer(self, agent: AgentLine, kind: str, number: int, *facts: Any) -> None:
        """An agent has answered one of them."""
        reply = self._replies.get(number)
        if reply is None:
            return
        reply.waiting.discard(agent.name)
        if kind == "refused":
            reply.refusal = facts[0], facts[1], facts[2]
        elif facts:
            reply.values.append(facts[0])

    def await_reply(self, number: int, seconds: float, wait: Callable[[float], None]) -> None:
        """Until all that are not lost have answered, or the time is over. `wait` hears what they say meanwhile."""
        reply, deadline = self._replies[number], time.monotonic() + seconds
        while any(agent.name in reply.waiting for agent in self.present) and time.monotonic() < deadline:
            for agent in self:
                self._flush(agent)
            wait(min(0.1, seconds))
        del self._replies[number]
