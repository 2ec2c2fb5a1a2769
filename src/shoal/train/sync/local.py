"""Copies that take steps of their own and agree now and then: local SGD, DiLoCo, streaming DiLoCo."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from shoal.comm.group import Group
from shoal.spec.errors import UserError
from shoal.spec.strategy import Local
from shoal.train.replica import own_replica
from shoal.train.sync.across import Across
from shoal.train.sync.local_flight import (
    NUM_COLUMNS,
    SECONDS,
    SPEED,
    STEP,
    TRAVEL,
    WISH,
    Flight,
    Landing,
    Told,
    travel,
)
from shoal.train.sync.local_gradients import OwnGradients, scale
from shoal.train.sync.local_outer import Outer
from shoal.train.sync.local_rounds import Pace, Round, cut_fragments, first_round, next_round
from shoal.train.sync.sync import Outcome, Row, Standing, Totals
from shoal.train.sync.table import NotFinite, check_losses, checked_norm
from shoal.train.traits import ChangingBuffers

LEAVE_SECONDS = 5.0
"""How long a closed trainer waits for a message that nobody takes in any more."""


class LocalSync:
    """Each copy learns from its own inner batches with its own optimizer; nothing is exchanged in a step.

    A step is `begin`, then for each inner batch `open_batch`, a forward and backward, and `learn`; then `finish`. At
    the end of a round the copies' ways since the last agreement are averaged in the background (`Flight`), and taken
    in some steps later: parameters += what was agreed on - what we had when it left. So the steps that were taken
    meanwhile stay, and count in the next round. Only after `agree` all copies have the same parameters.
    """

    is_round_over = False

    def __init__(
        self,
        group: Group,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        sync: Local,
        *,
        buffers: ChangingBuffers | None = None,
        max_norm: float | None = None,
        ema_decay: float | None = None,
        source: int = 0,
        reach: Callable[[str], None] = lambda point: None,
        across: Across | None = None,
    ) -> None:
        self._group, self._sync, self._across = group, sync, across
        self._max_norm, self._decay, self._reach = max_norm, ema_decay, reach
        self._buffers = buffers if buffers else None
        self.replica = own_replica(model, optimizer, ema_decay=None, is_alone=True)
        flat = self.replica.flat
        group.broadcast(flat.values, root=source).wait()
        if ema_decay is not None:  # of what is agreed on, which an inner step does not change
            self.replica.average = flat.values.clone()
        self.gradients = OwnGradients(flat.parameters)
        self._spans = cut_fragments(flat.layout, sync.fragments)
        self._outer = Outer(sync, flat, group)
        self._loss = math.nan
        self._speeds = (0.0,) * group.size
        self._travel_seconds = 0.0
        self._forget()

    def _forget(self) -> None:
        """Begin a round: all copies have the same parameters."""
        self._round: Round | None = None
        self._flight: Flight | None = None
        self._samples = [0] * len(self._spans)
        self._followed = [0] * len(self._spans)
        self._is_apart = [False] * len(self._spans)
        self._round_samples = self._reached = 0
        self._wish, self._has_news = 0, False

    # A step, of this copy alone.

    def begin(self, num_shards: int, assignment: Sequence[range]) -> None:
        self._weight = self._total = self._norm = 0.0
        self._num_bad = 0

    def open_batch(self) -> None:
        """The next forwards and backwards belong to one inner batch."""
        self._rows: Sequence[Row] = ()
        self.gradients.begin()

    def post(self, rows: Sequence[Row], mine: range, standing: Standing) -> None:
        self._rows, self._standing = list(rows), standing
        self._reach("posted")

    def learn(self) -> None:
        """Take an inner step. Raises NotFinite where loss or gradient is no number; nothing was changed then."""
        weight = math.fsum(row.weight for row in self._rows)
        gradients = self.gradients.take()
        try:
            norm = self._normalize(gradients, weight)
        except NotFinite:
            self._num_bad += 1
            raise
        finally:
            self.gradients.detach()
        if weight <= 0:
            return
        if self._max_norm is not None and norm > self._max_norm:
            scale(gradients, self._max_norm / norm)
        self.replica.update(gradients)
        self._norm = norm
        self._weight += weight
        self._total += math.fsum(row.loss for row in self._rows)
        num_samples = sum(row.num_samples for row in self._rows)
        self._samples = [count + num_samples for count in self._samples]
        self._round_samples += num_samples
        if self._buffers is not None:
            self._buffers.write(_mean_buffers(self._rows))

    def _normalize(self, gradients: Sequence[torch.Tensor], weight: float) -> float:
        """Make sums the mean of this copy's batch; returns its norm, of all parts together where it is cut."""
        squares = scale(gradients, 1.0 / weight if weight > 0 else 0.0)
        if self._across is not None:  # before anything can raise, for all parts take part in it
            named = zip(self.replica.flat.layout.names, squares, strict=True)
            total = torch.tensor([math.fsum(each for name, each in named if self._across.counts(name))])
            self._across.add(total)
            squares = total.tolist()
        check_losses(self._rows)
        return checked_norm(squares, lambda index: self._find_not_finite(gradients)) if weight > 0 else 0.0

    def _find_not_finite(self, gradients: Sequence[torch.Tensor]) -> list[str]:
        named = zip(self.replica.flat.layout.names, gradients, strict=True)
        return [name for name, each in named if not each.isfinite().all()] or ["another part of the model"]

    def finish(self) -> Outcome:
        """The step is over for this copy. At the end of a round, and when it is due, see to what travels."""
        started = time.perf_counter()
        step = self._reached = self._standing.step + 1
        self._is_apart = [True] * len(self._spans)
        now = self._round or first_round(self._sync, self._standing.step)
        self._round = now
        if self._flight is not None and step >= self._flight.due:
            self._land(self._flight)
        fragment = now.leaving(step)
        if fragment is not None:
            self._leave(fragment, step, now)
        self.is_round_over = step == now.end
        self._reach("updated")
        return self._outcome(time.perf_counter() - started)

    def _outcome(self, waited: float) -> Outcome:
        """A copy that had no batch in this step says what it lost in the last that it had."""
        if self._weight:
            self._loss = self._total / self._weight
        totals = Totals(
            weight=self._weight,
            loss=math.nan if self._num_bad and not self._weight else self._loss,
            buffers=None,
            seconds_per_sample=self._speeds,
            wish=self._wish,
            has_news=self._has_news,
        )
        self._wish, self._has_news = 0, False
        return Outcome(totals=totals, norm=self._norm, communicate=0.0, wait=waited, waited_for=None)

    # Agreeing.

    def _leave(self, fragment: int, step: int, now: Round) -> None:
        """Tell the others how far we have come with a fragment, while steps go on."""
        span, is_last = self._spans[fragment], fragment == len(self._spans) - 1
        way, row = self._way(span), self._row(step)
        self._samples[fragment] = 0
        if is_last:
            self._round, self._round_samples = replace(now, start=now.end), 0

        def exchange(told: Told) -> list[torch.Tensor]:
            mean = self._outer.mean(way, span, told.weights(fragment))
            return [self._outer.move(mean, way, span)]

        buffers = self._buffers.read() if self._buffers is not None and is_last else None
        act = lambda: travel(self._group, row, len(self._spans), exchange)  # noqa: E731
        self._flight = Flight(step, step + now.delay, fragment, now, buffers, act)
        if not now.delay:
            self._land(self._flight)

    def _way(self, span: tuple[int, int]) -> torch.Tensor:
        """Ours, which counts for nothing if our parameters are no numbers any more: then we take the others'."""
        way = self._outer.way(span)
        if not math.isfinite(float(way.sum())) and not way.isfinite().all():
            self.replica.flat.values[slice(*span)] = self._outer.anchor[slice(*span)]
            self._samples = [0] * len(self._samples)
            way.zero_()
        return way

    def _row(self, step: int) -> torch.Tensor:
        row = torch.zeros(NUM_COLUMNS + len(self._spans), dtype=torch.float64)
        speed = self._standing.seconds_per_sample
        row[[STEP, WISH, SPEED, SECONDS, TRAVEL]] = torch.tensor(
            [step, self._standing.wish, speed, speed * self._round_samples, self._travel_seconds], dtype=torch.float64
        )
        row[NUM_COLUMNS:] = torch.tensor(self._samples)
        return row if self._buffers is None else torch.cat([row, self._buffers.read()])

    def _land(self, flight: Flight) -> None:
        """Take in what was agreed on, as of the step in which it left."""
        landing, self._flight = flight.wait(), None
        span, values = self._spans[flight.fragment], self.replica.flat.values
        is_last = flight.fragment == len(self._spans) - 1
        if not sum(landing.told.weights(flight.fragment)):
            raise UserError(
                f"No worker could take a single step before step {flight.step}.",
                why="every loss or gradient since they last agreed was no number",
                hint="lower the learning rate, clip with `max_norm=1.0`, or look at the data",
            )
        is_still = flight.step == self._reached
        if is_still:
            values[slice(*span)] = self._outer.anchor[slice(*span)]
            self._is_apart[flight.fragment] = False
        else:
            values[slice(*span)].add_(landing.moves[0])
        if is_last:
            self._take_buffers(landing.told.buffers(), None if is_still else flight.buffers)
        self._follow(flight.fragment, flight.step)
        self._hear(landing, flight.round if is_last else None)

    def _take_buffers(self, mean: torch.Tensor | None, sent: torch.Tensor | None) -> None:
        if self._buffers is not None and mean is not None:
            self._buffers.write(mean if sent is None else self._buffers.read() + (mean - sent))

    def _follow(self, fragment: int, step: int) -> None:
        """Let the moving average follow what was agreed on: as far as it would have in so many steps."""
        if self.replica.average is not None and self._decay is not None:
            at = slice(*self._spans[fragment])
            share = 1 - self._decay ** (step - self._followed[fragment])
            self.replica.average[at].lerp_(self._outer.anchor[at].to(self.replica.average.dtype), share)
        self._followed[fragment] = step

    def _hear(self, landing: Landing, ended: Round | None) -> None:
        """What the others wish; after a round also how fast everybody is, from which the next one follows."""
        told = torch.from_numpy(landing.told.rows[:, :NUM_COLUMNS].copy())
        told[:, TRAVEL] = told[:, TRAVEL].max()
        if self._across is not None:
            self._across.largest(told)
        self._wish = max(self._wish, int(told[:, WISH].max()))
        self._travel_seconds = landing.travel_seconds
        if ended is None:
            return
        self._speeds, self._has_news = tuple(told[:, SPEED].tolist()), True
        num_steps = ended.length
        pace = Pace(step_seconds=float(told[:, SECONDS].max()) / num_steps, travel_seconds=float(told[0, TRAVEL]))
        self._round = next_round(self._sync, ended, pace)

    def agree(self) -> None:
        """Have the same parameters as everybody. Copies that are within a round take their mean and go on with it."""
        if self._flight is not None:
            self._land(self._flight)
        apart = [fragment for fragment, is_apart in enumerate(self._is_apart) if is_apart]
        if not apart:
            return

        spans = [self._spans[fragment] for fragment in apart]
        ways = [self._way(span) for span in spans]

        def exchange(told: Told) -> list[torch.Tensor]:
            return [
                self._outer.mean(way, span, told.weights(fragment))
                for way, span, fragment in zip(ways, spans, apart, strict=True)
            ]

        landing = travel(self._group, self._row(self._reached), len(self._spans), exchange)
        for fragment, mean in zip(apart, landing.moves, strict=True):
            at = slice(*self._spans[fragment])
            self.replica.flat.values[at] = self._outer.anchor[at] - mean
            self._is_apart[fragment] = False
        self._take_buffers(landing.told.buffers(), None)

    # State.

    def tensors(self) -> dict[str, torch.Tensor]:
        """After `agree`. The optimizer's state is that of this copy."""
        return {**dict(self.replica.tensors()), **dict(self._outer.tensors())}

    def restart(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """The parameters were put back from a checkpoint: go on from there, with what it says was agreed on."""
        self._forget()
        self._outer.restart(tensors)
        if self.replica.average is not None and not any(name.startswith("ema/") for name in tensors):
            self.replica.average.copy_(self.replica.flat.values)

    def resolve(
        self, survivors: Sequence[int], gather: Callable[[str, str], list[str]], *, is_first: bool
    ) -> Outcome | NotFinite | None:
        """A step is nobody else's: there is nothing to complete."""
        gather("judged", "")
        gather("settled", "")
        return None

    def checksum(self, step: int) -> int:
        return 0

    def detach(self) -> None:
        self.gradients.detach()
        self.replica.optimizer.release()

    def close(self) -> None:
        if self._flight is not None:  # nobody will take it in: the run was left within a round
            self._group.close()
            self._flight.abandon(LEAVE_SECONDS)
            self._flight = None
        self.detach()
        self.replica.flat.release()


def _mean_buffers(rows: Sequence[Row]) -> torch.Tensor | None:
    """Of the pieces of one batch, over its samples."""
    held = [(row.buffers, row.num_samples) for row in rows if row.buffers is not None]
    total = sum(count for _, count in held)
    if not total:
        return None
    return torch.stack([values * (count / total) for values, count in held]).sum(0)
