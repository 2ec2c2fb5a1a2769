"""Where the time of a run went, and who was waited for. Pure: metrics in, numbers out."""

from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shoal.observe.turns import Turn, merge_turns, step_seconds, waits_in
from shoal.spec.event import Event, StepMetrics

MAX_WARMUP_STEPS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Parts of the time, which add up to 1 (or are all 0 where no time was measured)."""

    compute: float = 0.0
    communicate: float = 0.0
    wait: float = 0.0
    load: float = 0.0
    other: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """What one rank did after warm-up. Means are per step, in seconds.

    `own_seconds` is what the rank spent on its own part (compute, load, other): what others wait for.
    `num_waited_for` counts the pairs (step, waiting rank) that named this rank as the last to arrive and
    `waited_seconds` adds up what they waited.
    `bubble` is the part of its time in which a pipeline's schedule made it wait, for nobody; it is a part of `wait`.
    `start_delay_seconds` is how much later than the earliest rank it was done with its own part of its first step.
    """

    rank: int
    num_steps: int
    num_samples: int
    step_seconds: float
    own_seconds: float
    compute_seconds: float
    load_seconds: float
    shares: Shares
    num_waited_for: int = 0
    waited_seconds: float = 0.0
    start_delay_seconds: float = 0.0
    bubble: float = 0.0

    @property
    def compute_seconds_per_sample(self) -> float:
        return self.compute_seconds * self.num_steps / self.num_samples if self.num_samples else 0.0

    @property
    def samples_per_step(self) -> float:
        return self.num_samples / self.num_steps if self.num_steps else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Where the time of a run went. Warm-up is counted apart: the first steps pay for things that happen once.

    Every step that counts is counted once, whoever took part in it. `ranks` is about all of them; `compared` only
    about those steps that the most common set of workers took together, because with fewer workers each has more to
    do. `slowest` is the one of `compared` with the longest own part per step, None with a single rank.
    `samples_per_second` is over the wall time from the end of warm-up to the last step, pauses included.
    """

    num_steps: int
    num_samples: int
    warmup_steps: int
    warmup_seconds: float
    wall_seconds: float
    step_median_seconds: float
    step_p99_seconds: float
    samples_per_second: float
    shares: Shares
    ranks: tuple[RankTimes, ...]
    compared: tuple[RankTimes, ...]
    slowest: int | None
    first_loss: float | None = None
    last_loss: float | None = None
    num_bad_losses: int = 0
    first_bad_step: int | None = None


def break_down(metrics: Mapping[int, Sequence[StepMetrics]], events: Iterable[Event] = ()) -> Breakdown | None:
    """The breakdown of the metrics of all ranks; None where no step was recorded.

    `events` say when the World changed, and when the run went back to a checkpoint. Costs about two seconds
    for a million lines.
    """
    events = list(events)
    return break_down_turns(merge_turns(metrics, events), changes_in(events))


def break_down_turns(turns: Sequence[Turn], changes: Sequence[float] = ()) -> Breakdown | None:
    """The same from turns, those that count; `changes` are the times at which the World changed."""
    turns = [turn for turn in turns if not turn.is_undone]
    if changes:
        turns = [_undisturbed(turn, changes) for turn in turns]
    if not turns:
        return None
    lead = [turn.lead for turn in turns]
    seconds = [step_seconds(row) / row.num_steps for row in lead]
    warmup = count_warmup(seconds)
    steady = turns[warmup:]
    ranks = _all_rank_times(steady, turns)
    compared = _all_rank_times(_most_common(steady), turns) if len({*map(_workers, steady)}) > 1 else ranks
    ordered = sorted(zip(seconds[warmup:], (row.num_steps for row in lead[warmup:]), strict=True))
    wall = lead[-1].time - lead[warmup].time + step_seconds(lead[warmup])
    bad = [row.step for row in lead if not _is_finite(row.loss)]
    return Breakdown(
        num_steps=sum(row.num_steps for row in lead),
        num_samples=sum(row.global_samples for row in lead),
        warmup_steps=warmup,
        warmup_seconds=sum(seconds[:warmup]),
        wall_seconds=wall,
        step_median_seconds=_quantile(ordered, 0.5),
        step_p99_seconds=_quantile(ordered, 0.99),
        samples_per_second=sum(row.global_samples for row in lead[warmup:]) / wall if wall > 0 else 0.0,
        shares=_mean_shares(ranks),
        ranks=ranks,
        compared=compared,
        slowest=max(compared, key=lambda times: times.own_seconds).rank if len(compared) > 1 else None,
        first_loss=lead[0].loss,
        last_loss=lead[-1].loss,
        num_bad_losses=len(bad),
        first_bad_step=bad[0] if bad else None,
    )


def changes_in(events: Iterable[Event]) -> list[float]:
    """When the World changed, the first one aside, in order."""
    return sorted(event.time for event in events if event.kind == "world" and event.data.get("generation") != 0)


def is_disturbed(start: float, end: float, changes: Sequence[float]) -> bool:
    """Whether the World changed between `start` and `end`."""
    index = bisect(changes, start)
    return index < len(changes) and changes[index] <= end


def _undisturbed(turn: Turn, changes: Sequence[float]) -> Turn:
    """A turn without what was lost in it when the World changed: an attempt that failed, and finding together."""
    if turn.num_steps > 1 or not is_disturbed(turn.end - turn.seconds, turn.end, changes):
        return turn
    return Turn(turn.step, {worker: replace(row, other=0.0) for worker, row in turn.metrics.items()})


def _workers(turn: Turn) -> frozenset[int]:
    return frozenset(turn.metrics)


def _most_common(turns: Sequence[Turn]) -> list[Turn]:
    """The turns of those workers who were together most: only in them all had the same conditions."""
    usual, _ = Counter(map(_workers, turns)).most_common(1)[0]
    return [turn for turn in turns if turn.metrics.keys() == usual]


def count_warmup(seconds: Sequence[float]) -> int:
    """How many steps at the start are warm-up: the first, and those after it that take twice the usual time.

    Never more than 20 steps nor a third of the run, and none in a run of fewer than 3 steps.
    """
    if len(seconds) < 3:
        return 0
    usual = median(seconds[1:])
    count = 1
    while count < min(MAX_WARMUP_STEPS, len(seconds) // 3) and seconds[count] > 2 * usual:
        count += 1
    return count


def _rank_times(rank: int, steps: Sequence[StepMetrics]) -> RankTimes:
    samples = 0
    compute = communicate = wait = load = other = 0.0
    for step in steps:
        samples += step.num_samples
        compute += step.compute
        communicate += step.communicate
        wait += step.wait
        load += step.load
        other += step.other
    total, num_steps = compute + communicate + wait + load + other, sum(step.num_steps for step in steps)
    scale = 1 / total if total > 0 else 0.0
    return RankTimes(
        rank=rank,
        num_steps=num_steps,
        num_samples=samples,
        step_seconds=total / num_steps,
        own_seconds=(compute + load + other) / num_steps,
        compute_seconds=compute / num_steps,
        load_seconds=load / num_steps,
        shares=Shares(
            compute=compute * scale,
            communicate=communicate * scale,
            wait=wait * scale,
            load=load * scale,
            other=other * scale,
        ),
        bubble=sum(step.bubble for step in steps) * scale,
    )


def _all_rank_times(turns: Sequence[Turn], all_turns: Sequence[Turn]) -> tuple[RankTimes, ...]:
    rows: dict[int, list[StepMetrics]] = {}
    for turn in turns:
        for worker, row in turn.metrics.items():
            rows.setdefault(worker, []).append(row)
    return tuple(_with_waits([_rank_times(worker, rows[worker]) for worker in sorted(rows)], turns, all_turns[0]))


def _with_waits(times: list[RankTimes], steady: Sequence[Turn], first: Turn) -> Iterable[RankTimes]:
    counts: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for turn in steady:
        for rank, last, waited in waits_in(turn):
            counts[last] = counts.get(last, 0) + turn.metrics[rank].num_steps
            seconds[last] = seconds.get(last, 0.0) + waited
    # Who was not there in the first step came later, but nobody waited for it.
    arrivals = {rank: _arrival(step) for rank, step in first.metrics.items()}
    earliest = min(arrivals.values())
    return [
        replace(
            one,
            num_waited_for=counts.get(one.rank, 0),
            waited_seconds=seconds.get(one.rank, 0.0),
            start_delay_seconds=arrivals.get(one.rank, earliest) - earliest,
        )
        for one in times
    ]


def _arrival(step: StepMetrics) -> float:
    """When a rank was done with its own part of a step: what it then waited is not its delay."""
    return step.time - step.wait - step.communicate


def _mean_shares(ranks: Sequence[RankTimes]) -> Shares:
    total = sum(one.step_seconds * one.num_steps for one in ranks)
    if total <= 0:
        return Shares()

    def mean(name: str) -> float:
        return sum(float(getattr(one.shares, name)) * one.step_seconds * one.num_steps for one in ranks) / total

    return Shares(
        compute=mean("compute"),
        communicate=mean("communicate"),
        wait=mean("wait"),
        load=mean("load"),
        other=mean("other"),
    )


def median(values: Sequence[float]) -> float:
    """The middle value (the upper one of two); 0 where there are none. `statistics` is slow to import."""
    return sorted(values)[len(values) // 2] if values else 0.0


def _quantile(ordered: Sequence[tuple[float, int]], part: float) -> float:
    """The value below which so large a part of the steps lies, of (value, number of steps) in order."""
    if all(count == 1 for _, count in ordered):
        return ordered[min(len(ordered) - 1, int(part * len(ordered)))][0]
    place = part * sum(count for _, count in ordered)
    for value, count in ordered:
        place -= count
        if place < 0:
            return value
    return ordered[-1][0]


def _is_finite(value: float) -> bool:
    return value - value == 0
