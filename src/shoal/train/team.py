"""Who trains together right now: a group of workers, and how they agree. An elastic run changes both as it goes."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from shoal.checkpoint.state import State
from shoal.comm.connect import connect_devices
from shoal.comm.group import Group
from shoal.comm.rendezvous import Rendezvous
from shoal.comm.shm import ShmGroup
from shoal.data.ledger import Place
from shoal.engine.env import WorkerFacts
from shoal.spec.errors import MemberLost, Retryable
from shoal.spec.strategy import Local, Sharded
from shoal.spec.world import World
from shoal.train import setup
from shoal.train.chunked import giving_back
from shoal.train.cut import Cut
from shoal.train.flat import keeping_memory, named_tensors
from shoal.train.groups import Groups, connect_seats
from shoal.train.handover import give_tensors, make_room, shapes_of, share_facts, share_tensors
from shoal.train.inherit import Holding, Will, agree_on_will, hand_out
from shoal.train.link import find_link
from shoal.train.mesh import Seats, find_holders, find_seats, make_mesh
from shoal.train.settings import Settings
from shoal.train.sync.across import Across
from shoal.train.sync.local import LocalSync
from shoal.train.sync.message import MessageSync
from shoal.train.sync.sharded_message import MessageShardedSync
from shoal.train.sync.sync import Outcome, Sync
from shoal.train.sync.table import NotFinite
from shoal.train.traits import ChangingBuffers

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is trained, and how: all that a sync is made of besides a group. `reach` is told how far a step is.

    `divide` lets the model have only the part of it that is ours, among those who hold a copy together; where the
    others have been cut already, it is told how. `meet`: those who hold this copy are others now. `buffers` are those
    that a forward changes, `homes` says where it uses each parameter.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    settings: Settings
    num_shards: int
    device: torch.device
    reach: Callable[[str], None]
    divide: Callable[[Groups, Mapping[str, Any] | None], Cut]
    meet: Callable[[Groups], None]
    buffers: ChangingBuffers
    homes: Mapping[str, Sequence[str]]


class Progress(Protocol):
    """What a trainer knows besides tensors, and how another one takes it over.

    `is_averaged`: the model shows the moving average of its parameters, on all workers or on none. `place`: how far
    it has come.
    """

    is_averaged: bool
    place: Place

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

    def return_to(self, step: int) -> None:
        """A loss may have taken us back: be at this step again."""
        ...


class Team:
    """`rank` and `size` are those of the group. `number` tells the trainers of a process apart.

    A run of fixed size meets once. In an elastic one `join` enters a World as a newcomer, and `reform` goes from one
    World to the next: it sees to the step that was under way, and hands everything on to new groups. Where parts of a
    model are held by different workers, some of a World may have nothing to do: they wait for the next.
    """

    cut: Cut | None = None
    sync: Sync | None = None
    world: World | None = None
    has_state = False
    """This worker has all that the run has come to: it may go on with it, and hand it on."""
    num_acts = 0
    """What the workers have done together besides steps; `least_acts` of them all members of the World have done."""
    least_acts = 0
    will: Will | None = None
    """How state that is divided came into this World."""
    refilled: tuple[int, ...] = ()
    """Parts of the model that members of this World got from those of another copy."""

    def __init__(self, facts: WorkerFacts, number: int, subject: Subject) -> None:
        self.link = find_link(facts)
        # A replacement is not the first of anybody until it joins: what rank 0 writes down has been written.
        self.rank, self.size = max(facts.rank, min(1, facts.incarnation)), facts.world_size
        self.mesh = make_mesh(self.size, subject.settings.split, is_elastic=self.is_elastic)
        self._facts, self._number, self._subject = facts, number, subject
        self._groups: Groups | None = None
        self._across: Across | None = None
        self._ids: list[str] = []
        self._counted: list[dict[str, float]] | None = None
        self._is_touched = self._has_left = False
        self._candidate: tuple[int, Holding] | None = None

    @property
    def is_elastic(self) -> bool:
        return self.link is not None

    def apart(self, is_apart: bool) -> AbstractContextManager[None]:
        """Inside, the script does something of its own between two steps, or does not: see `Link.is_apart`."""
        return self.link.apart(is_apart) if self.link is not None else nullcontext()

    @property
    def group(self) -> Group:
        """Everyone who trains."""
        assert self._groups is not None
        return self._groups.everyone

    @property
    def copies(self) -> Group:
        """Those who hold the same part of the model: all, where nobody holds less than the whole."""
        assert self._groups is not None
        return self._groups.copies

    @property
    def parts(self) -> Group | None:
        """Those who hold the same copy of the model; None where each holds one by itself."""
        return self._groups.parts if self._groups is not None else None

    @property
    def stalled_seconds(self) -> float:
        """How long the other parts of our copy have held us up so far in this World."""
        return self._groups.clock.seconds if self._groups is not None else 0.0

    def take_late(self) -> tuple[float, int | None]:
        """How long we have waited for a part of our copy that was late since the last call, and for which worker."""
        seconds, part = self._across.take_late() if self._across is not None else (0.0, None)
        return seconds, None if part is None else self.worker(self.mesh.rank(self.copy, part))

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
        return rank if self.world is None else self.world.members[self.world.rank_of(self._ids[rank])].worker

    def worker_of(self, copy: int) -> int:
        """The number of the worker that holds the same part as this one in another copy."""
        return self.worker(self.mesh.rank(copy, self.part))

    def meet(self) -> None:
        """Meet all workers of a run of fixed size."""
        seats = find_seats(range(self.size), (), self.mesh)
        meeting = setup.meet(self._facts, self._subject.settings, self._number)
        self._groups = connect_seats(meeting, seats, self._subject.settings.transport, self._subject.device.type)

    def divide(self) -> None:
        """Let this worker hold only its part of the model: of the lead's, so that the parts fit together."""
        if self._groups is not None and self._groups.parts is not None:
            model = self._subject.model
            share_tensors(self.group, {name: value.detach() for name, value in named_tensors(model)}, 0)
            self._is_touched = True
            self.cut = self._subject.divide(self._groups, None)

    def agree(self) -> None:
        """Make the sync: all workers have the first copy's parameters from here on."""
        assert self._groups is not None
        self.sync = self._make_sync(self._groups, 0)

    def _make_sync(self, groups: Groups, source: int, *, is_inherited: bool = False) -> Sync:
        of = self._subject
        self._is_touched = True
        self._across = None
        if groups.parts is not None and self.cut is not None:
            self._across = Across(groups.everyone, groups.parts, self.cut, groups.clock)
        with giving_back(of.optimizer):
            return setup.make_sync(
                groups.copies,
                of.model,
                of.optimizer,
                of.settings,
                of.num_shards,
                source=source,
                is_elastic=self.is_elastic,
                is_inherited=is_inherited,
                reach=of.reach,
                across=self._across,
                buffers=of.buffers,
                homes=of.homes,
            )

    # Elastic runs.

    def prepare(self) -> None:
        """Have what we can have before we are let in."""
        if self._groups is None:
            of = self._subject
            alone = connect_devices(Rendezvous(0, 1, of.settings.timeout_seconds), device=of.device.type)
            setup.take_memory(alone, of.model, of.optimizer, of.settings, of.num_shards)
            self._groups = Groups(everyone=alone, copies=alone)

    def join(self, world: World, progress: Progress) -> None:
        """Enter a World, or the next, should a member be lost meanwhile."""
        while not self._try(world, progress)[0]:
            world = self._await_world(world.generation)

    def reform(self, progress: Progress) -> Outcome | NotFinite | None:
        """Enter the next World. Returns what became of the step that was under way: None if it never happened."""
        assert self.world is not None
        generation, is_in = self.world.generation, False
        outcome: Outcome | NotFinite | None = None
        while not is_in:
            world = self._await_world(generation)
            generation = world.generation
            is_in, result = self._try(world, progress)
            outcome = result or outcome
        return outcome

    def _await_world(self, after: int) -> World:
        """The next World. Where the run goes on without us, the others go on in memory that is ours no more."""
        assert self.link is not None
        try:
            return self.link.await_world(after)
        except SystemExit:
            self.leave()  # before the script gets to do anything with the model
            raise

    def together(self, act: Callable[[], T], progress: Progress) -> T:
        """Do something with all workers; where one is lost meanwhile, again with those who are left.

        Nobody goes on before all have done it, so that all know whether it must be done again.
        """
        if self.link is None or self.sync is None:
            return act()
        done: list[T] = []
        here = progress.place.step
        with self.link.acting():
            while True:
                try:
                    if not done:
                        if isinstance(self.sync, LocalSync):  # nothing may be on its way while all meet
                            self.sync.agree()
                        done.append(act())
                        self.num_acts += 1
                    self.group.barrier()
                    return done[0]
                except MemberLost:
                    self.reform(progress)
                    progress.return_to(here)
                    if done and self.least_acts < self.num_acts:
                        self.num_acts -= 1
                        done.clear()

    def check_world(self) -> None:
        """Raise MemberLost if there is another World. Whoever waits for others is told so; others may ask."""
        if self.link is not None and self.world is not None:
            self.link.check(self.world)

    def _try(self, world: World, progress: Progress) -> tuple[bool, Outcome | NotFinite | None]:
        outcome = None
        try:
            meeting = self._meeting(world)
            told = meeting.gather("holds", self._tell_held())
            holders = find_holders(told, self._num_fitting)
            if self.has_state and meeting.rank not in holders:
                self._let_go()
            seats = find_seats([member.worker for member in world.members], holders, self.mesh)
            self._check_can_go_on(world, seats, holders)
            self.least_acts = min((int(told[rank].split()[-1]) for rank in holders), default=0)
            outcome = self._settle(meeting, world, holders)
            if outcome is not None:
                progress.conclude(outcome)  # before newcomers are told where we are
            if meeting.rank not in seats.members:
                self._stand_aside(world)
                return False, outcome
            self._enter(world, meeting, seats, holders, progress)
        except MemberLost:
            if not self.has_state and self.sync is not None:  # it was made, and what belongs in it did not come
                self.sync.detach()
                self.sync = None
            return False, outcome
        self.has_state, self._candidate = True, None
        return True, outcome

    def _tell_held(self) -> str:
        """Which copy we have a part of, since which World, and how much we have done; nothing without a state."""
        if not self.has_state or self.world is None:
            return ""
        return f"{self.world.generation}/{self.copy} {self.num_acts}"

    @property
    def _num_fitting(self) -> int:
        """How many workers must still be together for what they have to be of use: a copy that trains by itself."""
        return self.mesh.num_parts if isinstance(self._subject.settings.sync, Local) else 1

    def _check_can_go_on(self, world: World, seats: Seats, holders: Sequence[int]) -> None:
        """Where nobody has the state, or not all of it, all begin anew: not with a model that was changed already."""
        if seats.lost:
            what = f"part {' and '.join(map(str, seats.lost))} of {seats.mesh.num_parts} of the model"
            raise self._anew(world, f"Nobody is left who holds {what}.", "no other copy of the model has it")
        if not holders and self._is_touched and self._num_fitting > 1:
            what = "Every copy of the model has lost a part."
            raise self._anew(world, what, "copies that train by themselves differ: parts of two do not fit together")
        if not holders and self._is_touched:
            what = "The last worker that had the state of the run was lost while it handed that on."
            raise self._anew(world, what, "what this worker got of it is not whole")

    def _anew(self, world: World, message: str, why: str) -> Retryable:
        """Say that there is nothing here to go on with; returns the error that ends this process."""
        assert self.link is not None
        self.link.send("aside", generation=world.generation)
        hint = "the run goes on from its newest checkpoint, or from the start, with new processes"
        return Retryable(message, why=why, hint=hint)

    def _let_go(self) -> None:
        """What is held here is of no use any more. A newcomer holds nothing as yet."""
        if self.sync is not None:
            self.sync.detach()
            vars(self.sync).clear()
        if self._groups is not None:
            self._groups.close()
        self.sync, self._groups, self.has_state, self._candidate, self._counted = None, None, False, None, None

    def _stand_aside(self, world: World) -> None:
        """There is nothing to do here in this World: others hold the same, and there are not enough for a copy."""
        self._let_go()
        assert self.link is not None
        self.link.stand_aside(world.generation)

    def _meeting(self, world: World) -> Rendezvous:
        link = self.link
        assert link is not None
        seconds = self._subject.settings.timeout_seconds
        return Rendezvous(
            world.rank_of(link.id),
            world.size,
            seconds,
            gather=lambda key, value, ranks: link.gather(
                world.generation, self._number, key, value, seconds, _ids(world, ranks)
            ),
            look=partial(link.look, world),
            address=self._facts.address,
        )

    def _settle(self, meeting: Rendezvous, world: World, holders: list[int]) -> Outcome | NotFinite | None:
        """See to the step under way. Those who have no state only keep the others company."""
        if self.sync is None or not self.has_state:
            meeting.gather("judged", "")
            meeting.gather("settled", "")
            return None
        assert self.world is not None
        generation = str(self.world.generation)

        def gather(key: str, value: str) -> list[str]:
            """Only from those who come from the same World: turns are counted in each anew."""
            told = [text.partition(" ") for text in meeting.gather(key, f"{generation} {value}")]
            return [value if origin == generation else "" for origin, _, value in told]

        survivors = [self._ids.index(member.id) for member in world.members if member.id in self._ids]
        return self.sync.resolve(survivors, gather, is_first=meeting.rank == holders[0])

    def _enter(
        self, world: World, meeting: Rendezvous, seats: Seats, holders: Sequence[int], progress: Progress
    ) -> None:
        settings, device = self._subject.settings, self._subject.device.type
        workers = [member.worker for member in world.members]
        groups = connect_seats(meeting, seats, settings.transport, device, self._groups, workers)
        try:
            has_newcomers = not set(holders).issuperset(seats.members)
            # A newcomer that fails here must not be left with parameters in the memory of those who go on.
            is_placed = self.sync is None and groups.parts is None and isinstance(groups.everyone, ShmGroup)
            with keeping_memory(self._subject.model) if is_placed else nullcontext():
                sync = self._hand_over(world, groups, progress, has_newcomers) if holders else None
        except BaseException:
            groups.close()
            raise
        if self._groups is not None:
            self._groups.close()
        if self.sync is not None:
            # It refers to itself in many ways; its memory shall not wait for the garbage collector.
            vars(self.sync).clear()
        self._groups, self.sync, self.world, self._counted = groups, sync, world, None
        self._ids = [world.members[position].id for position in seats.members]
        self.refilled = seats.without(holders) if sync is not None and seats.mesh.num_parts > 1 else ()
        self.rank, self.size, self.mesh = groups.everyone.rank, groups.everyone.size, seats.mesh
        if sync is None:
            progress.begin()
        else:
            progress.settle_in()
        assert self.link is not None
        self.link.generation = world.generation

    def _hand_over(self, world: World, groups: Groups, progress: Progress, has_newcomers: bool) -> Sync:
        """Everything from the old groups' memory, or from the first copy, to the new groups'."""
        copies = groups.copies
        will = self.will = self._find_will(world, copies)
        tensors: dict[str, torch.Tensor] = {}
        if self.sync is not None:
            tensors = self._bring(self.sync, is_divided=will is not None)
            self._counted = self.sync.replica.scalars() if self._counted is None else self._counted
            self.sync.detach()
        more = {
            "counts": self._counted,
            "shapes": shapes_of(tensors.items()),
            "acts": self.least_acts,
            "cut": dict(self.cut.facts) if self.cut is not None else None,
            "keys": self._keys(will),
        }
        facts = share_facts(copies, progress.tell() | more if copies.rank == 0 else None, 0)
        shapes = facts.pop("shapes")
        self._join_parts(groups, facts["cut"])
        progress.is_averaged = bool(facts["is_averaged"])
        if self.sync is None:
            self.num_acts = facts["acts"]
            tensors = make_room(shapes, "cpu" if will is None else "meta")
            self._counted = progress.take(State(step=facts["step"], tensors=tensors, facts=facts))
        sync = self._make_sync(groups, 0, is_inherited=will is not None)
        try:
            if will is None:
                held = {name: value for name, value in tensors.items() if not name.startswith("model/")}
                if has_newcomers and isinstance(sync, MessageSync | MessageShardedSync):
                    share_tensors(copies, held, 0)
                elif has_newcomers and isinstance(sync, LocalSync):
                    give_tensors(copies, held, shapes, 0, is_newcomer=self.sync is None)
                sync.replica.restore(held, self._counted or [])
                if isinstance(sync, LocalSync):
                    sync.inherit(self.sync if isinstance(self.sync, LocalSync) else None)
            else:
                self._inherit(sync, will, copies.rank, facts["keys"])
            if (holding := sync.replica.holding) is not None:
                self._candidate = world.generation, holding
            groups.everyone.barrier()
        except BaseException:
            sync.detach()
            raise
        return sync

    def _bring(self, sync: Sync, *, is_divided: bool) -> dict[str, torch.Tensor]:
        """What this worker has of the state by name; where that is divided, only what all have of the model."""
        if is_divided:
            return dict(sync.replica.flat.tensors())
        sync.replica.flat.place(is_source=False)  # an attempt that failed may have moved the parameters
        return dict(sync.replica.tensors())

    # State that is divided.

    @property
    def most_leaving(self) -> int | None:
        """How many members a World may let go at a time: with two of them a part and its mirror could be gone."""
        return 1 if self._is_divided and self._subject.settings.redundancy else None

    @property
    def is_unmirrored(self) -> bool:
        """State is divided, and nobody has what another one holds: whoever goes takes it along."""
        return self._is_divided and not self._subject.settings.redundancy

    @property
    def _is_divided(self) -> bool:
        return self.sync is not None and self.sync.replica.holding is not None

    def _find_will(self, world: World, copies: Group) -> Will | None:
        """Who hands on which part of divided state; None where each holder has all of it."""
        if not isinstance(self._subject.settings.sync, Sharded):
            return None
        will = agree_on_will(copies, self._holdings())
        if will.lost:
            what = f"part {' and '.join(map(str, will.lost))} of {len(will.givers)} of the state"
            why = "whoever held it and whoever kept its mirror were lost together"
            if not self._subject.settings.redundancy:
                why = "with redundancy=0 nobody keeps what another worker holds"
            raise self._anew(world, f"Nobody is left who holds {what}.", why)
        return will if will.is_divided else None

    def _holdings(self) -> dict[int, Holding | None]:
        """What is held here, by the World that divided it: that of the next World, too, if all of it had come."""
        held: dict[int, Holding | None] = dict([self._candidate] if self._candidate is not None else [])
        if self.sync is not None and self.world is not None and self.has_state:
            held[self.world.generation] = self.sync.replica.holding
        return held

    def _keys(self, will: Will | None) -> list[str]:
        """What there is of each part, for those who have none of it."""
        holding = self._holdings().get(will.generation) if will is not None else None
        return list(holding.keys) if holding is not None else []

    def _inherit(self, sync: Sync, will: Will, rank: int, keys: Sequence[str]) -> None:
        heir = sync.replica.holding
        assert heir is not None
        heir.inherit(hand_out(will, rank, self._holdings().get(will.generation)), keys, self._counted or [])
        if will.is_whole:
            heir.assemble()

    def _join_parts(self, groups: Groups, known: Mapping[str, Any] | None) -> None:
        """Hold a part of a copy together with these; a newcomer has the whole model until then."""
        if groups.parts is None:
            return
        if self.cut is None:
            self._is_touched = True
            self.cut = self._subject.divide(groups, known)
        else:
            self._subject.meet(groups)

    def leave(self) -> None:
        """Give the parameters memory of their own, and go. Doing it twice does nothing more."""
        if self.sync is not None and not self._has_left:
            self.sync.close()
        if self._groups is not None:
            self._groups.close()
        self._has_left = True


def _ids(world: World, ranks: Sequence[int] | None) -> list[str] | None:
    return None if ranks is None else [world.ids[rank] for rank in ranks]
