"""The training loop: data to gradients, gradients to one update, step after step."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import torch
from torch import nn

from shoal.comm.connect import connect
from shoal.data.ledger import Place
from shoal.data.loader import Loader, load_steps
from shoal.engine.env import read_worker
from shoal.spec.strategy import Local
from shoal.train import evaluation, setup
from shoal.train.agree import check_agreement
from shoal.train.asked import Asked
from shoal.train.calls import Calls
from shoal.train.compute import Compute, autocast, uncompiled
from shoal.train.course import Course, Route
from shoal.train.cut import Cut
from shoal.train.device import equip
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
from shoal.train.settings import make_settings
from shoal.train.split.inner import InnerSteps
from shoal.train.split.make import Draft, Material, draft_split
from shoal.train.split.microbatches import largest_piece
from shoal.train.split.split import Split
from shoal.train.split.whole import Whole
from shoal.train.steps import Batch, Steps
from shoal.train.team import Subject, Team
from shoal.train.traits import ChangingBuffers

T = TypeVar("T")


class Trainer:
    """Trains a model on one process or many, with the same result.

    `loss(model, batch)` returns the mean over the batch's samples, or a pair (sum, weight) where samples weigh
    differently. `batch_size` is the samples of a step over all workers. Other keywords are those of `Settings`.

    `init_from` starts from the weights of another run, checkpoint or file; with `strict=False` layers that do not
    fit are left alone and named. `resume=True` continues from the newest valid checkpoint in
    `checkpoint_dir`, or else in `run_dir`.

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
            is_elastic = find_link(facts) is not None
            num_copies = make_mesh(facts.world_size, self.settings.split, is_elastic=is_elastic).num_copies
            # With a place of their own for checkpoints, the folder is that of a new run.
            is_continued = resume and self.settings.checkpoint_dir is None
            self.run_dir, self._recorder = setup.open_run(facts, run_dir, is_continued, opened)
            self.settings, self.device = equip(self.settings, model, optimizer, facts)
            self.model = uncompiled(model)
            self.optimizer, self.scheduler, self._loss = optimizer, scheduler, loss
            setup.start_from(self.model, init_from, strict, self._recorder)
            self._source = setup.make_source(dataset, collate, self.settings)
            limit = find_limit(self.settings.memory, self.device, facts.local_world_size)
            traits = setup.probe_model(self.model, loss, self._source, self.settings, self.device, facts.rank, limit)
            self.ledger = setup.make_ledger(self.settings, self._source, traits, num_copies)
            self._buffers = ChangingBuffers(self.model, traits.changing)
            self._is_local = isinstance(self.settings.sync, Local)
            self._merges = traits.is_plain and not self.settings.exact and not self._is_local
            self._room = make_room(self.settings, traits, self.ledger, self.device, facts, self._recorder.event)
            self._room.check(limit)
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
            subject = Subject(
                model=self.model,
                optimizer=optimizer,
                settings=self.settings,
                num_shards=self.ledger.num_shards,
                device=self.device,
                reach=self._reach,
                divide=self._divide,
                meet=lambda groups: self._steps.split.meet(groups),
                buffers=self._buffers,
                homes=traits.homes,
            )
            self._team = Team(facts, number, subject)
            opened.callback(self._team.leave)
            asked = Asked(self.run_dir, facts.rank, self._recorder)
            opened.callback(asked.close)
            self._cutting = self._draft()
            self._course = Course(
                self._team,
                subject,
                Route(
                    ledger=self.ledger,
                    source=self._source,
                    scheduler=scheduler,
                    buffers=self._buffers,
                    store=setup.open_store(
                        facts, self.run_dir, self.settings, self._recorder, number, opened, resume or facts.is_resumed
                    ),
                    recorder=self._recorder,
                    is_resumed=resume or facts.is_resumed,
                ),
                self._relearn,
            )
            self._steps = Steps(
                settings=self.settings,
                optimizer=optimizer,
                ledger=self.ledger,
                source=self._source,
                device=self.device,
                team=self._team,
                course=self._course,
                split=self._inner(Whole(self._compute, lambda: self.rank, self._reach)),
                room=self._room,
                recorder=self._recorder,
                ending=self._ending,
                measurement=self._measurement,
                faults=self._faults,
                reach=self._reach,
                asked=asked,
            )
            self._calls = Calls(self._team, self._course, number, self._recorder)
            num_parameters = sum(value.numel() for value in self.model.parameters())
            if not self._team.is_elastic:
                self._team.meet()
                self._course.begin()  # from here on the model may be divided
            sync = type(self._team.sync).__name__ if self._team.sync else "elastic"
            setup.record_settings(self._recorder, self.settings, origins, self.ledger, traits, sync, num_parameters)
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
                if self.rank == 0:
                    self._recorder.event("goal", self.place.step, num_steps=self._steps.num_steps)
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
        if self.place.step == 0:
            setup.tell_round(self.settings, self.ledger, self.rank)
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
        self._steps.num_steps = setup.last_step(self.ledger, stop_epoch, stop_step)
        start = partial(self._start_loader, stop_epoch, stop_step)
        with place_errors(self.rank, lambda: self.place.step), self._stepping(), self._course.load(start) as feed:
            yield map(self._steps.batch_of, feed)

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
                self._steps.take(self._steps.batch_of(loaded))
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

    @in_run
    def step(self, batch: Batch) -> float:
        """Train on one batch, together with all other workers. Returns the loss over the whole global batch.

        A step whose loss or gradient is no number is not taken: its loss is NaN.
        """
        check_batch(batch, Batch, is_averaged=self._course.is_averaged)
        with self._team.apart(False):
            loss = self._steps.take(batch)
            # A worker that was lost took with it what it alone had learned: the others went back for that.
            while self._is_local and self.place.step < batch.plan.after.step and self._course.feed is not None:
                loss = self._steps.take(self._steps.batch_of(next(self._course.feed)))
            return loss

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
        self._steps.split, self._cutting = self._inner(split), None
        piece = known["piece"] if known is not None else agree_on_piece(self._room, self.model, groups.everyone)
        self._room.share(piece)
        return replace(cut, facts={**cut.facts, "piece": piece})

    def _inner(self, split: Split) -> Split:
        """Where copies train by themselves, each shard is a batch of its own to them."""
        if not self._is_local:
            return split
        return InnerSteps(split, self._buffers, lambda plan, error: self._steps.leave_out(plan, error))

    def _largest_piece(self) -> int | None:
        """Most samples in one forward."""
        asked = largest_piece(self.settings, self.ledger, self._team.mesh.num_copies, is_merging=self._merges)
        return min((bound for bound in (asked, self._room.piece) if bound is not None), default=None)

    def _enter_room(self, step: int) -> None:
        """Before anything is loaded: may its pieces be as large as they can be? Shares move, so twice ours count."""
        share = 2 * -(-self.settings.batch_size // self._team.mesh.num_copies)
        if self._room.enter(min(self.settings.batch_size, share, self.settings.microbatch_size or share)):
            setup.record_worker(self._recorder, step, self.settings, self.device, self._room)

    def _reach(self, point: str) -> None:
        """What is to go wrong on purpose goes wrong here."""
        if self._faults is not None:
            self._faults.reach(point, self.place.step)

    # The World.

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
                            self._steps.split.use,
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
                return act(self.model, self._steps.split.use, function, source, connect(0, 1), block, self.device)
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
