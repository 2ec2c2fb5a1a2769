"""Who holds up the others just now, and by what. Pure: the last steps of all ranks in, at most one name out.

Ranks are compared step by step, so what slows all of them down is nobody's fault. A rank is named only if it was the
slow one in nearly all of the last dozen steps: a hiccup, or a busy machine, takes turns.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import log

from shoal.observe.breakdown import median
from shoal.observe.diagnosis import Diagnosis
from shoal.observe.finding import ms
from shoal.observe.gauge import Strain
from shoal.observe.straggler import SMALLER_STAGE
from shoal.observe.window import StepRow

NUM_STEPS, MIN_SLOW = 12, 10
NUM_LONG_STEPS, MIN_LONG_SLOW = 6, 5
LONG_STEP_SECONDS = 0.3
"""Steps this long vary little, and fewer of them say as much."""
WORTH_STEP = 0.2
"""The part of a step that others must lose on average; in each slow step it is three quarters of that."""
MIN_EXCESS_SECONDS = 0.002
SHIFT, FAR_OFF = 1.4, 1.7
"""How much slower a sample must be computed than before, or than by others from the beginning on."""
OTHER_SHARE, LEAST_POWER = 1.4, 0.4
"""With a share that many times as large a step must have taken longer by at least this power of it: else what takes
long is not the samples."""
MORE_DATA = 1.25
MIN_ALIKE = 5
MAX_POWER = 2.2
"""Twice as much data takes up to this power of two as long: attention is quadratic."""
THROTTLED, MUCH_DELAY, FAULTS_PER_SECOND = 0.05, 0.3, 20.0

Rows = Mapping[int, Mapping[int, StepRow]]
"""rank -> step -> what it took."""
Shares = Mapping[int, dict[int, float]]
"""rank -> number of samples it once had in a step -> the seconds it computed then; the newest come last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """`excess` is the part of a step that its own part takes longer than that of the others would, `cost` the part
    of a step that all lose by it. `part` is where the excess is: compute, load or other.
    """

    rank: int
    part: str
    excess: float
    cost: float
    last_step: int


def find_straggler(rows: Rows, *, are_alike: bool = True, shares: Shares | None = None) -> Straggler | None:
    """The rank that held up the others in nearly all of the last steps that all have told of.

    Where faster ranks were given more of the work nobody waits: then it is the one whose samples suddenly take
    longer, or far longer than those of the others from the beginning on, if all compute with the same (`are_alike`).
    One that took as long when it had more samples (`shares`) is none: its steps are short of samples, not slow; but
    for one that took less before with as many as now.
    """
    common = sorted(set.intersection(*(set(mine) for mine in rows.values()))) if len(rows) > 1 else []
    few = common[-NUM_STEPS:]
    is_long = median([_length(rows, step) for step in few]) >= LONG_STEP_SECONDS
    number, least = (NUM_LONG_STEPS, MIN_LONG_SLOW) if is_long else (NUM_STEPS, MIN_SLOW)
    few = common[-number:]
    if len(few) < number:
        return None
    if late := _waited_for(rows, few, least):
        return late
    # Copies that train by themselves have no samples at all in some steps, where one of them is given less.
    busy = [step for step in common if all(mine[step].num_samples for mine in rows.values())]
    few, before = busy[-number:], busy[:-number]
    if len(few) < number:
        return None
    slow = _slowed_down(rows, few, before, least, are_alike=are_alike)
    if slow is None or _took_less(rows[slow.rank], few, before):
        return slow
    return slow if _is_by_samples(rows[slow.rank], few, (shares or {}).get(slow.rank, {})) else None


def _took_less(mine: Mapping[int, StepRow], steps: Sequence[int], before: Sequence[int]) -> bool:
    """Whether a rank computed for a shorter time before, with as many samples."""
    samples = median([float(mine[step].num_samples) for step in steps])
    then = [mine[step].compute for step in before if mine[step].num_samples == samples]
    return len(then) >= MIN_ALIKE and median([mine[step].compute for step in steps]) >= SHIFT * median(then)


def _is_by_samples(mine: Mapping[int, StepRow], steps: Sequence[int], once: dict[int, float]) -> bool:
    """Whether what a rank computes takes longer the more samples it has, as far as it has had more."""
    samples = median([float(mine[step].num_samples) for step in steps])
    seconds = median([mine[step].compute for step in steps])
    # The newest: what it took with still more may have been while it was well.
    more = next((number for number in reversed(once) if number >= OTHER_SHARE * samples), 0)
    if not more or not samples or seconds <= 0 or once[more] <= 0:
        return True
    return log(once[more] / seconds) >= LEAST_POWER * log(more / samples)


def _length(rows: Rows, step: int) -> float:
    return max(mine[step].seconds for mine in rows.values())


def _against(rows: Rows, rank: int, step: int, value: Callable[[StepRow], float]) -> tuple[float, float]:
    """What the rank has, and what is usual among the others."""
    others = [value(mine[step]) for other, mine in rows.items() if other != rank]
    return value(rows[rank][step]), median(others)


def _excess(rows: Rows, rank: int, step: int, value: Callable[[StepRow], float]) -> float:
    mine, theirs = _against(rows, rank, step, value)
    return mine - theirs


def _waited_for(rows: Rows, steps: Sequence[int], least: int) -> Straggler | None:
    lengths = {step: _length(rows, step) for step in steps}
    excess = {rank: [_excess(rows, rank, step, lambda row: row.own) for step in steps] for rank in rows}
    rank = max(excess, key=lambda each: median(excess[each]))
    usual = median(excess[rank])
    slow = [late >= 0.75 * WORTH_STEP * lengths[step] for late, step in zip(excess[rank], steps, strict=True)]
    cost = usual / (median(list(lengths.values())) or 1e-9)
    if sum(slow) < least or cost < WORTH_STEP or usual < MIN_EXCESS_SECONDS:
        return None
    parts: dict[str, Callable[[StepRow], float]] = {
        "compute": lambda row: row.compute,
        "load": lambda row: row.load,
        "other": lambda row: row.other + row.between,
    }
    part = max(parts, key=lambda name: median([_excess(rows, rank, step, parts[name]) for step in steps]))
    return Straggler(rank=rank, part=part, excess=cost, cost=min(cost, 0.99), last_step=steps[-1])


def _rate(row: StepRow) -> float:
    return row.compute / row.num_samples if row.num_samples else 0.0


def _ratio(rows: Rows, rank: int, step: int) -> float:
    """Against the middle of the others: of two their mean, for the slower one would hide a rank where steps vary."""
    mine, others = _rate(rows[rank][step]), sorted(_rate(rows[other][step]) for other in rows if other != rank)
    theirs = (others[len(others) // 2] + others[(len(others) - 1) // 2]) / 2
    return mine / theirs if theirs > 0 and mine > 0 else 1.0


def _slowed_down(
    rows: Rows, steps: Sequence[int], before: Sequence[int], least: int, *, are_alike: bool
) -> Straggler | None:
    ratios = {rank: [_ratio(rows, rank, step) for step in steps] for rank in rows}
    rank = max(ratios, key=lambda each: median(ratios[each]))
    mine = ratios[rank]
    if median(mine) < SHIFT:
        return None  # as nearly always, and soon found
    rate = median([_rate(rows[rank][step]) for step in steps])
    compute = median([rows[rank][step].compute for step in steps])
    if compute < MIN_EXCESS_SECONDS:
        return None
    is_far_off = are_alike and sum(ratio >= FAR_OFF for ratio in mine) > least
    if len(before) >= len(steps) and not is_far_off:
        usual, own = median([_ratio(rows, rank, step) for step in before]), [_rate(rows[rank][s]) for s in before]
        is_shift = sum(ratio >= SHIFT * max(1.0, usual) for ratio in mine) >= least
        if not is_shift or rate < SHIFT * median(own):
            return None
    elif not is_far_off:
        return None
    theirs = median([_against(rows, rank, step, _rate)[1] for step in steps])
    speeds = sum(1 / theirs if other != rank else 1 / rate for other in rows)
    share = compute / (median([_length(rows, step) for step in steps]) or 1e-9)
    cost = (1 - speeds * theirs / len(rows)) * min(1.0, share)
    excess = min(1.0, share) * (1 - theirs / rate)
    return Straggler(rank=rank, part="compute", excess=excess, cost=cost, last_step=steps[-1])


def explain_straggler(found: Straggler, rows: Rows, strain: Strain, cut: str = "") -> Diagnosis:
    """Why that rank is slow, from what it did and what the kernel says of it, and what to do about it.

    `cut` is what of the model each rank holds, see `find_cut`.
    """
    steps = sorted(set.intersection(*(set(mine) for mine in rows.values())))[-NUM_STEPS:]
    rank, is_stage = found.rank, cut == "stages"

    def tell(cause: str, message: str, why: str, hint: str) -> Diagnosis:
        return Diagnosis(
            cause=cause,
            rank=rank,
            message=f"Rank {rank} {message}",
            why=why,
            hint=hint,
            cost=found.cost,
            step=found.last_step,
        )

    if found.part == "load":
        mine, theirs = _usual(rows, rank, steps, lambda row: row.load)
        return tell(
            "slow_input",
            "is waited for because its data comes late.",
            f"it waits {ms(mine)} a step for data; others {ms(theirs)}",
            "raise `loaders=`, or check the disk or network this rank reads from",
        )
    if found.part == "other":
        mine, theirs = _usual(rows, rank, steps, lambda row: row.other + row.between)
        return tell(
            "busy_elsewhere",
            "is waited for because it does something else between steps.",
            f"that takes it {ms(mine)} a step; others {ms(theirs)}",
            "do printing, evaluating and saving of one rank less often, or outside of the loop",
        )
    time_ratio, data_ratio, share_ratio = _ratios(rows, rank, steps)
    if data_ratio >= MORE_DATA and time_ratio <= MORE_DATA * data_ratio**MAX_POWER:
        return tell(
            "uneven_data",
            "is waited for because its samples are larger than those of the others.",
            f"a sample of it has {data_ratio:.2f} times as many values, and takes {time_ratio:.2f} times as long",
            "shuffle samples of all lengths together, group those of like length, or cut the longest",
        )
    if share_ratio >= MORE_DATA and time_ratio < MORE_DATA:
        return tell(
            "uneven_shares",
            "is waited for because it gets more samples than the others.",
            f"{share_ratio:.2f} times as many in a step, and it needs as long for each",
            "choose a `batch_size` that the number of workers divides, or more `shards=`",
        )
    cause, message, why, hint = _slow_compute(time_ratio, strain)
    return tell(cause, message, why, f"{hint}; or {SMALLER_STAGE}" if is_stage and cause == "slow_compute" else hint)


def _slow_compute(ratio: float, strain: Strain) -> tuple[str, str, str, str]:
    seconds = max(strain.seconds, 1e-6)
    slower = f"a sample takes it {ratio:.2f} times what it takes the others"
    if strain.throttled / seconds >= THROTTLED:
        return (
            "throttled",
            "computes slower than the others: a quota holds it back.",
            f"{slower}; its control group was throttled for {100 * strain.throttled / seconds:.0f} % of the time",
            "raise the CPU limit of its container or cgroup, or ask for fewer threads",
        )
    if strain.major_faults / seconds >= FAULTS_PER_SECOND:
        return (
            "swapping",
            "computes slower than the others: its memory is on disk.",
            f"{slower}; {strain.major_faults / seconds:.0f} pages a second are read back from disk",
            "use fewer workers on that machine, a smaller `microbatch_size=`, or give it more memory",
        )
    if strain.run_delay / seconds >= MUCH_DELAY:
        return (
            "no_core",
            "computes slower than the others: something else uses its core.",
            f"{slower}; it waited for a core for {100 * strain.run_delay / seconds:.0f} % of the time",
            "use fewer workers or threads on that machine, or end what else runs there",
        )
    idle = 1 - strain.cpu / seconds
    return (
        "slow_compute",
        "computes slower than the others, who wait for it.",
        slower + (f"; its threads did nothing for {100 * idle:.0f} % of the time" if idle > 0.5 else ""),
        "check clock speed, temperature and thread count of its machine, and what the model does on this rank only",
    )


def _usual(rows: Rows, rank: int, steps: Sequence[int], value: Callable[[StepRow], float]) -> tuple[float, float]:
    both = [_against(rows, rank, step, value) for step in steps]
    return median([mine for mine, _ in both]), median([theirs for _, theirs in both])


def _ratios(rows: Rows, rank: int, steps: Sequence[int]) -> tuple[float, float, float]:
    """Against the others: time of a sample, values of a sample, samples of a step."""

    def ratio(value: Callable[[StepRow], float]) -> float:
        mine, theirs = _usual(rows, rank, steps, value)
        return mine / theirs if theirs > 0 else 1.0

    values = ratio(lambda row: row.num_values / row.num_samples if row.num_samples else 0.0)
    return ratio(_rate), values, ratio(lambda row: float(row.num_samples))
