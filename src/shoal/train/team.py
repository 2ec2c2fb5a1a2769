"""Who trains together right now: a group of workers, and how they agree. An elastic run changes both as it goes."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from shoal.checkpoint.state import State
from shoal.comm.connect import connect_at
from shoal.comm.group import Group
from shoal.comm.rendezvous import Rendezvous
from shoal.engine.env import WorkerFacts
from shoal.spec.errors import MemberLost, Retryable, UserError
from shoal.spec.strategy import Local
from shoal.spec.world import World
from shoal.train import setup
from shoal.train.chunked import giving_back
from shoal.train.cut import Cut
from shoal.train.flat import named_tensors
from shoal.train.handover import make_room, shapes_of, share_facts, share_tensors
from shoal.train.link import find_link
from shoal.train.mesh import make_mesh
from shoal.train.settings import Settings
from shoal.train.sync.across import Across
from shoal.train.sync.message import MessageSync
from shoal.train.sync.sync import Outcome, Sync
from shoal.train.sync.table import NotFinite
from shoal.train.traits import ChangingBuffers

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is trained, and how: all that a sync is made of besides a group. `reach` is told how far a step is.

    `divide` lets the model have only the part of it that is ours, among those who hold a copy together. `buffers` are
    those that a forward changes, `homes` says where it uses each parameter.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    settings: Settings
    num_shards: int
    device: torch.device
    reach: Callable[[str], None]
    divide: Callable[[Group], Cut]
    buffers: ChangingBuffers
    homes: Mapping[str, Sequence[str]]


class Progress(Protocol):
    """What a trainer knows besides tensors, and how another one takes it over."""

    def tell(self) -> dict[str, Any]:
        """Everything a newcomer needs, as plain values."""
        ...

    def take(self, state: State) -> list[dict[str, float]]:
        """Go on from there; returns what the optimizer had counted. `state.tensors` have shapes only."""
        ...

    def catch_up(self, step: int) -> bool:
        """Have the model as it was after that step, though others trained it; False if that cannot be had."""
        ...

    def keep(self) -> None:
        """Save what there is, for those who come later."""
        ...

    def begin(self) -> None:
        """The workers have just met for the first time: check that they agree, make a sync, and settle in."""
        ...

    def conclude(self, outcome: Outcome | NotFinite) -> None:
        """The step that was under way counts, or was found to be no good. Called once for it."""
        ...

    def settle_in(self) -> None:
        """The World is another one now."""
        ...


class Team:
    """`rank` and `size` are those of the group. `number` tells the trainers of a process apart.

    Where one worker does not hold the whole model, `copies` are those who hold the same part of it, and `parts` those
    who hold the same copy; else `copies` are all, and `parts` nobody.

    A run of fixed size meets once. In an elastic one `join` enters a World as a newcomer, and `reform` goes from one
    World to the next: it sees to the step that was under way, and hands everything on to a new group.
    """

    group: Group
    copies: Group
    parts: Group | None = None
    cut: Cut | None = None
    sync: Sync | None = None
    world: World | None = None
    has_state = False
    """This worker has all that the run has come to: it may go on with it, and hand it on."""
    num_acts = 0
    """What the workers have done together besides steps; `least_acts` of them all members of the World have done."""
    least_acts = 0

    def __init__(self, facts: WorkerFacts, number: int, subject: Subject) -> None:
        self.link = find_link(facts)
        if self.link is not None:
            _check_can_change(subject.settings)
        # A replacement is not the first of anybody until it joins: what rank 0 writes down has been written.
        self.rank, self.size = max(facts.rank, min(1, facts.incarnation)), facts.world_size
        self.mesh = make_mesh(self.size, subject.settings.split)
        self._facts, self._number, self._subject = facts, number, subject
        self._counted: list[dict[str, float]] | None = None
        self._is_touched = False

    @property
    def is_elastic(self) -> bool:
        return self.link is not None

    def apart(self, is_apart: bool) -> AbstractContextManager[None]:
        """Inside, the script does something of its own between two steps, or does not: see `Link.is_apart`."""
        return self.link.apart(is_apart) if self.link is not None else nullcontext()

    @property
    def copy(self) -> int:
        """Which copy of the model this worker computes with."""
        return self.mesh.copy_of(self.rank)

    @property
    def part(self) -> int:
        """Which part of a copy this worker holds."""
        return self.mesh.part_of(self.rank)

    def worker(self, rank: int) -> int:
        """The number of the worker that has this rank now: what people know it by."""
        return rank if self.world is None else self.world.members[rank].worker

    def worker_of(self, copy: int) -> int:
        """The number of the worker that holds the same part as this one in another copy."""
        return self.worker(self.mesh.rank(copy, self.part))

    def meet(self) -> None:
        """Meet all workers of a run of fixed size."""
        meeting = setup.meet(self._facts, self._subject.settings, self._number)
        self.group = self.copies = connect_at(meeting, self._transport)
        if self.mesh.num_parts > 1:
            self._divide(meeting)

    def _divide(self, meeting: Rendezvous) -> None:
        """Meet those who hold the same part, and those who hold the same copy."""
        same_part, same_copy = self.mesh.with_part(self.part), self.mesh.with_copy(self.copy)
        self.copies = connect_at(meeting.among(f"part-{self.part}", same_part), self._transport)
        self.parts = connect_at(meeting.among(f"copy-{self.copy}", same_copy), self._transport)

    @property
    def _transport(self) -> str:
        return "tcp" if self._subject.device.type == "cuda" else self._subject.settings.transport

    def divide(self) -> None:
        """Let this worker hold only its part of the model: of the lead's, so that the parts fit together."""
        if self.parts is not None:
            model = self._subject.model
            share_tensors(self.group, {name: value.detach() for name, value in named_tensors(model)}, 0)
            self.cut = self._subject.divide(self.parts)

    def agree(self, source: int = 0) -> None:
        """Make the sync: all workers have the source's parameters from here on."""
        self.sync = self._make_sync(self.copies, source)

    def _make_sync(self, group: Group, source: int) -> Sync:
        of = self._subject
        self._is_touched = True
        with giving_back(of.optimizer):
            return setup.make_sync(
                group,
                of.model,
                of.optimizer,
                of.settings,
                of.num_shards,
                source=source,
                is_elastic=self.is_elastic,
                reach=of.reach,
                across=Across(self.group, self.parts, self.cut) if self.parts is not None and self.cut else None,
                buffers=of.buffers,
                homes=of.homes,
            )

    # Elastic runs.

    def join(self, world: World, progress: Progress) -> None:
        """Enter a World, or the next, should a member be lost meanwhile."""
        while not self._try(world, progress)[0]:
            assert self.link is not None
            world = self.link.await_world(world.generation)

    def reform(self, progress: Progress) -> Outcome | NotFinite | None:
        """Enter the next World. Returns what became of the step that was under way: None if it never happened."""
        assert self.link is not None
        assert self.world is not None
        generation, is_in = self.world.generation, False
        outcome: Outcome | NotFinite | None = None
        while not is_in:
            world = self.link.await_world(generation)
            generation = world.generation
            is_in, result = self._try(world, progress)
            outcome = result or outcome
        return outcome

    def together(self, act: Callable[[], T], progress: Progress) -> T:
        """Do something with all workers; where one is lost meanwhile, again with those who are left.

        Nobody goes on before all have done it, so that all know whether it must be done again.
        """
        if self.link is None:
            return act()
        done: list[T] = []
        with self.link.acting():
            while True:
                try:
                    if not done:
                        done.append(act())
                        self.num_acts += 1
                    self.group.barrier()
                    return done[0]
                except MemberLost:
                    self.reform(progress)
                    if done and self.least_acts < self.num_acts:
                        self.num_acts -= 1
                        done.clear()

    def _try(self, world: World, progress: Progress) -> tuple[bool, Outcome | NotFinite | None]:
        outcome = None
        try:
            meeting = self._meeting(world)
            acts = meeting.gather("holds", str(self.num_acts) if self.has_state else "")
            holders = [rank for rank, number in enumerate(acts) if number]
            if not holders:
                self._check_untouched(world)
            self.least_acts = min((int(number) for number in acts if number), default=0)
            outcome = self._settle(meeting, world, holders)
            if outcome is not None:
                progress.conclude(outcome)  # before newcomers are told where we are
            self._enter(world, meeting, holders, progress)
        except MemberLost:
            if not self.has_state and self.sync is not None:  # it was made, and what belongs in it did not come
                self.sync.detach()
                self.sync = None
            return False, outcome
        self.has_state = True
        return True, outcome

    def _check_untouched(self, world: World) -> None:
        """Nobody has the state, so all begin anew: not with a model of which parts were handed over already."""
        if self._is_touched:
            assert self.link is not None
            self.link.send("spare", generation=world.generation)
            raise Retryable(
                "The last worker that had the state of the run was lost while it handed that on.",
                why="what this worker got of it is not whole",
                hint="the run goes on from its newest checkpoint, or from the start, with new processes",
            )

    def _meeting(self, world: World) -> Rendezvous:
        link, rank = self.link, self._rank_in(world)
        assert link is not None
        seconds = self._subject.settings.timeout_seconds
        return Rendezvous(
            rank,
            world.size,
            seconds,
            gather=lambda key, value, ranks: link.gather(
                world.generation, self._number, key, value, seconds, _ids(world, ranks)
            ),
            look=partial(link.look, world),
        )

    def _rank_in(self, world: World) -> int:
        assert self.link is not None
        return world.rank_of(self.link.id)

    def _settle(self, meeting: Rendezvous, world: World, holders: list[int]) -> Outcome | NotFinite | None:
        """See to the step under way. Those who have no state only keep the others company."""
        if self.sync is None or self.world is None or not self.has_state:
            meeting.gather("judged", "")
            meeting.gather("settled", "")
            return None
        survivors = [self.world.rank_of(member.id) for member in world.members if member.id in self.world.ids]
        return self.sync.resolve(survivors, meeting.gather, is_first=meeting.rank == holders[0])

    def _enter(self, world: World, meeting: Rendezvous, holders: list[int], progress: Progress) -> None:
        group = connect_at(meeting, self._transport)
        try:
            sync = self._hand_over(group, holders[0], progress, len(holders) < group.size) if holders else None
        except BaseException:
            group.close()
            raise
        if self.world is not None:
            self.group.close()
        if self.sync is not None:
            # It refers to itself in many ways; its memory shall not wait for the garbage collector.
            vars(self.sync).clear()
        self.group, self.sync, self.world, self._counted = group, sync, world, None
        self.rank, self.size, self.copies = group.rank, group.size, group
        self.mesh = make_mesh(self.size, self._subject.settings.split)
        if sync is None:
            progress.begin()
        else:
            progress.settle_in()
        assert self.link is not None
        self.link.generation = world.generation

    def _hand_over(self, group: Group, source: int, progress: Progress, has_newcomers: bool) -> Sync:
        """Everything from the old group's memory, or from the source, to the new group's."""
        tensors: dict[str, torch.Tensor] = {}
        if self.sync is not None:
            self.sync.replica.flat.place(is_source=False)  # an attempt that failed may have moved the parameters
            tensors = dict(self.sync.replica.tensors())
            self._counted = self.sync.replica.scalars() if self._counted is None else self._counted
            self.sync.detach()
        is_source = group.rank == source
        more = {"counts": self._counted, "shapes": shapes_of(tensors.items()), "acts": self.least_acts}
        facts = share_facts(group, progress.tell() | more if is_source else None, source)
        if self.sync is None:
            self.num_acts = facts["acts"]
            tensors = make_room(facts.pop("shapes"))
            self._counted = progress.take(State(step=facts["step"], tensors=tensors, facts=facts))
        sync = self._make_sync(group, source)
        try:
            held = {name: value for name, value in tensors.items() if not name.startswith("model/")}
            if has_newcomers and isinstance(sync, MessageSync):
                share_tensors(group, held, source)
            sync.replica.restore(held, self._counted or [])
            group.barrier()
        except BaseException:
            sync.detach()
            raise
        return sync

    def leave(self) -> None:
        """Give the parameters memory of their own, and go."""
        if self.sync is not None:
            self.sync.close()
        for name in ("group", "copies", "parts"):
            if (group := getattr(self, name, None)) is not None:
                group.close()


def _check_can_change(settings: Settings) -> None:
    """Refuse what cannot go on with another number of workers."""
    found = [f"split={settings.split}"] if settings.split is not None else []
    found += [f"sync={settings.sync}"] if isinstance(settings.sync, Local) else []
    if found:
        raise UserError(
            f"{' and '.join(found)} needs a fixed number of workers.",
            why="-n MIN:MAX lets workers come and go, and here each of them has what no other has",
            hint="start with one number, such as `-n 4`",
        )


def _ids(world: World, ranks: Sequence[int] | None) -> list[str] | None:
    return None if ranks is None else [world.ids[rank] for rank in ranks]
