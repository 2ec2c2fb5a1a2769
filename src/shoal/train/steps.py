"""One step after the other: attempted, settled if a worker is lost, left out if it is no good, and what follows."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shoal.data.ledger import Ledger, StepPlan
from shoal.data.readers import Loaded
from shoal.data.sources import Source
from shoal.observe.recorder import Recorder
from shoal.spec.errors import MemberLost
from shoal.spec.event import StepMetrics
from shoal.spec.spans import SPANS
from shoal.spec.strategy import Local
from shoal.train import setup
from shoal.train.asked import Asked
from shoal.train.blame import name_samples
from shoal.train.course import Course
from shoal.train.device import await_computed
from shoal.train.divergence import Diverged
from shoal.train.ending import Ending
from shoal.train.faulty import FaultPlan
from shoal.train.loss import count_values
from shoal.train.measure import Measurement
from shoal.train.room import Room
from shoal.train.saving import say
from shoal.train.settings import Settings
from shoal.train.skips import MOST_IN_A_ROW, Skips
from shoal.train.split.split import Split, Work
from shoal.train.stalls import divide_stall
from shoal.train.sync.local import LocalSync
from shoal.train.sync.sync import Outcome, Standing, Totals
from shoal.train.sync.table import NotFinite
from shoal.train.team import Team

HOLD, STOP = 1, 2
"""What a worker may wish for after a step: to stand still for another World, or to end the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """This worker's part of one step: `pieces` are what the loss is called with, one after the other."""

    plan: StepPlan
    pieces: tuple[Any, ...]
    load_seconds: float


@dataclass(kw_only=True, eq=False)
class Steps:
    """Takes steps with everybody in the newest World, until they are done or were never meant to be.

    `split` is how this worker computes its part; it changes once, when the model is cut. `num_steps` is where the
    run will end, if that is known. `reach` is called at points at which something may be made to go wrong.
    """

    settings: Settings
    optimizer: torch.optim.Optimizer
    ledger: Ledger
    source: Source
    device: torch.device
    team: Team
    course: Course
    split: Split
    room: Room
    recorder: Recorder
    ending: Ending
    measurement: Measurement | None
    faults: FaultPlan | None
    reach: Callable[[str], None]
    asked: Asked
    num_steps: int | None = None
    _skips: Skips = field(init=False, default_factory=Skips)
    _held_in: int | None = field(init=False, default=None)
    _stalled: tuple[float, float] = field(init=False, default=(0.0, 0.0))
    _assignment: Sequence[range] = field(init=False, default=())

    @property
    def is_local(self) -> bool:
        """Copies train by themselves between the moments at which all agree."""
        return isinstance(self.settings.sync, Local)

    def batch_of(self, loaded: Loaded) -> Batch:
        assert self.course.feed is not None
        return Batch(plan=loaded[0], pieces=loaded[1], load_seconds=self.course.feed.loader.load_seconds)

    def take(self, batch: Batch) -> float:
        """Train on a batch with all others. Returns the loss over all of them, NaN if the step was left out."""
        current = self._stand_still(batch)
        if current is None:
            return self._loss_of_others()
        batch, started = current, time.perf_counter()
        outcome: Outcome | NotFinite | None = None
        while outcome is None:
            is_interrupted = False
            try:
                outcome = self._attempt(batch)
                self.course.conclude(outcome)
            except NotFinite as error:
                outcome = error
                self.course.conclude(outcome)
            except MemberLost:
                if not self.team.is_elastic:
                    raise
                is_interrupted = True
                self.course.give_up()
                outcome = self.team.reform(self.course)
                if self.team.rank == 0:
                    self.recorder.event("step_settled", batch.plan.step, is_completed=outcome is not None)
                if outcome is None:  # it never happened: again, with other shards
                    following = self._after_loss(batch)
                    if following is None:
                        return self._loss_of_others()
                    batch = following
            except Diverged as found:
                self.course.give_up()
                self.course.repair(found.checksums)
                batch = self._after_loss(batch) or batch
        if isinstance(outcome, NotFinite):
            return self._skip(batch.plan, outcome)
        self._record(batch, outcome, started)
        self._fit_pieces(batch.plan)
        if not is_interrupted and self._save_in_time():
            self._agree_on_more(batch.plan, outcome.totals)
        elif outcome.totals.wish == STOP:  # all else that the workers said to each other was about another World
            self._end()
        return outcome.totals.loss

    def _attempt(self, batch: Batch) -> Outcome:
        """Forward and backward of this worker's part, then sum and update with everybody."""
        started, stalled = time.perf_counter(), self.team.stalled_seconds
        plan, sync = batch.plan, self.team.sync
        SPANS.step = plan.step
        assert sync is not None
        if self.is_local:  # nothing else in a step would tell that a worker is lost
            self.team.check_world()
        assignment = self._assignment = self.course.schedule.at(plan.step)
        self.course.attempt(plan)
        self._stalled = 0.0, 0.0
        self.recorder.at_step = plan.step
        self.room.open()
        if self.faults is not None:
            self.faults.corrupt(sync.replica.flat.values, plan.step, is_shared=sync.replica.is_shared)
        self.reach("start")
        sync.begin(self.ledger.num_shards, assignment)
        self.split.run(
            Work(
                plan=plan,
                pieces=batch.pieces,
                mine=assignment[self.team.copy],
                at_start=self.course.at_start,
                sync=sync,
                standing=lambda: self._standing(plan.step),
            )
        )
        await_computed(self.device)
        # Waiting for others while backward goes on says nothing about how fast this copy is.
        self.course.compute_seconds = time.perf_counter() - started - sync.gradients.stalled
        inside = self.team.stalled_seconds - stalled
        self._stalled = inside, 0.0
        self.reach("backward")
        if self.course.is_first:
            setup.check_unused(self.team.group, sync, self.settings.unused)
        outcome = sync.finish()
        self._stalled = inside, self.team.stalled_seconds - stalled - inside
        return outcome

    def _stand_still(self, batch: Batch) -> Batch | None:
        """Wait for another World, as all others do before this step, if that was agreed on after the last.

        What a script does between two steps is over by now: those who come in know nothing of it. Returns what is to
        be done then, see `_after_loss`.
        """
        link, world, held_in = self.team.link, self.team.world, self._held_in
        self._held_in = None
        if link is None or world is None or world.generation != held_in:
            return batch
        if self.team.is_unmirrored:  # all go on from here if someone is let go
            self.course.keep()
        link.send(
            "boundary",
            generation=world.generation,
            trainer=link.trainer,
            call=link.call,
            step=self.course.place.step,
            most_leaving=self.team.most_leaving,
        )
        self.team.reform(self.course)
        return self._after_loss(batch)

    def _after_loss(self, batch: Batch) -> Batch | None:
        """What to do instead of a batch that was interrupted; None where it was done without us, and nothing follows.

        Whoever stood aside goes on where the others are. Copies that train by themselves have done their own part.
        """
        is_behind = self.course.place.step > batch.plan.step
        if self.course.feed is None or (is_behind and self.is_local):
            return None if is_behind else batch
        loaded = next(self.course.feed, None)
        return None if loaded is None else self.batch_of(loaded)

    def _loss_of_others(self) -> float:
        """Of a step that was taken without us."""
        return self.team.sync.loss if isinstance(self.team.sync, LocalSync) else math.nan

    def _save_in_time(self) -> bool:
        """Save a checkpoint if one is due. False if a worker was lost meanwhile: then the next step makes one."""
        every = self.settings.checkpoint_every
        try:
            if every and self.course.is_due(every):
                self.course.write()
            return True
        except MemberLost:
            if not self.team.is_elastic:
                raise
            self.team.reform(self.course)
            return False

    def _agree_on_more(self, plan: StepPlan, totals: Totals) -> None:
        """Shares, newcomers, the end: all workers decide the same, each from the same numbers."""
        if self.settings.balance and self.team.mesh.num_copies > 1 and totals.has_news:
            self.course.rebalance(totals.seconds_per_sample)
        if self.measurement is not None:
            self.measurement.add(plan.count, totals.seconds_per_sample)
        if totals.wish == STOP:
            self._end()
        if totals.wish == HOLD and self.team.world is not None:
            self._held_in = self.team.world.generation

    def _skip(self, plan: StepPlan, error: NotFinite) -> float:
        """A step was left out, on all workers alike; after several in a row go back to the last checkpoint."""
        error = self._tell_skipped(plan, error, self._assignment)
        if self._skips.add(plan.step):
            if not self._skips.may_go_back(plan.step) or not self.team.together(self.course.can_resume, self.course):
                raise error
            self.team.together(self.course.resume, self.course)
            back = f"back to step {self.course.place.step}"
            say(f"shoal: {MOST_IN_A_ROW} steps in a row were no good; {back}", self.team.rank)
        return math.nan

    def leave_out(self, plan: StepPlan, error: NotFinite) -> None:
        """A batch of this copy's own was no good. Only this worker leaves it out."""
        self._tell_skipped(plan, error, [range(0)] * self.team.copy + [plan.cut.mine])

    def _tell_skipped(self, plan: StepPlan, error: NotFinite, assignment: Sequence[Sequence[int]]) -> NotFinite:
        error = name_samples(error, self.ledger, self.source, plan, assignment).at(step=plan.step)
        if self.settings.not_finite == "error":
            raise error
        workers = [self.team.worker_of(copy) for copy in error.ranks]
        facts = {"message": error.message, "samples": list(error.samples), "workers": workers}
        self.recorder.event("step_skipped", plan.step, **facts, why=error.why, hint=error.hint)
        rank = 0 if self.is_local else self.team.rank  # else all say the same, and one is enough
        say(f"{error.render()}\n  now: the step is left out".replace("error:", "warning:", 1), rank)
        return error

    def _fit_pieces(self, plan: StepPlan) -> None:
        """Let pieces be as large as memory holds, now that it is known what a step of ours takes."""
        largest = max((piece.num_samples for piece in plan.pieces), default=0)
        if self.room.close(plan.step, largest) and self.course.feed is not None:
            self.course.feed.drop()

    def _record(self, batch: Batch, outcome: Outcome, started: float) -> None:
        plan, spent = batch.plan, time.perf_counter() - started
        inside, after = self._stalled  # within what counts as computing, and as communicating
        compute = max(0.0, self.course.compute_seconds - inside)
        late, part = self.team.take_late()
        stall = divide_stall(inside + after, late, compute, self.split.idle)
        communicate = max(0.0, outcome.communicate - after) + stall.communicate
        wait = outcome.wait + stall.wait + stall.bubble
        waited_for = None if outcome.waited_for is None else self.team.worker_of(outcome.waited_for)
        if part is not None and (waited_for is None or stall.wait > outcome.wait):
            waited_for = part
        self.recorder.step(
            StepMetrics(
                step=plan.step,
                time=time.time(),
                epoch=plan.epoch,
                loss=outcome.totals.loss,
                num_samples=plan.num_samples,
                global_samples=plan.count,
                lr=float(self.optimizer.param_groups[0]["lr"]),
                compute=compute,
                communicate=communicate,
                wait=wait,
                load=batch.load_seconds,
                other=max(0.0, spent - compute - communicate - wait),
                waited_for=waited_for,
                grad_norm=outcome.norm,
                num_values=count_values(batch.pieces),
                bubble=stall.bubble,
                grad_signal=None if outcome.noise is None else outcome.noise.signal,
                grad_variance=None if outcome.noise is None else outcome.noise.variance,
            ),
            self.num_steps,
        )
        self.asked.stepped(plan.step)

    def _standing(self, step: int) -> Standing:
        assert self.team.sync is not None
        return Standing(
            step=step,
            seconds_per_sample=self.course.speed.seconds_per_sample() or 0.0,
            wish=self._wish(),
            checksum=self.team.sync.checksum(step),
        )

    def _wish(self) -> int:
        link = self.team.link
        if self.ending.is_asked or (link is not None and link.is_stopping):
            return STOP
        return HOLD if link is not None and link.is_held else 0

    def _end(self) -> None:
        """Save what there is and end, because we were asked to."""
        self.course.keep()
        self.recorder.flush()  # a death by signal writes nothing any more
        if self.ending.is_asked:
            self.ending.end()
        raise SystemExit(143)
