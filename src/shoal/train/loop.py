"""The training loop: data to gradients, gradients to one update, step after step."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import torch
from torch import nn

from shoal.checkpoint.state import State, digest
from shoal.data.ledger import Piece, StepPlan
from shoal.data.loader import load_steps
from shoal.data.shares import Schedule, Speed, rebalance
from shoal.engine.env import read_worker
from shoal.spec.event import StepMetrics
from shoal.train import evaluation, setup
from shoal.train.agree import check_agreement, check_same, facts_of
from shoal.train.blame import naming_samples
from shoal.train.errors import in_run, in_user_code, place_errors
from shoal.train.lone import show_errors
from shoal.train.loss import Loss, as_sum, check_differentiable, move
from shoal.train.measure import Measurement
from shoal.train.parts import check_batch, check_parts
from shoal.train.resume import read_progress, write_progress
from shoal.train.saving import say
from shoal.train.settings import make_settings
from shoal.train.sync.sync import Outcome, Row
from shoal.train.traits import ChangingBuffers, seed_of

T = TypeVar("T")

BALANCE_EVERY = 10
"""Steps between looks at the workers' speeds."""


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
        self.rank, self.world_size = facts.rank, facts.world_size
        number = setup.count_trainers()
        with place_errors(self.rank), ExitStack() as opened:
            self.settings, origins = make_settings({"batch_size": batch_size, **settings}, facts.options)
            check_parts(model, loss, optimizer, scheduler)
            self.run_dir, self._recorder = setup.open_run(facts, run_dir, resume, opened)
            setup.set_threads(self.settings)
            self.device = setup.place_model(model, facts)
            self.model = setup.uncompiled(model)
            self._called = cast(nn.Module, torch.compile(self.model)) if self.settings.compile else model
            self.optimizer, self.scheduler, self._loss = optimizer, scheduler, loss
            setup.start_from(self.model, init_from, strict, self._recorder)
            self._source = setup.make_source(dataset, collate, self.settings)
            self._group = setup.connect(facts, self.device, self.settings, number, opened)
            traits = setup.probe_model(self.model, loss, self._source, self.settings, self.device, self.rank)
            self.ledger = setup.make_ledger(self.settings, self._source, traits, self.world_size)
            check_same(self._group, self.model, optimizer, facts_of(self.settings, self.ledger, scheduler))
            setup.check_same_data(self._group, self._source, self._recorder)
            self._sync = setup.make_sync(self._group, self.model, optimizer, self.settings, self.ledger.num_shards)
            opened.callback(self._sync.close)
            self._store = setup.open_store(facts, self.run_dir, self.settings, self._recorder, number, opened)
            self._buffers = ChangingBuffers(self.model, traits.changing)
            self._merges = traits.is_plain and not self.settings.exact
            self._draws = traits.is_random
            self._schedule = Schedule(self.ledger.num_shards, [1 / self.world_size] * self.world_size)
            self._speed = Speed()
            self.place = self.ledger.place(0)
            self._goal = self.place
            self._num_steps: int | None = None
            self._saved_step = -1
            self._is_first = True
            self._is_closed = False
            self._measurement = Measurement(self._recorder) if facts.is_measured else None
            setup.record_settings(self._recorder, self.settings, origins, self.ledger, traits, self._sync)
            if resume or facts.is_resumed:
                self._resume()
            self._opened = opened.pop_all()

    # Training.

    @in_run
    def fit(self, *, epochs: int | None = None, steps: int | None = None) -> Self:
        """Train for so many more epochs or steps, then save a checkpoint.

        A resumed script reaches the calls of `fit` that it made before; what they did already is not done again.
        """
        stop_epoch, stop_step, goal = setup.next_goal(self.ledger, self._goal, epochs, steps)
        check_agreement(self._group, {"epochs= of fit()": epochs, "steps= of fit()": steps})
        with self._load(stop_epoch, stop_step) as batches:
            for batch in batches:
                self.step(batch)
        self._goal = goal or self.place
        if self._measurement is not None:
            self._measurement.end()
        if self.place.step != self._saved_step:
            self.save(wait=True)
        return self

    @in_run
    def __iter__(self) -> Iterator[Batch]:
        """This worker's batches of one epoch, or of the rest of it: `for batch in trainer: trainer.step(batch)`."""
        stop_epoch, stop_step, goal = setup.next_goal(self.ledger, self._goal, 1, None)
        try:
            with self._load(stop_epoch, stop_step) as batches:
                yield from batches
        except GeneratorExit:
            goal = self.place  # the caller left the loop: what follows goes on from here
            raise
        finally:
            self._goal = goal or self.place

    @contextmanager
    def _load(self, stop_epoch: int | None, stop_step: int | None) -> Iterator[Iterator[Batch]]:
        self._num_steps = setup.last_step(self.ledger, stop_epoch, stop_step)
        loader = load_steps(
            self._source,
            self.ledger,
            self.place,
            lambda step: self._schedule.at(step)[self.rank],
            merge=self._merges,
            max_piece=self.settings.microbatch_size,
            stop_step=stop_step,
            stop_epoch=stop_epoch,
            num_processes=self.settings.loaders,
        )
        self._depth = loader.depth
        with place_errors(self.rank, lambda: self.place.step), loader:
            yield (Batch(plan=plan, pieces=pieces, load_seconds=loader.load_seconds) for plan, pieces in loader)

    @in_run
    def step(self, batch: Batch) -> float:
        """Train on one batch, together with all other workers. Returns the loss over the whole global batch."""
        started = time.perf_counter()
        check_batch(batch, Batch)
        plan, sync = batch.plan, self._sync
        assignment = self._schedule.at(plan.step)
        sync.begin(self.ledger.num_shards, assignment)
        at_start = self._buffers.read() if self._buffers else None
        rows: list[Row] = []

        for index, (piece, data) in enumerate(zip(plan.pieces, batch.pieces, strict=True)):
            is_last = index + 1 == len(plan.pieces)
            with in_user_code(self.rank, plan.step, data, "loss(model, batch)", self._loss):
                total, factor, row = self._forward(plan, piece, data, at_start)
            rows.append(row)
            if is_last:
                # Before the last backward: so everyone knows what the whole batch weighs when sums are taken.
                sync.post(rows, assignment[self.rank], self._speed.seconds_per_sample() or 0.0)
            sync.gradients.open((piece.shards.start, piece.shards.stop), is_last=is_last)
            with in_user_code(self.rank, plan.step, data, "the backward of the loss"):
                total.backward(gradient=torch.tensor(factor, dtype=total.dtype, device=total.device))
            sync.gradients.close()
        if not rows:
            sync.post(rows, assignment[self.rank], 0.0)

        computed = time.perf_counter()
        if self._is_first:
            setup.check_unused(self._group, sync, self.settings.unused)
            self._is_first = False
        with naming_samples(self.ledger, self._source, plan, assignment):
            outcome = sync.finish()
        if at_start is not None and outcome.totals.buffers is not None:
            self._buffers.write(outcome.totals.buffers)
        self.place = plan.after
        self._speed.add(computed - started, plan.num_samples)
        self._after_step(plan, outcome)
        self._record(batch, outcome, started, computed - started)
        if self._measurement is not None:
            self._measurement.add(plan.count, outcome.totals.seconds_per_sample)
        return outcome.totals.loss

    def _forward(
        self, plan: StepPlan, piece: Piece, data: Any, at_start: torch.Tensor | None
    ) -> tuple[torch.Tensor, float, Row]:
        """The loss of one piece: what to differentiate, the factor that makes it a sum, and what to tell others."""
        if self._draws:
            torch.manual_seed(seed_of(self.settings.seed, plan.step, piece.shards.start))
        if at_start is not None:
            self._buffers.write(at_start)
        with setup.autocast(self.settings.precision, self.device):
            result = self._loss(self._called, move(data, self.device))
        total, factor, weight = as_sum(result, piece.num_samples)
        check_differentiable(total)
        row = Row(
            shard=piece.shards.start,
            weight=weight,
            loss=float(total.detach()) * factor,
            num_samples=piece.num_samples,
            buffers=self._buffers.read() if at_start is not None else None,
        )
        return total, factor, row

    def _after_step(self, plan: StepPlan, outcome: Outcome) -> None:
        """Schedulers, shares and checkpoints: all workers decide the same, each from the same numbers."""
        ended_epoch = self.place.epoch > plan.epoch
        if self.scheduler is not None and (self.settings.schedule == "step" or ended_epoch):
            self.scheduler.step()
        if self.settings.balance and self.world_size > 1 and self.place.step % BALANCE_EVERY == 0:
            self._rebalance(outcome.totals.seconds_per_sample)
        every = self.settings.checkpoint_every
        if every and self.place.step % every == 0:
            self.save()

    def _rebalance(self, seconds_per_sample: tuple[float, ...]) -> None:
        # No worker can have planned further than this: its loader is at most so many steps ahead.
        effective = self.place.step + self._depth
        shares = self._schedule.shares_at(effective)
        better = rebalance(shares, seconds_per_sample, num_shards=self.ledger.num_shards)
        if better == shares:
            return
        self._schedule.change(effective, better)
        self._speed.clear()
        if self.rank == 0:
            self._recorder.event("rebalanced", effective, shares=better, seconds_per_sample=seconds_per_sample)

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
                waited_for=outcome.waited_for,
                grad_norm=outcome.norm,
            ),
            self._num_steps,
        )

    # State.

    @in_run
    def save(self, *, wait: bool = False) -> None:
        """Save a checkpoint of this moment, in the background unless `wait`. All workers call it; rank 0 writes.

        With `wait` none of them returns before it is on disk, so that any may read it then.
        """
        self._saved_step = self.place.step
        if self._store is not None and self.rank == 0:
            facts = write_progress(
                self.place, self.settings, self.ledger, self.optimizer, self.scheduler, self._sync.replica
            )
            tensors = dict(self._sync.replica.tensors())
            self._store.save(State(step=self.place.step, tensors=tensors, facts=facts), wait=wait)
        if wait:
            self._sync.barrier()

    def _resume(self) -> None:
        if self._store is None or not self._store.list():
            self._recorder.event("resumed", 0, path=None)
            say(f"shoal: no checkpoint in {self.run_dir} yet; starting at step 0", self.rank)
            return
        loaded = self._store.load()
        setup.check_same_step(self._group, loaded.state.step)
        place, scalars = read_progress(
            loaded.state, self.ledger, self.settings, self.optimizer, self.scheduler, self.model
        )
        self._sync.replica.restore(loaded.state.tensors, scalars)
        self._sync.barrier()
        self.place = place
        self._saved_step = self.place.step
        if self.rank == 0:
            self._recorder.event("resumed", self.place.step, path=str(loaded.path), position=place.position)

    def digest(self) -> str:
        """The sha256 of the model's parameters and buffers: equal exactly if they are equal bit for bit."""
        return digest({name: value for name, value in self._sync.replica.tensors() if name.startswith("model/")})

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the model has its averaged parameters (`ema=`); all workers enter and leave together."""
        self._sync.barrier()
        self._sync.replica.swap_average()
        self._sync.barrier()
        try:
            yield
        finally:
            self._sync.barrier()
            self._sync.replica.swap_average()
            self._sync.barrier()

    # Using the model.

    def evaluate(self, dataset: Any, loss: Loss | None = None) -> dict[str, float]:
        """The loss, or what `loss` measures, over a dataset, every sample counted once. See `evaluation.evaluate`."""
        return self._use(evaluation.evaluate, loss or self._loss, dataset)

    def predict(self, dataset: Any, forward: evaluation.Forward = evaluation.call_model) -> Any:
        """The model's outputs for a dataset, in its order, on every worker. See `evaluation.predict`."""
        return self._use(evaluation.predict, forward, dataset)

    @in_run
    def _use(self, act: Callable[..., T], function: Callable[..., Any], dataset: Any) -> T:
        # Samples of one forward: a function of the settings alone, so that results do not depend on the workers.
        block = min(self.settings.microbatch_size or self.settings.batch_size, -(-self.settings.batch_size // 4))
        with place_errors(self.rank), setup.autocast(self.settings.precision, self.device):
            source = setup.make_source(dataset, None, self.settings, is_whole=False)
            return act(self.model, function, source, self._group, block, self.device)

    def close(self) -> None:
        """Finish writing, leave the group, and give the parameters memory of their own.

        Raises UserError if the last checkpoint could not be saved.
        """
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closed = True
        with place_errors(self.rank):
            self._opened.__exit__(kind, error, trace)
