"""The training loop: data to gradients, gradients to one update, step after step."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import torch
from torch import nn

from shoal.comm.connect import connect
from shoal.data.ledger import Place, StepPlan
from shoal.data.loader import Loader, load_steps
from shoal.data.readers import Loaded
from shoal.engine.env import read_worker
from shoal.spec.errors import MemberLost
from shoal.spec.event import StepMetrics
from shoal.spec.strategy import Local
from shoal.train import evaluation, setup
from shoal.train.agree import check_agreement
from shoal.train.blame import naming_samples
from shoal.train.calls import Calls
from shoal.train.compute import Compute, autocast, uncompiled
from shoal.train.course import Course, Route
from shoal.train.cut import Cut
from shoal.train.device import await_computed, equip
from shoal.train.ending import Ending
from shoal.train.errors import in_run, place_errors
from shoal.train.faulty import read_faults
from shoal.train.groups import Groups
from shoal.train.link import find_link
from shoal.train.lone import show_errors
from shoal.train.loss import Loss
from shoal.train.measure import Measurement
from shoal.train.mesh import make_mesh
from shoal.train.parts import check_batch, check_parts
from shoal.train.room import agree_on_piece, find_limit, make_room
from shoal.train.saving import say
from shoal.train.settings import make_settings
from shoal.train.skips import MOST_IN_A_ROW, Skips
from shoal.train.split.inner import InnerSteps
from shoal.train.split.make import Draft, Material, draft_split
from shoal.train.split.microbatches import largest_piece
from shoal.train.split.split import Split, Work
from shoal.train.split.whole import Whole
from shoal.train.sync.local import LocalSync
from shoal.train.sync.sync import Outcome, Standing, Totals
from shoal.train.sync.table import NotFinite
from shoal.train.team import Subject, Team
from shoal.train.traits import ChangingBuffers

T = TypeVar("T")

HOLD, STOP = 1, 2
"""What a worker may wish for after a step: to stand still for another World, or to end the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """This worker's part of one step: `pieces` are what the loss is called with, one after the other."""

    plan: StepPlan
    pieces: tuple[Any, ...]
    load_seconds: float


class Trainer:
    """Trains a model on one process or many, with the same result.

    `loss(model, batch)` returns the mean over the batch's samples, or a pair (sum, weight) where samples weigh
    differently. `batch_size` is the samples of a step over all workers. Other keywords are those of `Settings`.

    `init_from` starts from the weights of another run, checkpoint or file; with `strict=False` layers that do not
    fit are left alone and named. `resume=True` continues from the newest valid checkpoint in `run_dir`.

    Making a trainer calls `loss` once, on the first samples, to see what the model does besides computing.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: torch.optim.Optimizer,
        dataset: Any,
        *,
        batch_size: int,
        scheduler: Any = None,
        collate: Callable[[list[Any]], Any] | None = None,
        init_from: str | None = None,
        strict: bool = True,
        run_dir: str | None = None,
        resume: bool = False,
        **settings: Any,
    ) -> None:
        show_errors()
        facts = read_worker()
        number = setup.count_trainers()
        with place_errors(facts.rank), ExitStack() as opened:
            self.settings, origins = make_settings({"batch_size": batch_size, **settings}, facts.options)
            check_parts(model, loss, optimizer, scheduler)
            self.run_dir, self._recorder = setup.open_run(facts, run_dir, resume, opened)
            self.settings, self.device = equip(self.settings, model, optimizer, facts)
            self.model = uncompiled(model)
            self.optimizer, self.scheduler, self._loss = optimizer, scheduler, loss
            setup.start_from(self.model, init_from, strict, self._recorder)
            self._source = setup.make_source(dataset, collate, self.settings)
            limit = find_limit(self.settings.memory, self.device, facts.local_world_size)
            traits = setup.probe_model(self.model, loss, self._source, self.settings, self.device, facts.rank, limit)
            is_elastic = find_link(facts) is not None
            num_copies = make_mesh(facts.world_size, self.settings.split, is_elastic=is_elastic).num_copies
            self.ledger = setup.make_ledger(self.settings, self._source, traits, num_copies)
            self._buffers = ChangingBuffers(self.model, traits.changing)
            self._is_local = isinstance(self.settings.sync, Local)
            self._merges = traits.is_plain and not self.settings.exact and not self._is_local
            self._room = make_room(self.settings, traits, self.ledger, self.device, facts, self._recorder.event)
            self._room.check(limit)
            self._num_steps: int | None = None
            self._skips = Skips()
            self._held_in: int | None = None
            self._is_closed = False
            self._measurement = Measurement(self._recorder) if facts.is_measured else None
            self._ending = Ending(facts)
            self._faults = read_faults(facts, self.run_dir)
            self._compute = Compute(
                model=cast(nn.Module, torch.compile(self.model)) if self.settings.compile else model,
                loss=loss,
                buffers=self._buffers,
                settings=self.settings,
                device=self.device,
                is_random=traits.is_random,
                faults=self._faults,
            )
            self._split = self._inner(Whole(self._compute, lambda: self.rank, self._reach))
            subject = Subject(
                model=self.model,
                optimizer=optimizer,
                settings=self.settings,
                num_shards=self.ledger.num_shards,
                device=self.device,
                reach=self._reach,
                divide=self._divide,
                meet=lambda groups: self._split.meet(groups),
                buffers=self._buffers,
                homes=traits.homes,
            )
            self._team = Team(facts, number, subject)
            opened.callback(self._team.leave)
            self._cutting = self._draft()
            self._course = Course(
                self._team,
                subject,
                Route(
                    ledger=self.ledger,
                    source=self._source,
                    scheduler=scheduler,
                    buffers=self._buffers,
                    store=setup.open_store(facts, self.run_dir, self.settings, self._recorder, number, opened),
                    recorder=self._recorder,
                    is_resumed=resume or facts.is_resumed,
                ),
                self._relearn,
            )
            self._calls = Calls(self._team, self._course, number)
            if not self._team.is_elastic:
                self._team.meet()
                self._course.begin()
            sync = type(self._team.sync).__name__ if self._team.sync else "elastic"
            setup.record_settings(self._recorder, self.settings, origins, self.ledger, traits, sync)
            self._opened = opened.pop_all()

    @property
    def rank(self) -> int:
        """This worker's position among those who train now; in an elastic run it may change between two steps."""
        return self._team.rank

    @property
    def world_size(self) -> int:
        """How many workers train now."""
        return self._team.size

    @property
    def place(self) -> Place:
        """Where in the data the run is: before this step, so many samples into it."""
        return self._course.place

    # Training.

    @in_run
    def fit(self, *, epochs: int | None = None, steps: int | None = None) -> Self:
        """Train for so many more epochs or steps, then save a checkpoint.

        A resumed script reaches the calls of `fit` that it made before; what they did already is not done again.
        """
        stop_epoch, stop_step, goal = setup.next_goal(self.ledger, self._course.goal, epochs, steps)
        setup.check_rounds(self.settings, self.ledger, epochs, steps)
        with self._calls.make("fit") as call:
            if call.is_over:
                self._course.goal = goal or Place(**call.result)
                return self
            if not self._team.is_elastic:  # else some come later
                check_agreement(self._team.group, {"epochs= of fit()": epochs, "steps= of fit()": steps})
            with self._load(stop_epoch, stop_step) as batches:
                for batch in batches:
                    self.step(batch)
            self._course.goal = goal or self.place
            self._team.together(self._course.agree, self._course)
            if self._measurement is not None:
                self._measurement.end()
            self._course.keep()
            call.result = asdict(self.place)
        return self

    @in_run
    def __iter__(self) -> Iterator[Batch]:
        """This worker's batches of one epoch, or of the rest of it: `for batch in trainer: trainer.step(batch)`."""
        stop_epoch, stop_step, goal = setup.next_goal(self.ledger, self._course.goal, 1, None)
        with self._calls.make("iterate") as call:
            if call.is_over:
                self._course.goal = Place(**call.result)
                return
            try:
                with self._load(stop_epoch, stop_step) as batches:
                    for batch in batches:
                        with self._team.apart(True):
                            yield batch
                if self._team.is_elastic:
                    self._course.keep()  # as `fit` does
            except GeneratorExit:
                goal = self.place  # the caller left the loop: what follows goes on from here
                raise
            finally:
                self._course.goal = goal or self.place
                call.result = asdict(self._course.goal)

    @contextmanager
    def _load(self, stop_epoch: int | None, stop_step: int | None) -> Iterator[Iterator[Batch]]:
        self._num_steps = setup.last_step(self.ledger, stop_epoch, stop_step)
        start = partial(self._start_loader, stop_epoch, stop_step)
        with place_errors(self.rank, lambda: self.place.step), self._stepping(), self._course.load(start) as feed:
            yield map(self._batch, feed)

    def _start_loader(self, stop_epoch: int | None, stop_step: int | None, place: Place) -> Loader:
        self._enter_room(place.step)
        return load_steps(
            self._source,
            self.ledger,
            place,
            self._course.shares(),  # a loader that is on its way out does not plan with the next ones
            merge=self._merges,
            max_piece=self._largest_piece(),
            stop_step=stop_step,
            stop_epoch=stop_epoch,
            num_processes=self.settings.loaders,
        )

    def _relearn(self, step: int) -> None:
        """Take steps again, up to this one, for what nobody has learned who is left."""
        feed = self._course.feed
        with self._course.load(partial(self._start_loader, None, step)) as again:
            for loaded in again:
                self._step(self._batch(loaded))
        self._course.feed = feed

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        """Inside, steps follow each other: only then can newcomers be let in, and the end of a step be waited for."""
        link = self._team.link
        try:
            self._ending.is_stepping = True
            if link is not None:
                link.tell_stepping(True)
            yield
        finally:
            self._ending.is_stepping = False
            if link is not None:
                link.tell_stepping(False)

    def _batch(self, loaded: Loaded) -> Batch:
        assert self._course.feed is not None
        return Batch(plan=loaded[0], pieces=loaded[1], load_seconds=self._course.feed.loader.load_seconds)

    @in_run
    def step(self, batch: Batch) -> float:
        """Train on one batch, together with all other workers. Returns the loss over the whole global batch.

        A step whose loss or gradient is no number is not taken: its loss is NaN.
        """
        check_batch(batch, Batch, is_averaged=self._course.is_averaged)
        with self._team.apart(False):
            loss = self._step(batch)
            # A worker that was lost took with it what it alone had learned: the others went back for that.
            while self._is_local and self.place.step < batch.plan.after.step and self._course.feed is not None:
                loss = self._step(self._batch(next(self._course.feed)))
            return loss

    def _step(self, batch: Batch) -> float:
        current = self._stand_still(batch)
        if current is None:
            return self._loss_of_others()
        batch, started = current, time.perf_counter()
        outcome: Outcome | NotFinite | None = None
        while outcome is None:
            is_interrupted = False
            try:
                outcome = self._attempt(batch)
                self._course.conclude(outcome)
            except NotFinite as error:
                outcome = error
                self._course.conclude(outcome)
            except MemberLost:
                if not self._team.is_elastic:
                    raise
                is_interrupted = True
                self._course.give_up()
                outcome = self._team.reform(self._course)
                if self.rank == 0:
                    self._recorder.event("step_settled", batch.plan.step, is_completed=outcome is not None)
                if outcome is None:  # it never happened: again, with other shards
                    following = self._after_loss(batch)
                    if following is None:
                        return self._loss_of_others()
                    batch = following
        if isinstance(outcome, NotFinite):
            return self._skip(batch.plan, outcome)
        self._record(batch, outcome, started, self._course.compute_seconds)
        self._fit_pieces(batch.plan)
        if not is_interrupted and self._save_in_time():
            self._agree_on_more(batch.plan, outcome.totals)
        elif outcome.totals.wish == STOP:  # all else that the workers said to each other was about another World
            self._end()
        return outcome.totals.loss

    def _loss_of_others(self) -> float:
        """Of a step that was taken without us."""
        return self._team.sync.loss if isinstance(self._team.sync, LocalSync) else math.nan

    def _after_loss(self, batch: Batch) -> Batch | None:
        """What to do instead of a batch that was interrupted; None where it was done without us, and nothing follows.

        Whoever stood aside goes on where the others are. Copies that train by themselves have done their own part.
        """
        is_behind = self.place.step > batch.plan.step
        if self._course.feed is None or (is_behind and self._is_local):
            return None if is_behind else batch
        loaded = next(self._course.feed, None)
        return None if loaded is None else self._batch(loaded)

    def _attempt(self, batch: Batch) -> Outcome:
        """Forward and backward of this worker's part, then sum and update with everybody."""
        started = time.perf_counter()
        plan, sync = batch.plan, self._team.sync
        assert sync is not None
        if self._is_local:  # nothing else in a step would tell that a worker is lost
            self._team.check_world()
        assignment = self._course.schedule.at(plan.step)
        self._course.attempt(plan)
        self._room.open()
        if self._faults is not None:
            self._faults.corrupt(sync.replica.flat.values, plan.step)
        self._reach("start")
        sync.begin(self.ledger.num_shards, assignment)
        self._split.run(
            Work(
                plan=plan,
                pieces=batch.pieces,
                mine=assignment[self._team.copy],
                at_start=self._course.at_start,
                sync=sync,
                standing=lambda: self._standing(plan.step),
            )
        )
        await_computed(self.device)
        # Waiting for others while backward goes on says nothing about how fast this worker is.
        self._course.compute_seconds = time.perf_counter() - started - sync.gradients.stalled
        self._reach("backward")
        if self._course.is_first:
            setup.check_unused(self._team.group, sync, self.settings.unused)
        with naming_samples(self.ledger, self._source, plan, assignment):
            return sync.finish()

    def _draft(self) -> Draft | None:
        """Find out how the model can be cut, if it is to be: whoever joins later does not keep the others waiting."""
        if self.settings.split is None or self._team.mesh.num_parts == 1:
            return None
        material = Material(
            compute=self._compute,
            optimizer=self.optimizer,
            first=setup.first_samples(self._source, max(2, self._largest_piece() or self.settings.batch_size)),
            few=setup.first_samples(self._source, min(self.settings.microbatch_size or 2, 2)),
            recorder=self._recorder,
            rank=lambda: self.rank,
            reach=self._reach,
        )
        return draft_split(self.settings.split, material)

    def _divide(self, groups: Groups, known: Mapping[str, Any] | None) -> Cut:
        """Hold only our part of the model from here on. `known`: how the others' models were cut before."""
        assert self._cutting is not None
        split, cut = self._cutting.divide(groups, known)
        self._split, self._cutting = self._inner(split), None
        piece = known["piece"] if known is not None else agree_on_piece(self._room, self.model, groups.everyone)
        self._room.share(piece)
        return replace(cut, facts={**cut.facts, "piece": piece})

    def _inner(self, split: Split) -> Split:
        """Where copies train by themselves, each shard is a batch of its own to them."""
        return InnerSteps(split, self._buffers, self._leave_out) if self._is_local else split

    def _leave_out(self, plan: StepPlan, error: NotFinite) -> None:
        """A batch of this copy's own was no good. Only this worker leaves it out."""
        try:
            mine = [range(0)] * self._team.copy + [plan.cut.mine]
            with naming_samples(self.ledger, self._source, plan, mine):
                raise error
        except NotFinite as named:
            self._tell_skipped(plan, named)

    def _tell_skipped(self, plan: StepPlan, error: NotFinite) -> None:
        error.at(step=plan.step)
        if self.settings.not_finite == "error":
            raise error
        self._recorder.event("step_skipped", plan.step, message=error.message, samples=list(error.samples))
        rank = 0 if self._is_local else self.rank  # else all say the same, and one is enough
        say(f"{error.render()}\n  now: the step is left out".replace("error:", "warning:", 1), rank)

    def _largest_piece(self) -> int | None:
        """Most samples in one forward."""
        asked = largest_piece(self.settings, self.ledger, self._team.mesh.num_copies, is_merging=self._merges)
        return min((bound for bound in (asked, self._room.piece) if bound is not None), default=None)

    def _enter_room(self, step: int) -> None:
        """Before anything is loaded: may its pieces be as large as they can be? Shares move, so twice ours count."""
        share = 2 * -(-self.settings.batch_size // self._team.mesh.num_copies)
        if self._room.enter(min(self.settings.batch_size, share, self.settings.microbatch_size or share)):
            setup.record_worker(self._recorder, step, self.settings, self.device, self._room)

    def _fit_pieces(self, plan: StepPlan) -> None:
        """Let pieces be as large as memory holds, now that it is known what a step of ours takes."""
        largest = max((piece.num_samples for piece in plan.pieces), default=0)
        if self._room.close(plan.step, largest) and self._course.feed is not None:
            self._course.feed.drop()

    def _reach(self, point: str) -> None:
        """What is to go wrong on purpose goes wrong here."""
        if self._faults is not None:
            self._faults.reach(point, self.place.step)

    def _save_in_time(self) -> bool:
        """Save a checkpoint if one is due. False if a worker was lost meanwhile: then the next step makes one."""
        every = self.settings.checkpoint_every
        try:
            if every and self._course.is_due(every):
                self._course.write()
            return True
        except MemberLost:
            if not self._team.is_elastic:
                raise
            self._team.reform(self._course)
            return False

    def _agree_on_more(self, plan: StepPlan, totals: Totals) -> None:
        """Shares, repairs, newcomers, the end: all workers decide the same, each from the same numbers."""
        if self.settings.balance and self._team.mesh.num_copies > 1 and totals.has_news:
            self._course.rebalance(totals.seconds_per_sample)
        if self._measurement is not None:
            self._measurement.add(plan.count, totals.seconds_per_sample)
        if len(set(totals.checksums)) > 1:
            self._course.repair(totals.checksums)
        if totals.wish == STOP:
            self._end()
        if totals.wish == HOLD and self._team.world is not None:
            self._held_in = self._team.world.generation

    def _skip(self, plan: StepPlan, error: NotFinite) -> float:
        """A step was left out, on all workers alike; after several in a row go back to the last checkpoint."""
        self._tell_skipped(plan, error)
        if self._skips.add(plan.step):
            if not self._skips.may_go_back(plan.step) or not self._course.can_resume():
                raise error
            self._team.together(self._course.resume, self._course)
            say(f"shoal: {MOST_IN_A_ROW} steps in a row were no good; back to step {self.place.step}", self.rank)
        return math.nan

    def _record(self, batch: Batch, outcome: Outcome, started: float, compute: float) -> None:
        plan = batch.plan
        spent = time.perf_counter() - started
        self._recorder.step(
            StepMetrics(
                step=plan.step,
                time=time.time(),
                epoch=plan.epoch,
                loss=outcome.totals.loss,
                num_samples=plan.num_samples,
                global_samples=plan.count,
                lr=float(self.optimizer.param_groups[0]["lr"]),
                compute=compute,
                communicate=outcome.communicate,
                wait=outcome.wait,
                load=batch.load_seconds,
                other=max(0.0, spent - compute - outcome.communicate - outcome.wait),
                waited_for=None if outcome.waited_for is None else self._team.worker_of(outcome.waited_for),
                grad_norm=outcome.norm,
            ),
            self._num_steps,
        )

    # The World.

    def _stand_still(self, batch: Batch) -> Batch | None:
        """Wait for another World, as all others do before this step, if that was agreed on after the last.

        What a script does between two steps is over by now: those who come in know nothing of it. Returns what is to
        be done then, see `_after_loss`.
        """
        link, world, held_in = self._team.link, self._team.world, self._held_in
        self._held_in = None
        if link is None or world is None or world.generation != held_in:
            return batch
        link.send(
            "boundary",
            generation=world.generation,
            trainer=link.trainer,
            call=link.call,
            step=self.place.step,
            most_leaving=self._team.most_leaving,
        )
        self._team.reform(self._course)
        return self._after_loss(batch)

    def _standing(self, step: int) -> Standing:
        assert self._team.sync is not None
        return Standing(
            step=step,
            seconds_per_sample=self._course.speed.seconds_per_sample() or 0.0,
            wish=self._wish(),
            checksum=self._team.sync.checksum(step),
        )

    def _wish(self) -> int:
        link = self._team.link
        if self._ending.is_asked or (link is not None and link.is_stopping):
            return STOP
        return HOLD if link is not None and link.is_held else 0

    def _end(self) -> None:
        """Save what there is and end, because we were asked to."""
        self._course.keep()
        if self._ending.is_asked:
            self._ending.end()
        raise SystemExit(143)

    # State.

    @in_run
    def save(self, *, wait: bool = False) -> None:
        """Save a checkpoint of this moment, in the background unless `wait`. All workers call it; rank 0 writes.

        With `wait` none of them returns before it is on disk, so that any may read it then.
        """
        with self._calls.make("save") as call:
            if not call.is_over:
                self._course.save(wait=wait)

    def digest(self) -> str:
        """The sha256 of the model's parameters and buffers: equal exactly if they are equal bit for bit.

        Where workers hold parts of the model, all of them call it together.
        """
        sync = self._team.sync
        is_divided = sync is not None and (self._is_local or sync.replica.holding is not None)
        return self._team.together(self._course.digest, self._course) if is_divided else self._course.digest()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the model has its averaged parameters (`ema=`), and cannot be trained."""
        self._team.together(lambda: self._course.show_average(True), self._course)
        try:
            yield
        except BaseException:
            self._course.show_average(False)  # the others may not come to the end of the block
            raise
        self._team.together(lambda: self._course.show_average(False), self._course)

    # Using the model.

    def evaluate(self, dataset: Any, loss: Loss | None = None) -> dict[str, float]:
        """The loss, or what `loss` measures, over a dataset, every sample counted once. See `evaluation.evaluate`."""
        result: dict[str, float] = self._use("evaluate", evaluation.evaluate, loss or self._loss, dataset)
        return result

    def predict(self, dataset: Any, forward: evaluation.Forward = evaluation.call_model) -> Any:
        """The model's outputs for a dataset, in its order, on every worker. See `evaluation.predict`."""
        return self._use("predict", evaluation.predict, forward, dataset)

    @in_run
    def _use(self, name: str, act: Callable[..., Any], function: Callable[..., Any], dataset: Any) -> Any:
        # Samples of one forward: a function of the settings alone, so that results do not depend on the workers.
        block = min(self.settings.microbatch_size or self.settings.batch_size, -(-self.settings.batch_size // 4))
        with place_errors(self.rank), autocast(self.settings.precision, self.device):
            source = setup.make_source(dataset, None, self.settings, is_whole=False)
            with self._calls.make(name) as call:
                if not call.is_over:
                    self._team.together(self._course.agree, self._course)
                    result = self._team.together(
                        lambda: act(
                            self.model,
                            self._split.use,
                            function,
                            source,
                            self._team.copies,
                            block,
                            self.device,
                            self._room.piece,
                        ),
                        self._course,
                    )
                    call.result = result if name == "evaluate" else None
                    return result
            if name == "predict":  # what the others got may be large, so it was not kept: make it again, alone
                return act(self.model, self._split.use, function, source, connect(0, 1), block, self.device)
            return call.result

    def close(self) -> None:
        """Finish writing, leave the group, and give the parameters memory of their own.

        Raises UserError if the last checkpoint could not be saved.
        """
        if self._team.sync is not None and not self._is_closed and self._team.sync.replica.holding is not None:
            self._team.together(self._course.agree, self._course)
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closed = True
        with place_errors(self.rank):
            self._opened.__exit__(kind, error, trace)
