"""Where a run is, and all that goes on with it from step to step: saved, resumed, and handed on to newcomers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shoal.checkpoint.fence import newest_generation
from shoal.checkpoint.state import State, digest
from shoal.checkpoint.store import FolderStore
from shoal.data.ledger import Ledger, Place, StepPlan
from shoal.data.loader import Loader
from shoal.data.shares import PERIOD_SHARDS, Schedule, Speed, alike, dithered, rebalance
from shoal.data.sources import Source
from shoal.observe.recorder import Recorder
from shoal.spec.errors import Retryable
from shoal.spec.spans import timed
from shoal.spec.strategy import Local
from shoal.train import setup
from shoal.train.agree import check_copies, check_same, facts_of
from shoal.train.divergence import NUM_PARTS, find_diverged
from shoal.train.feed import Feed
from shoal.train.flat import named_tensors
from shoal.train.handover import share_facts, share_tensors
from shoal.train.resume import read_progress, write_progress
from shoal.train.saving import say
from shoal.train.sync.local import LocalSync
from shoal.train.sync.local_book import Owed, deal
from shoal.train.sync.sync import Outcome
from shoal.train.sync.table import NotFinite
from shoal.train.team import Subject, Team
from shoal.train.traits import ChangingBuffers

MOST_REPAIRS = 3
"""In a run of fixed size, a worker whose copy goes wrong more often than this ends it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """What a run follows, all fixed when it begins. `store` is None where nothing is kept."""

    ledger: Ledger
    source: Source
    scheduler: Any
    buffers: ChangingBuffers
    store: FolderStore | None
    recorder: Recorder
    is_resumed: bool


class Course:
    """One worker's knowledge of how far the run is. On every member of a World it is the same.

    `plan` is the step that is being attempted, and `at_start` what the changing buffers were before it.
    """

    def __init__(self, team: Team, subject: Subject, route: Route, relearn: Callable[[int], None]) -> None:
        self._team, self._subject, self._route, self._relearn = team, subject, route, relearn
        self.place = self.goal = route.ledger.place(0)
        self.saved_step = -1
        self._is_due = False
        self.is_first = True
        self._scheduled = 0
        self.speed = Speed()
        self.feed: Feed | None = None
        self.plan: StepPlan | None = None
        self.at_start: torch.Tensor | None = None
        self.compute_seconds = 0.0
        self.is_averaged = False
        self._caught_average: dict[str, torch.Tensor] = {}
        self._first_generation = 0
        self._num_repairs = 0
        self.schedule = self._equal_shares()
        self._shapes = {name: value.shape for name, value in named_tensors(subject.model)}

    def _equal_shares(self) -> Schedule:
        num_copies = self._team.mesh.num_copies
        divide = dithered if isinstance(self._subject.settings.sync, Local) else alike
        return Schedule(self._subject.num_shards, [1 / num_copies] * num_copies, divide)

    def load(self, start: Callable[[Place], Loader]) -> Feed:
        """Batches from here on, and from wherever we are when the World has changed."""
        self.feed = Feed(lambda: start(self.place))
        return self.feed

    def attempt(self, plan: StepPlan) -> None:
        """A step begins."""
        self.plan, self.compute_seconds = plan, 0.0
        # A copy that learns by itself goes on from what it has learned.
        is_kept = bool(self._route.buffers) and not isinstance(self._team.sync, LocalSync)
        self.at_start = self._route.buffers.read() if is_kept else None

    def give_up(self) -> None:
        """The step was interrupted: until it is settled, everything is as before it."""
        self._route.buffers.write(self.at_start)

    def conclude(self, outcome: Outcome | NotFinite) -> None:
        """The step that was attempted is over, on every worker: it counts, or is left out."""
        plan = self.plan
        assert plan is not None
        self.place = plan.after
        if isinstance(outcome, NotFinite):
            self.give_up()
            return
        self._route.buffers.write(outcome.totals.buffers)
        self.is_first = False
        self.speed.add(self.compute_seconds, plan.num_samples)
        self._go_on_scheduling(plan.epoch)
        if self._team.link is not None:
            self._team.link.step = self.place.step

    def _go_on_scheduling(self, epoch: int) -> None:
        """After a step of that epoch; but not where it is taken a second time, for what a lost worker had of it."""
        is_new, self._scheduled = self.place.step > self._scheduled, max(self.place.step, self._scheduled)
        is_time = self._subject.settings.schedule == "step" or self.place.epoch > epoch
        if self._route.scheduler is not None and is_new and is_time:
            self._route.scheduler.step()

    def shares(self) -> Callable[[int], Sequence[int]]:
        """The shards of each step that are ours, as they are planned now."""
        schedule, copy, num_copies = self.schedule, self._team.copy, self._team.mesh.num_copies
        sync = self._team.sync
        owed = sync.owed if isinstance(sync, LocalSync) else Owed()

        def mine(step: int) -> Sequence[int]:
            left = owed.at(step)
            return schedule.at(step)[copy] if left is None else deal(left, step, num_copies)[copy]

        return mine

    def rebalance(self, seconds_per_sample: tuple[float, ...]) -> None:
        """Give faster workers more, from the first step on that nobody can have planned yet."""
        if self.feed is None:
            return
        effective = self.place.step + self.feed.loader.depth
        shares = self.schedule.shares_at(effective)
        is_dithered = isinstance(self._subject.settings.sync, Local)
        num_shards = PERIOD_SHARDS if is_dithered else self._subject.num_shards
        better = rebalance(shares, seconds_per_sample, num_shards=num_shards)
        if better == shares:
            return
        self.schedule.change(effective, better)
        if self._team.rank == 0:
            self._route.recorder.event("rebalanced", effective, shares=better, seconds_per_sample=seconds_per_sample)

    def repair(self, checksums: Sequence[float]) -> None:
        """Copies differ: name those that are not like most, and give them the others' state, to take the step again.

        In an elastic run whoever went wrong is replaced instead: memory that failed once may do so again. Where only
        another part of the model differs, there is nothing to do here.
        """
        team = self._team
        if self.feed is not None:
            self.feed.drop()
        diverged, source = find_diverged(checksums)
        is_mine = team.copy in diverged
        if is_mine:
            self._num_repairs += 1
            self._tell_diverged(team.worker_of(source), is_sure=2 * len(diverged) < len(checksums))
        if diverged and not team.is_elastic:
            self._copy_from(source)
        if is_mine and (team.is_elastic or self._num_repairs > MOST_REPAIRS):
            times = "" if self._num_repairs == 1 else f" {self._num_repairs} times"
            raise Retryable(
                f"The parameters of this worker differed from the others'{times}.",
                why="its memory or its processor makes mistakes",
                hint="test the machine's memory; replace it if this happens again",
            ) from None

    def _copy_from(self, source: int) -> None:
        assert self._team.sync is not None
        replica = self._team.sync.replica
        # Whole, with what lies between parameters: that is looked at, too.
        tensors = {**dict(replica.tensors()), "values": replica.flat.values}
        share_tensors(self._team.copies, tensors, source)

    def _tell_diverged(self, good: int, *, is_sure: bool) -> None:
        """Said by the worker itself. What it computed since its parameters were last looked at may be wrong."""
        me, step, is_replaced = self._team.worker_of(self._team.copy), self.place.step, self._team.is_elastic
        data = {"worker": me, "repaired_from": None if is_replaced else good, "is_sure": is_sure}
        self._route.recorder.event("replica_diverged", step, **data, since=max(0, step - NUM_PARTS))
        doubt = "" if is_sure else f" (or those of rank {good} were: nobody can tell)"
        what = "it is replaced" if is_replaced else f"it takes those of rank {good}"
        say(f"shoal: the parameters of rank {me} were wrong before step {step}{doubt}; {what}")

    # From one World to the next.

    def begin(self) -> None:
        """The workers have met for the first time: do they agree? Then go on from a checkpoint, if asked to."""
        of, route, world = self._subject, self._route, self._team.world
        facts = facts_of(of.settings, route.ledger, route.scheduler)
        check_same(self._team.group, of.model, of.optimizer, facts)
        check_copies(self._team.group, of.settings, self._team.mesh.num_parts)
        setup.check_same_data(self._team.group, route.source, route.recorder)
        self._team.divide()
        self._team.agree()
        if route.store is not None and world is not None:  # this run's Worlds come after those of an earlier one
            self._first_generation = newest_generation(route.store.folder) + 1 - world.generation
        # In a later World nobody was left who had the state: what is on disk is the newest there is.
        is_rebuilt = world is not None and world.generation > 0
        if route.is_resumed or is_rebuilt:
            self.resume()
        if is_rebuilt:
            self._tell_rebuilt("checkpoint" if self.saved_step >= 0 else "start")
        self._begin_world()

    def settle_in(self) -> None:
        """The World is another, and goes on where the last one was."""
        self._stand_with_the_others()
        will, every = self._team.will, self._subject.settings.checkpoint_every
        if self._team.refilled:
            self._tell_rebuilt("copy", parts=list(self._team.refilled), num_parts=self._team.mesh.num_parts)
        if will is not None and will.mirrored:
            self._tell_rebuilt("mirror", parts=list(will.mirrored), num_parts=len(will.givers))
        # Who was interrupted may not have saved what others have: all make one after the next step.
        self.saved_step, self._is_due = -1, every is not None and self.place.step % every == 0
        self._begin_world()

    def _stand_with_the_others(self) -> None:
        """Copies that train by themselves go on at a common place, where something is missing that one learned."""
        sync = self._team.sync
        if not isinstance(sync, LocalSync):
            return
        place, epoch = sync.start_at(self.place), self.place.epoch
        if place.step > self.place.step:  # the step was over when it was interrupted
            self.place = place
            self._go_on_scheduling(epoch)
        self.place, self.is_first = place, False
        if self._team.rank == 0 and place.step < sync.owed.until:
            self._route.recorder.event("relearning", place.step, until=sync.owed.until)

    def return_to(self, step: int) -> None:
        """Be at this step again, where a loss has taken us back: learn what nobody has who is left."""
        if isinstance(self._team.sync, LocalSync) and self.place.step < step:
            self._relearn(step)

    def _tell_rebuilt(self, source: str, **more: Any) -> None:
        """What only the lost held is here again, and where it comes from."""
        if self._team.rank == 0:
            self._route.recorder.event("state_rebuilt", self.place.step, **{"from": source}, **more)

    def _begin_world(self) -> None:
        """Shares begin anew, and what was loaded ahead is for other shards."""
        team, generation = self._team, self._team.world.generation if self._team.world is not None else 0
        self._plan_anew()
        self._route.recorder.enter(generation, team.size, is_lead=team.rank == 0)
        if self._route.store is not None and team.is_elastic and team.rank == 0:
            self._route.store.fence(self._first_generation + generation, wait=False)
        self.show_average(self.is_averaged)

    def _plan_anew(self) -> None:
        """From here on nothing is planned yet, and what was loaded ahead is of no use."""
        self.schedule = self._equal_shares()
        self.speed.clear()
        if isinstance(self._team.sync, LocalSync):
            self._team.sync.start_at(self.place)
        if self.feed is not None:
            self.feed.drop()

    def show_average(self, is_average: bool) -> None:
        """Let the model have the moving average of its parameters, or its own again."""
        sync = self._team.sync
        if sync is not None:
            sync.replica.show(is_average=is_average)
        elif is_average != self.is_averaged:  # a newcomer that passes over what the others did with it
            parameters = dict(self._subject.model.named_parameters())
            for name, other in self._caught_average.items():
                value = parameters[name].detach()
                kept = value.clone()
                value.copy_(other)
                other.copy_(kept)
        self.is_averaged = is_average

    def tell(self) -> dict[str, Any]:
        """What a newcomer needs to know besides the tensors and what the optimizer has counted."""
        more = {"step": self.place.step, "first_generation": self._first_generation, "is_averaged": self.is_averaged}
        return {**self._facts([]), **more, "scheduled": self._scheduled}

    def take(self, state: State) -> list[dict[str, float]]:
        """Be where the others are; returns what the optimizer has counted."""
        held = {name: value.shape for name, value in named_tensors(self._subject.model)}
        self.place, counts = self._read(state, held)
        self._first_generation, self._scheduled = state.facts["first_generation"], state.facts["scheduled"]
        self.is_first = False
        return counts

    def catch_up(self, step: int) -> bool:
        """Take the model from the checkpoint of that step, which the others made at the end of `fit`.

        Where there are only newer ones, the newest has to do: training went on since.
        """
        store = self._route.store
        steps = [entry.step for entry in store.list()] if store is not None else []
        if store is None or max(steps, default=-1) < step:
            return False
        loaded = store.load(step if step in steps else None)
        if loaded.state.step < step:
            return False
        self.place, _ = self._read(loaded.state, self._shapes)
        model = {
            name.removeprefix("model/"): t for name, t in loaded.state.tensors.items() if name.startswith("model/")
        }
        self._subject.model.load_state_dict(model)
        self._caught_average = {
            name.removeprefix("ema/"): t for name, t in loaded.state.tensors.items() if name.startswith("ema/")
        }
        return True

    def agree(self) -> None:
        """Let all workers have the same parameters, and all of them, where each has its own or a part for a while."""
        if self._team.sync is not None:
            self._team.sync.agree()
            self._team.sync.replica.assemble()

    # From one run to the next.

    def is_due(self, every: int) -> bool:
        """Whether it is time for a checkpoint. One that falls into a round is made at its end."""
        assert self._team.sync is not None
        is_due = self._is_due or self.place.step % every == 0
        self._is_due = is_due and not self._team.sync.is_round_over
        return is_due and not self._is_due

    def save(self, *, wait: bool = False) -> None:
        """Save a checkpoint of this moment. With `wait` it is on disk when any worker goes on."""
        self._team.together(lambda: self.write(wait=wait), self)

    def keep(self) -> None:
        """Have a checkpoint of this moment on disk, for those who come later."""
        if self.place.step != self.saved_step:
            self.save(wait=True)

    @timed("take a checkpoint", "checkpoint")
    def write(self, *, wait: bool = False) -> None:
        """Rank 0 saves a checkpoint; the others only take note of it."""
        self.saved_step = self.place.step
        sync, store = self._team.sync, self._route.store
        assert sync is not None
        self._subject.reach("saving")
        tensors = self.whole()
        if store is not None and self._team.rank == 0:
            state = State(step=self.place.step, tensors=tensors, facts=self._facts(sync.replica.scalars()))
            store.save(state, wait=wait)
        if wait and not self._team.is_elastic:
            self._team.group.barrier()

    def whole(self) -> dict[str, torch.Tensor]:
        """All state that must survive, on rank 0; others get less. All workers call it together."""
        sync, cut, parts = self._team.sync, self._team.cut, self._team.parts
        assert sync is not None
        sync.agree()
        sync.replica.show(is_average=False)
        tensors = sync.tensors()
        sync.replica.show(is_average=self.is_averaged)
        return tensors if cut is None or parts is None or self._team.copy else cut.join(tensors, parts)

    def digest(self) -> str:
        """The sha256 of the whole model, as it is now."""
        team = self._team
        self.agree()
        if team.cut is None:
            named = named_tensors(self._subject.model)
            return digest({f"model/{name}": value.detach() for name, value in named})
        whole, model = self.whole(), self._subject.model
        averages = {id(value): f"ema/{name}" for name, value in model.named_parameters()} if self.is_averaged else {}
        keys = {f"model/{name}": averages.get(id(value), f"model/{name}") for name, value in named_tensors(model)}
        present = {name: whole[key] for name, key in keys.items() if key in whole}  # on rank 0 that is all
        return str(share_facts(team.group, {"digest": digest(present)}, 0)["digest"])

    def can_resume(self) -> bool:
        """Whether there is a checkpoint to go back to. All workers ask together, and what is being saved counts."""
        store, is_there = self._route.store, False
        if store is not None and self._team.rank == 0:
            store.wait()
            is_there = bool(store.list())
        return bool(share_facts(self._team.group, {"is_there": is_there}, 0)["is_there"])

    def resume(self) -> None:
        """Go on from the newest valid checkpoint, all workers from the same."""
        recorder, store, sync = self._route.recorder, self._route.store, self._team.sync
        assert sync is not None
        if store is None or not store.list():
            recorder.event("resumed", 0, path=None)
            where = store.folder.parent if store is not None else "the run folder"
            say(f"shoal: no checkpoint in {where} yet; starting at step 0", self._team.rank)
            return
        loaded = store.load()
        setup.check_same_step(self._team.group, loaded.state.step)
        place, counts = self._read(loaded.state, self._shapes)
        cut, tensors = self._team.cut, loaded.state.tensors
        tensors = tensors if cut is None else cut.take(tensors, self._team.part)
        sync.replica.restore(tensors, counts)
        if isinstance(sync, LocalSync):
            sync.restart(tensors)
        self._team.copies.barrier()
        self.place = place
        self.saved_step = place.step
        self._plan_anew()
        if self._team.rank == 0:
            recorder.event("resumed", place.step, path=str(loaded.path), position=place.position)

    def _facts(self, counts: list[dict[str, float]]) -> dict[str, Any]:
        of, route = self._subject, self._route
        return write_progress(self.place, of.settings, route.ledger, of.optimizer, route.scheduler, counts)

    def _read(self, state: State, shapes: Mapping[str, torch.Size]) -> tuple[Place, list[dict[str, float]]]:
        of, route = self._subject, self._route
        place, counts = read_progress(state, route.ledger, of.settings, of.optimizer, route.scheduler, shapes)
        self._scheduled = place.step
        return place, counts
