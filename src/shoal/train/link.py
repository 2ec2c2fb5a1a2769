"""A worker's line to its coordinator: the World it is in, who meets where, and what is asked of it."""

import os
import select
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NoReturn

import msgspec

from shoal.comm.group import lost
from shoal.elastic.recent import Patience
from shoal.engine.env import WorkerFacts
from shoal.observe.control import ControlPipe
from shoal.spec.errors import MemberLost, Retryable
from shoal.spec.event import Event
from shoal.spec.world import World

BEAT_SECONDS = 0.25
GONE = "the coordinator is gone", 1
READ_BYTES = 1 << 16


class Waits:
    """Which waits are unusual. Each is seen ten times a second while it lasts; its end is seen when another begins.

    Waits of a generation that is over did not end well, and say nothing about what is usual.
    """

    def __init__(self) -> None:
        self._patience = Patience(floor=0.3, unknown=0.5)
        self._last = (-1, 0.0)

    def is_unusual(self, generation: int, seconds: float, now: float) -> bool:
        """A wait in that generation has lasted so long. True where that should be told now."""
        before, waited = self._last
        if generation == before and seconds < waited:
            self._patience.waited(waited, now)
        self._last = generation, seconds
        return self._patience.is_unusual(seconds, now)


class Link:
    """One per process. A thread reads what the coordinator says and shows it that this process lives.

    `world` is the newest World. `calls` are the top-level calls of trainers that are over, by (trainer, number).
    `is_held`: the members are to stop between two steps. `is_stopping`: end after this step, with a checkpoint.
    `is_aside`: this worker is in the World and has nothing to do in it.

    What the trainer is doing is kept in `trainer`, `call`, `step`, `generation` and `is_stepping`, for the beats;
    `is_apart`: nothing, for the script is doing something of its own.
    """

    def __init__(self, member_id: str, control_fd: int, world_fd: int) -> None:
        self.id = member_id
        self.world: World | None = None
        self.calls: dict[tuple[int, int], dict[str, Any]] = {}
        self.is_held = self.is_stopping = False
        self.generation, self.trainer, self.call, self.step, self.is_stepping = -1, 0, 0, 0, False
        self.is_apart, self.is_aside = True, False
        self._gathered: dict[tuple[int, int, str], list[str]] = {}
        self._news = threading.Condition()
        self._control = ControlPipe(control_fd)
        self._world_fd = world_fd
        self._waits = Waits()
        os.set_inheritable(world_fd, False)
        threading.Thread(target=self._listen, name="shoal-link", daemon=True).start()

    # What the coordinator says.

    def _listen(self) -> None:
        rest, poll = b"", select.poll()
        poll.register(self._world_fd, select.POLLIN)
        next_beat = 0.0
        while True:
            if (now := time.monotonic()) >= next_beat:
                next_beat = now + BEAT_SECONDS
                self._beat()
            if not poll.poll(1e3 * max(0.0, next_beat - time.monotonic())):
                continue
            data = os.read(self._world_fd, READ_BYTES)
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._hear(msgspec.json.decode(line))
        with self._news:  # the coordinator is gone: there will be no further World
            self.is_stopping = True
            self._news.notify_all()

    def _hear(self, message: Mapping[str, Any]) -> None:
        with self._news:
            match message["kind"]:
                case "world":
                    self._take(msgspec.convert(message, World))
                case "gathered":
                    key = (message["generation"], message["trainer"], message["key"])
                    self._gathered[key] = message["values"]
                case "called":
                    self.calls |= {(call["trainer"], call["call"]): call for call in message["calls"]}
                case "hold":
                    self.is_held = self.world is not None and message["generation"] == self.world.generation
                case "stop":
                    self.is_stopping = True
            self._news.notify_all()

    def _take(self, world: World) -> None:
        if self.world is None or world.generation > self.world.generation:
            self.world, self.is_held = world, False
            self._gathered = {key: values for key, values in self._gathered.items() if key[0] >= world.generation}

    # What is told to it.

    def send(self, kind: str, **data: Any) -> None:
        self._control.send(Event(kind=kind, time=time.time(), step=self.step, generation=self.generation, data=data))

    def _beat(self) -> None:
        data = {
            name: getattr(self, name) for name in ("generation", "trainer", "call", "step", "is_stepping", "is_apart")
        }
        self._control.offer(Event(kind="beat", time=time.time(), step=self.step, data=data))

    @contextmanager
    def apart(self, is_apart: bool) -> Iterator[None]:
        """Inside, the script does something of its own, or does not."""
        before, self.is_apart = self.is_apart, is_apart
        try:
            yield
        finally:
            self.is_apart = before

    def tell_stepping(self, is_stepping: bool) -> None:
        """Whether steps follow each other from now on. The coordinator hears of it at once."""
        self.is_stepping = is_stepping
        self._beat()

    @contextmanager
    def acting(self) -> Iterator[None]:
        """Inside, the members do something that newcomers know nothing of."""
        was_stepping = self.is_stepping
        self.tell_stepping(False)
        try:
            yield
        finally:
            self.tell_stepping(was_stepping)

    def say_called(self, name: str, result: Any) -> None:
        """A top-level call is over. Those who come later pass over it and get its result from here."""
        self.send("called", trainer=self.trainer, call=self.call, name=name, result=result)

    # Waiting for it.

    def await_membership(self, trainer: int, call: int) -> dict[str, Any] | World:
        """Ask to be let in at this call; returns the World we are in, or what the call gave, if it is over."""
        self.trainer, self.call = trainer, call
        asked = False
        with self._news:
            while True:
                if (over := self.calls.get((trainer, call))) is not None:
                    return over
                if self._is_in(self.world, self.generation - 1):  # an earlier trainer may have entered it
                    assert self.world is not None
                    return self.world
                if self.is_stopping:
                    end("the run ended before this worker was needed")
                if not asked:
                    self.send("ready", trainer=trainer, call=call)
                    asked = True
                self._news.wait()

    def idle(self, why: str) -> NoReturn:
        """Take no part until the run is over, then end."""
        print(f"shoal: this worker stays idle: {why}", file=sys.stderr, flush=True)
        self.send("idle", reason=why)
        with self._news:
            while not self.is_stopping:
                self._news.wait()
        end("the run is over")

    def stand_aside(self, generation: int) -> None:
        """Nobody waits for this worker until there is another World."""
        self.is_aside = True
        self.send("aside", generation=generation)

    def await_world(self, after: int) -> World:
        """The newest World, after that generation. Ends this process, well, where it is not in it any more."""
        with self._news:
            while self.world is None or self.world.generation <= after:
                if self.is_stopping:
                    end(*(("the run ended before this worker was needed", 0) if self.is_aside else GONE))
                if self.is_aside and (self.trainer, self.call) in self.calls:
                    raise Retryable(
                        "The others have finished without this worker.",
                        why="there were not enough workers for another copy of the model, and it stood aside",
                    )
                self._news.wait()
            self.is_aside = False
            if not self._is_in(self.world, after):
                end("the run goes on without this worker")
            return self.world

    def _is_in(self, world: World | None, after: int) -> bool:
        return world is not None and world.generation > after and any(m.id == self.id for m in world.members)

    def gather(
        self,
        generation: int,
        trainer: int,
        key: str,
        value: str,
        timeout_seconds: float,
        among: Sequence[str] | None = None,
    ) -> list[str]:
        """The values of everyone, or of the members named, in that generation, in order.

        Raises MemberLost once there is a newer World.
        """
        data = {"generation": generation, "trainer": trainer, "key": key, "value": value, "step": self.step}
        self.send("gather", **data, **({"among": list(among)} if among is not None else {}))
        name, deadline = (generation, trainer, key), time.monotonic() + timeout_seconds
        with self._news:
            while name not in self._gathered:
                self._check_generation(generation)
                if self.is_stopping or not self._news.wait(deadline - time.monotonic()):
                    raise lost([], f"Nobody answered in generation {generation}.", why="the coordinator", rank=0)
            return self._gathered.pop(name)

    def look(self, world: World, ranks: Sequence[int], seconds: float) -> None:
        """Called while ranks are waited for: tell who, once it takes long; raise if the World is not the newest."""
        with self._news:
            self._check_generation(world.generation)
        if self._waits.is_unusual(world.generation, seconds, time.monotonic()):
            ids = [world.members[peer].id for peer in ranks]
            self.send("waiting", generation=world.generation, members=ids, seconds=seconds)

    def check(self, world: World) -> None:
        """Raise MemberLost if that World is not the newest."""
        with self._news:
            self._check_generation(world.generation)

    def _check_generation(self, generation: int) -> None:
        if self.world is not None and self.world.generation > generation:
            raise superseded(generation, self.world.generation)


def superseded(generation: int, newer: int) -> MemberLost:
    return lost([], f"World {generation} is over.", why=f"World {newer} has taken its place", rank=0)


def end(why: str, code: int = 0) -> NoReturn:
    """Leave the run. It is no failure, so the script's own cleaning up takes place."""
    print(f"shoal: this worker ends: {why}", file=sys.stderr, flush=True)
    raise SystemExit(code)


def find_link(facts: WorkerFacts) -> Link | None:
    """The line to the coordinator of an elastic run; None in any other."""
    if facts.world_fd is None or facts.control_fd is None or not facts.is_elastic:
        return None
    return _open(f"{facts.rank}.{facts.incarnation}", facts.control_fd, facts.world_fd)


@cache
def _open(member_id: str, control_fd: int, world_fd: int) -> Link:
    return Link(member_id, control_fd, world_fd)
