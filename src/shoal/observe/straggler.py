"""Who is waited for, and why. Pure."""

from collections.abc import Callable, Iterable

from shoal.observe.breakdown import Breakdown, RankTimes, median
from shoal.observe.finding import WORTH_SAYING, Finding, ms, percent

SMALLER_STAGE = "give its stage fewer layers, with `cuts=` of `shoal.pipeline`"


def longest_step(breakdown: Breakdown) -> float:
    """The mean seconds of a step on the rank where it is longest."""
    return max((times.step_seconds for times in breakdown.compared), default=0.0) or 1e-9


def _others(breakdown: Breakdown, slow: RankTimes, value: Callable[[RankTimes], float]) -> float:
    return median([value(times) for times in breakdown.compared if times.rank != slow.rank])


def slow_rank(breakdown: Breakdown, cut: str = "") -> Iterable[Finding]:
    """One rank is longer at its own part than the others, who wait for it. `cut`: what of the model each holds."""
    slow = next((times for times in breakdown.compared if times.rank == breakdown.slowest), None)
    if slow is None:
        return
    step = longest_step(breakdown)
    excess = slow.own_seconds - _others(breakdown, slow, lambda times: times.own_seconds)
    if excess < WORTH_SAYING * step:
        return
    load_excess = slow.load_seconds - _others(breakdown, slow, lambda times: times.load_seconds)
    speed_ratio = slow.compute_seconds_per_sample / (
        _others(breakdown, slow, lambda times: times.compute_seconds_per_sample) or 1e-12
    )
    share_ratio = slow.samples_per_step / (_others(breakdown, slow, lambda times: times.samples_per_step) or 1e-12)
    if load_excess > excess / 2:
        yield _slow_input(slow, load_excess, step)
    elif speed_ratio >= 1.1:
        yield _slow_compute(breakdown, slow, speed_ratio, excess, cut)
    elif share_ratio >= 1.05:
        yield _uneven_shares(breakdown, slow, share_ratio)
    else:
        yield _busy_elsewhere(slow, excess, step)


def _slow_input(slow: RankTimes, load_excess: float, step: float) -> Finding:
    return Finding(
        kind="slow_input",
        rank=slow.rank,
        what=f"Rank {slow.rank} is waited for because its data comes late.",
        why=f"it waits {ms(slow.load_seconds)} a step for data, {ms(load_excess)} more than the others",
        change="raise `loaders=`, or check the disk or network this rank reads from",
        gain=load_excess / step,
    )


def _slow_compute(breakdown: Breakdown, slow: RankTimes, ratio: float, excess: float, cut: str) -> Finding:
    step = longest_step(breakdown)
    balanced = 0.0 if cut else _balanced_gain(breakdown)
    change = f"check what else runs on the machine of rank {slow.rank}, and its clock speed and thread count"
    if balanced >= WORTH_SAYING:
        change += f"; sharing the batch by speed alone would save {percent(balanced)}"
    if cut == "stages":
        change += f"; or {SMALLER_STAGE}"
    return Finding(
        kind="slow_compute",
        rank=slow.rank,
        what=f"Rank {slow.rank} computes slower than the others, who wait for it.",
        why=f"a sample takes it {ms(slow.compute_seconds_per_sample)}, {ratio:.2f} times what it takes the others",
        change=change,
        gain=excess / step,
    )


def _balanced_gain(breakdown: Breakdown) -> float:
    """The part of a step saved if each rank had samples in proportion to its speed."""
    speeds = [
        1 / times.compute_seconds_per_sample for times in breakdown.compared if times.compute_seconds_per_sample > 0
    ]
    if not speeds:
        return 0.0
    samples = sum(times.samples_per_step for times in breakdown.compared)
    longest = max(times.compute_seconds for times in breakdown.compared)
    return max(0.0, (longest - samples / sum(speeds)) / longest_step(breakdown))


def _uneven_shares(breakdown: Breakdown, slow: RankTimes, ratio: float) -> Finding:
    return Finding(
        kind="uneven_shares",
        rank=slow.rank,
        what=f"Rank {slow.rank} has more samples than its speed allows for, and the others wait for it.",
        why=f"it gets {slow.samples_per_step:.0f} samples a step, {ratio:.2f} times as many as the others, "
        "but needs as long for each",
        change="choose a `batch_size` that the number of workers divides, or more `shards=` so that shares are finer",
        gain=_balanced_gain(breakdown),
    )


def _busy_elsewhere(slow: RankTimes, excess: float, step: float) -> Finding:
    return Finding(
        kind="busy_elsewhere",
        rank=slow.rank,
        what=f"Rank {slow.rank} does something between steps that the others do not, and they wait for it.",
        why=f"its own part of a step is {ms(excess)} longer, but it neither computes slower nor waits for data",
        change="do printing, evaluating and saving of one rank less often, or outside of the loop",
        gain=excess / step,
    )
