"""How copies that train by themselves agree: what leaves, what arrives, and what goes on into the next World."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace

import torch

from shoal.comm.group import Group
from shoal.data.ledger import Place
from shoal.elastic.commit import Report, outcome_of
from shoal.spec.errors import UserError
from shoal.spec.spans import SPANS
from shoal.spec.strategy import Local
from shoal.train.handover import share_facts
from shoal.train.replica import Replica
from shoal.train.sync.across import Across
from shoal.train.sync.local_book import Account, Book, Owed, find_owed
from shoal.train.sync.local_flight import (
    BUSY,
    NUM_COLUMNS,
    SECONDS,
    SPEED,
    STEP,
    TRAVEL,
    WISH,
    Flight,
    Met,
    Sent,
    Told,
    travel,
)
from shoal.train.sync.local_outer import Outer
from shoal.train.sync.local_rounds import Pace, Round, cut_fragments, first_round, next_round
from shoal.train.sync.stopwatch import Arrivals
from shoal.train.sync.sync import Standing
from shoal.train.traits import ChangingBuffers

LEAVE_SECONDS = 5.0
"""How long a closed trainer waits for a message that nobody takes in any more."""


class Agreement:
    """One copy's side of it. `finish` after each step sees to what leaves and arrives; `agree` makes all alike.

    A fragment's way since it was last agreed on leaves at its step of a round, is averaged in the background
    (`Flight`), and is taken in some steps later: parameters += what was agreed on - what we had when it left.

    In an elastic run a copy may be lost, and with it what it has learned since. The others keep what they have
    learned: `judge` and `settle` see to what was on its way, and `inherit` goes on in the next World with their mean,
    and with what is `owed`.
    """

    is_round_over = False

    def __init__(
        self,
        group: Group,
        replica: Replica,
        sync: Local,
        *,
        num_shards: int,
        buffers: ChangingBuffers | None,
        ema_decay: float | None,
        is_elastic: bool,
        reach: Callable[[str], None],
        across: Across | None,
    ) -> None:
        self._group, self._replica, self._sync, self._across = group, replica, sync, across
        self._num_shards, self._decay, self._is_elastic, self._reach = num_shards, ema_decay, is_elastic, reach
        self._buffers = buffers if buffers else None
        self._left_buffers: torch.Tensor | None = None
        self._spans = cut_fragments(replica.flat.layout, sync.fragments)
        self._outer = Outer(sync, replica.flat, group)
        self.speeds = (0.0,) * group.size
        self._travel_seconds = 0.0
        self._arrivals = Arrivals(group.rank)
        self._late: tuple[float, int | None] = 0.0, None
        self._turn = 0
        self._forget()

    def _forget(self) -> None:
        """Begin a round: all copies have the same parameters."""
        self._round: Round | None = None
        self._flight: Flight | None = None
        self._samples = [0] * len(self._spans)
        self._left = [0] * len(self._spans)
        self._followed = [0] * len(self._spans)
        self._is_apart = [False] * len(self._spans)
        self._round_samples = self._reached = 0
        self._wish, self.has_news = 0, False
        self._book = Book(len(self._spans))

    # Steps.

    def start_at(self, place: Place) -> Place:
        """Go on here, or where `inherit` has found that the copies stand, which is returned."""
        if self._book.place is None:
            self._book.begin(place)
            self._left, self._followed = [place.step] * len(self._spans), [place.step] * len(self._spans)
        return self.place

    @property
    def copy(self) -> int:
        """Which of the copies this is, or is a part of: the group has one member of each."""
        return self._group.rank

    @property
    def place(self) -> Place:
        """Where this copy stands."""
        assert self._book.place is not None
        return self._book.place

    @property
    def owed(self) -> Owed:
        """What of the steps before us must be learned again, by whomever."""
        return self._book.owed

    def learn(self, step: int, shard: int, update: Callable[[], int]) -> None:
        """Learn from an inner batch with `update`, which returns how many samples it had.

        Fragments that have learned from it, through one who is lost now, stay as they are.
        """
        lacking, values = self._book.learn(step, shard), self._replica.flat.values
        known = [slice(*span) for span, lacks in zip(self._spans, lacking, strict=True) if not lacks]
        before = [values[at].clone() for at in known]
        num_samples = update()
        for at, kept in zip(known, before, strict=True):
            values[at] = kept
        self._samples = [n + num_samples * lacks for n, lacks in zip(self._samples, lacking, strict=True)]
        self._round_samples += num_samples

    def reach(self, place: Place) -> None:
        """All inner batches before this place were learned from, of those that are ours."""
        self._book.reach(place)

    @property
    def late(self) -> tuple[float, int | None]:
        """How long the last `finish` has waited for another copy, and for which."""
        return self._late

    def finish(self, standing: Standing) -> int:
        """A step is over for this copy. Returns what all workers wish for, if it is time to follow that."""
        self._standing = standing
        self._late = 0.0, None
        step = self._reached = standing.step + 1
        self._is_apart = [True] * len(self._spans)
        self._round = self._round or first_round(self._sync, standing.step)
        if self._flight is not None and step >= self._flight.sent.due:
            self._land(self._flight)
        now = self._round
        fragment = now.leaving(step, self._left) if self._flight is None else None
        if fragment is not None:
            self._leave(fragment, step, now)
        is_paid = step >= self.owed.until
        self.is_round_over = step >= now.end and is_paid
        wish = self._wish if is_paid else 0
        if wish:  # to stand still, or to end: whoever comes or goes then finds, or leaves, the same with all
            self.agree()
            self._wish = 0
        return wish

    # What leaves.

    def _leave(self, fragment: int, step: int, now: Round) -> None:
        """Tell the others how far we have come with a fragment, while steps go on."""
        span, is_last = self._spans[fragment], fragment == len(self._spans) - 1
        way, row = self._way(span), self._row(step)
        sent = Sent(
            turn=self._turn + 1,
            step=step,
            due=step + now.delay,
            fragments=(fragment,),
            mark=self._book.mark,
            of=now,
            samples=self._samples[fragment],
            round_samples=self._round_samples if is_last else 0,
            left=self._left[fragment],
            buffers=self._buffers.read() if self._buffers is not None and is_last else None,
        )
        self._samples[fragment], self._left[fragment] = 0, now.leaves(fragment)
        if is_last:
            self._round, self._round_samples = replace(now, start=now.end), 0
        age = step / now.length
        self._flight = self._send(sent, row, [way], lambda means: [self._outer.move(means[0], way, span, age)])
        if not now.delay:
            self._land(self._flight)

    def agree(self) -> None:
        """Have the same parameters as everybody. Copies that are within a round take their mean and go on with it."""
        if self._flight is not None:
            self._land(self._flight)
        apart = tuple(fragment for fragment, is_apart in enumerate(self._is_apart) if is_apart)
        if not apart:
            return
        ways = [self._way(self._spans[fragment]) for fragment in apart]
        step = self._reached
        sent = Sent(turn=self._turn + 1, step=step, due=step, fragments=apart, mark=self._book.mark)
        self._flight = self._send(sent, self._row(step), ways, lambda means: means)
        self._land(self._flight)

    def _way(self, span: tuple[int, int]) -> torch.Tensor:
        """Ours, which counts for nothing if our parameters are no numbers any more: then we take the others'."""
        way = self._outer.way(span)
        if not math.isfinite(float(way.sum())) and not way.isfinite().all():
            self._replica.flat.values[slice(*span)] = self._outer.anchor[slice(*span)]
            self._samples = [0] * len(self._samples)
            way.zero_()
        return way

    def _row(self, step: int) -> torch.Tensor:
        """What this copy tells. All of its parts tell the same, so that all will conclude the same from it."""
        row = torch.zeros(NUM_COLUMNS + len(self._spans), dtype=torch.float64)
        speed = self._standing.seconds_per_sample
        seconds, busy = speed * self._round_samples, self._arrivals.arrive(time.perf_counter())
        row[[STEP, WISH, SPEED, SECONDS, TRAVEL, BUSY]] = torch.tensor(
            [step, self._standing.wish, speed, seconds, self._travel_seconds, busy], dtype=torch.float64
        )
        if self._across is not None:
            self._across.largest(row[:NUM_COLUMNS])
        row[NUM_COLUMNS:] = torch.tensor(self._samples)
        return row if self._buffers is None else torch.cat([row, self._buffers.read()])

    def _send(
        self,
        sent: Sent,
        row: torch.Tensor,
        ways: Sequence[torch.Tensor],
        move: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
    ) -> Flight:
        def means(told: Told) -> list[torch.Tensor]:
            return [
                self._outer.mean(way, self._spans[fragment], told.weights(fragment))
                for way, fragment in zip(ways, sent.fragments, strict=True)
            ]

        return Flight(sent, lambda: travel(self._group, row, len(self._spans), means), self._vote, move)

    def _vote(self) -> None:
        """Everybody holds the means. Without this a loss could find them taken in by some and not by others."""
        if self._is_elastic:
            self._reach("summed")
            (self._across.vote if self._across is not None else self._group.barrier)()
            self._reach("updating")

    # What arrives.

    def _land(self, flight: Flight) -> None:
        """Wait for what is on its way, and take it in."""
        began = time.perf_counter()
        flight.wait()
        blocked = time.perf_counter() - began
        if SPANS.is_on:
            SPANS.add("wait for what all agree on", "wait", began)
        assert flight.met is not None
        late = self._arrivals.judge(flight.met.told.column(BUSY), blocked)
        self._late = max(self._late, late, key=lambda each: each[0])
        self._arrivals.done(flight.met.ended)
        self._take_in(flight)

    def _take_in(self, flight: Flight) -> None:
        """As of the step in which it left."""
        sent, met, moves = flight.sent, flight.met, flight.moves
        assert met is not None
        assert moves is not None
        self._flight, self._turn = None, sent.turn
        self._book.agree(sent.fragments, sent.step, sent.mark)
        if sent.of is None:
            self._take_means(sent, met)
        else:
            self._take_move(sent, met, moves[0], sent.of)

    def _take_means(self, sent: Sent, met: Met) -> None:
        for fragment, mean in zip(sent.fragments, met.means, strict=True):
            at = slice(*self._spans[fragment])
            self._replica.flat.values[at] = self._outer.anchor[at] - mean
            self._is_apart[fragment] = False
        self._take_buffers(met.told.buffers(), None)

    def _take_move(self, sent: Sent, met: Met, move: torch.Tensor, of: Round) -> None:
        (fragment,) = sent.fragments
        span, values = self._spans[fragment], self._replica.flat.values
        is_last = fragment == len(self._spans) - 1
        if not sum(met.told.weights(fragment)):
            raise UserError(
                f"No worker could take a single step before step {sent.step}.",
                why="every loss or gradient since they last agreed was no number",
                hint="lower the learning rate, clip with `max_norm=1.0`, or look at the data",
            )
        is_still = sent.step == self._reached
        if is_still:
            values[slice(*span)] = self._outer.anchor[slice(*span)]
            self._is_apart[fragment] = False
        else:
            values[slice(*span)].add_(move)
        if is_last:
            self._take_buffers(met.told.buffers(), None if is_still else sent.buffers)
        self._follow(fragment, sent.step)
        self._hear(met, of if is_last else None)

    def _take_buffers(self, mean: torch.Tensor | None, sent: torch.Tensor | None) -> None:
        if self._buffers is not None and mean is not None:
            self._buffers.write(mean if sent is None else self._buffers.read() + (mean - sent))

    def _follow(self, fragment: int, step: int) -> None:
        """Let the moving average follow what was agreed on: as far as it would have in so many steps."""
        average = self._replica.average
        if average is not None and self._decay is not None:
            at = slice(*self._spans[fragment])
            share = 1 - self._decay ** (step - self._followed[fragment])
            average[at].lerp_(self._outer.anchor[at].to(average.dtype), share)
        self._followed[fragment] = step

    def _hear(self, met: Met, ended: Round | None) -> None:
        """What the others wish; after a round also how fast everybody is, from which the next one follows."""
        told = met.told
        self._wish = max(self._wish, int(max(told.column(WISH))))
        self._travel_seconds = met.travel_seconds
        if ended is None:
            return
        self.speeds, self.has_news = tuple(told.column(SPEED)), True
        step_seconds = max(told.column(SECONDS)) / ended.length
        pace = Pace(step_seconds=step_seconds, travel_seconds=max(told.column(TRAVEL)))
        self._round = next_round(self._sync, ended, pace)

    # From one World to the next.

    def judge(self, gather: Callable[[str, str], list[str]]) -> bool:
        """Whether what was on its way when a member was lost is taken in: by all, if one has; else by none."""
        flight = self._flight
        if flight is not None:
            flight.stop()
        committed = self._turn + (flight is not None and flight.moves is not None)
        voted = self._turn + (flight is not None and flight.met is not None)
        told = [text.split() for text in gather("judged", f"{committed} {voted}")]
        reports = [Report(committed=int(each[0]), voted=int(each[1])) for each in told if each]
        return flight is not None and outcome_of(reports).turn >= flight.sent.turn

    def settle(self, *, is_taken_in: bool) -> None:
        """Do with it what was found."""
        flight = self._flight
        if flight is not None and is_taken_in:
            flight.complete()
            self._take_in(flight)
        elif flight is not None:
            self._take_back(flight.sent)
        if self._buffers is not None and self._left_buffers is None:
            self._left_buffers = self._buffers.read()  # those of the model will be another's

    def _take_back(self, sent: Sent) -> None:
        """It never left."""
        self._flight = None
        if sent.of is not None:
            (fragment,) = sent.fragments
            self._samples[fragment] += sent.samples
            self._round_samples += sent.round_samples
            self._left[fragment], self._round = sent.left, sent.of

    def inherit(self, old: "Agreement | None") -> None:
        """Go on where the copies of the World before were, all with the mean of what those have learned.

        `old` was this worker's, after `settle`; newcomers have none. What was rounded away on the way is forgotten.
        One that was about to enter a World that others had entered has nothing that those do not have.
        """
        told = [share_facts(self._group, old._tell() if old else {}, rank) for rank in range(self._group.size)]
        self._turn = max(each["turn"] for each in told if each)
        is_current = [bool(each) and each["turn"] == self._turn for each in told]
        lead = is_current.index(True)
        accounts = [Account.of(each["account"]) for each, counts in zip(told, is_current, strict=True) if counts]
        owed, step = find_owed(accounts, self._num_shards)
        place = old._book.place_of(step) if old is not None and self._group.rank == lead else None
        facts = share_facts(self._group, asdict(place) if place is not None else None, lead)
        self._book.begin(Place(**facts), owed)
        self._reached, self._standing = step, Standing(step=step)
        self._left, self._followed = list(told[lead]["left"]), list(told[lead]["followed"])
        now = told[lead]["round"]
        self._round = Round(**now) if now is not None else first_round(self._sync, step)
        if old is not None:
            self._outer.take(old._outer)
            if is_current[self._group.rank]:
                self._take_over(old)
        if not all(is_current):
            self._outer.share(self._group, lead)
        self._is_apart = [True] * len(self._spans)
        self.agree()

    def _tell(self) -> dict[str, object]:
        now = asdict(self._round) if self._round is not None else None
        account = self._book.account().to_plain()
        return {"turn": self._turn, "round": now, "left": self._left, "followed": self._followed, "account": account}

    def _take_over(self, old: "Agreement") -> None:
        """What this copy had learned by itself. It counts, though all of it may be what one who is lost learned."""
        self._replica.flat.values.copy_(old._replica.flat.values)
        self._samples = [max(1, count) for count in old._samples]
        self._round_samples = old._round_samples
        if self._buffers is not None:
            self._buffers.write(old._left_buffers)

    # State.

    def tensors(self) -> dict[str, torch.Tensor]:
        return dict(self._outer.tensors())

    def restart(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """The parameters were put back from a checkpoint: go on from there, with what it says was agreed on."""
        self._forget()
        self._outer.restart(tensors)

    def stop(self) -> None:
        """The group is of no use any more, and what is on its way will not be taken in."""
        if self._flight is not None:
            self._flight.stop()
            self._flight = None

    def leave_off(self) -> None:
        """Nobody will take in what is on its way: the run was left within a round."""
        if self._flight is not None:
            self._group.close()
            self._flight.stop(LEAVE_SECONDS)
            self._flight = None
