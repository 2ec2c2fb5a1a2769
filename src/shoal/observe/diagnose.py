"""What a breakdown means: who is slow and why, what to change, and what that would gain. Pure."""

from collections.abc import Callable, Iterable, Sequence

from shoal.observe.breakdown import Breakdown
from shoal.observe.finding import WORTH_SAYING, Finding, ms, percent
from shoal.observe.spending import Spending
from shoal.observe.straggler import longest_step, slow_rank
from shoal.spec.event import Event

COMMUNICATION_BOUND = 0.15
MUCH_ELSE = 0.15
SHORT_STEP_SECONDS = 0.003
_CUTS = {"pipeline": "stages", "tensor_plan": "slices"}


def diagnose(
    breakdown: Breakdown | None, events: Sequence[Event] = (), spending: Spending | None = None
) -> list[Finding]:
    """What is wrong with a run, the largest gain first; one finding that says so where nothing is."""
    if breakdown is None:
        return []
    cut = find_cut(events)
    found = [*slow_rank(breakdown, cut), *communication_bound(breakdown, cut)]
    found += [finding for rule in RULES for finding in rule(breakdown)]
    found += _too_many_threads(breakdown, events)
    found += [] if spending is None else [*much_saving(spending), *much_recovering(spending)]
    if not any(finding.gain or finding.kind == "bad_loss" for finding in found):
        found.append(_healthy(breakdown))
    return sorted(found, key=lambda finding: -(finding.gain or 0.0))


def input_bound(breakdown: Breakdown) -> Iterable[Finding]:
    """All ranks wait for data."""
    loads = sorted(times.load_seconds for times in breakdown.compared)
    gain = loads[len(loads) // 2] / longest_step(breakdown)
    if gain >= WORTH_SAYING:
        yield Finding(
            kind="input_bound",
            what="Steps wait for data.",
            why=f"loading takes {percent(gain)} of a step more than what happens in the background",
            change="raise `loaders=`, or prepare the data once and store it in the form the model takes",
            gain=gain,
        )


def find_cut(events: Iterable[Event]) -> str:
    """What several workers hold one copy of the model as: "stages", "slices", or nothing where none does."""
    told = [_CUTS[event.kind] for event in events if event.kind in _CUTS]
    return told[-1] if told else ""


def pipeline_bubble(breakdown: Breakdown) -> Iterable[Finding]:
    """A pipeline is short of micro-batches."""
    bubble = min((times.bubble for times in breakdown.compared), default=0.0)
    if bubble >= WORTH_SAYING:
        yield Finding(
            kind="pipeline_bubble",
            what=f"The schedule of the pipeline makes every stage wait for {percent(bubble)} of a step.",
            why="each step fills the pipeline and empties it again; nobody is late",
            change='raise `microbatches=` of `shoal.pipeline`, or choose its `schedule="interleaved"`',
            gain=bubble / 2,
        )


def communication_bound(breakdown: Breakdown, cut: str = "") -> Iterable[Finding]:
    """Moving gradients takes a large part of each step."""
    share = min((times.shares.communicate for times in breakdown.compared), default=0.0)
    if len(breakdown.compared) > 1 and share >= COMMUNICATION_BOUND and cut:
        yield Finding(
            kind="communication_bound",
            what=f"What the {cut} of the model tell each other takes {percent(share)} of a step.",
            why="a worker computes little between two messages",
            change="cut the model among fewer workers, and use the others as more copies of it",
            gain=share / 2,
        )
    elif len(breakdown.compared) > 1 and share >= COMMUNICATION_BOUND:
        yield Finding(
            kind="communication_bound",
            what=f"Moving and summing gradients takes {percent(share)} of a step.",
            why="its cost does not depend on the batch, and there is too little computing to hide it behind",
            change="double `batch_size`, or use fewer workers with more threads each (`--threads`)",
            gain=share / 2,
        )


def uneven_steps(breakdown: Breakdown) -> Iterable[Finding]:
    """Ranks take turns in being late: nobody is slow, yet everybody waits."""
    if len(breakdown.compared) < 2:
        return
    wait = min(times.shares.wait - times.bubble for times in breakdown.compared)
    own = max(times.own_seconds for times in breakdown.compared)
    if wait < WORTH_SAYING:
        return
    what = f"Every rank waits {percent(wait)} of the time or more, but not for the same one."
    if own < SHORT_STEP_SECONDS:
        yield Finding(
            kind="short_steps",
            what=what,
            why=f"a rank's own part of a step, {ms(own)}, is so short that a moment's delay of another counts",
            change="double `batch_size`, or use one worker with more threads",
            gain=wait / 2,
        )
    else:
        yield Finding(
            kind="uneven_steps",
            what=what,
            why="steps of one rank vary: samples of different length, or other work on these cores",
            change="leave a core free, use fewer workers, or batch samples of like length",
            gain=wait,
        )


def much_saving(spending: Spending) -> Iterable[Finding]:
    """Saving holds up training."""
    share = spending.parts["checkpoint"]
    if share >= WORTH_SAYING:
        each = spending.checkpoint_seconds / max(1, spending.num_checkpoints)
        yield Finding(
            kind="much_saving",
            what=f"Saving checkpoints holds up training for {percent(share)} of the time.",
            why=f"{spending.num_checkpoints} of them, {ms(each)} each, beside what is written in the background",
            change="raise `checkpoint_every=`, or keep the run folder on a faster disk",
            gain=share,
        )


def much_recovering(spending: Spending) -> Iterable[Finding]:
    """Losses and joins cost much."""
    share = spending.parts["recover"]
    if share >= WORTH_SAYING:
        yield Finding(
            kind="much_recovering",
            what=f"Recovering from losses and joins takes {percent(share)} of the time.",
            why=f'{spending.recover_seconds:.1f} s in all; "who took part" says when and why',
            change="look at why workers are lost; save more often where steps are taken again",
            gain=share,
        )


def much_else(breakdown: Breakdown) -> Iterable[Finding]:
    """Time that is neither computing nor moving nor waiting."""
    share = min((times.shares.other for times in breakdown.compared), default=0.0)
    if share >= MUCH_ELSE:
        yield Finding(
            kind="much_else",
            what=f"{percent(share)} of a step is spent outside of forward, backward and communication.",
            why=f"at {ms(breakdown.step_median_seconds)} a step the fixed cost of a step counts",
            change="double `batch_size`; do less in the loop between steps",
            gain=share / 2,
        )


def late_start(breakdown: Breakdown) -> Iterable[Finding]:
    """A rank came late to its first step; that is paid once."""
    if len(breakdown.compared) < 2:
        return
    late = max(breakdown.compared, key=lambda times: times.start_delay_seconds)
    if late.start_delay_seconds >= 1.0:
        yield Finding(
            kind="late_start",
            rank=late.rank,
            what=f"Rank {late.rank} came {late.start_delay_seconds:.1f} s late to its first step.",
            why="it was launched late or prepared longer; paid once, it does not slow the steps after it",
            change="where runs are short, look at what the script does before training on this rank",
        )


def long_warmup(breakdown: Breakdown) -> Iterable[Finding]:
    """Most of the time went into the first steps."""
    total = breakdown.warmup_seconds + breakdown.wall_seconds
    if breakdown.warmup_seconds > 0.25 * total and breakdown.warmup_seconds > 1.0:
        yield Finding(
            kind="long_warmup",
            what=f"Warm-up took {breakdown.warmup_seconds:.1f} s of {total:.1f} s of training.",
            why="first steps start threads, fill caches and compile; longer runs pay the same",
        )


def rare_long_steps(breakdown: Breakdown) -> Iterable[Finding]:
    """A few steps take many times the usual time."""
    ratio = breakdown.step_p99_seconds / (breakdown.step_median_seconds or 1e-9)
    if ratio >= 3 and breakdown.num_steps >= 100:
        yield Finding(
            kind="rare_long_steps",
            what=f"One step in a hundred takes {ratio:.1f} times as long as usual.",
            why="something else now and then: other processes, evaluating, saving, collecting garbage",
            change="compare the times of the longest steps with the events below",
        )


def bad_loss(breakdown: Breakdown) -> Iterable[Finding]:
    """The loss was not a number."""
    if breakdown.num_bad_losses:
        yield Finding(
            kind="bad_loss",
            what=f"The loss is not a finite number from step {breakdown.first_bad_step} on"
            f" ({breakdown.num_bad_losses} steps).",
            change="lower the learning rate, clip gradients, or look at the samples of that step",
        )


def _too_many_threads(breakdown: Breakdown, events: Sequence[Event]) -> Iterable[Finding]:
    told = (event.data for event in events if event.kind in ("run_started", "settings"))
    facts = {name: value for data in told for name, value in data.items()}
    threads, cores = _setting(facts.get("threads")), _setting(facts.get("num_cores"))
    workers = len(breakdown.compared)
    if not threads or not cores or workers * threads <= cores:
        return
    yield Finding(
        kind="too_many_threads",
        what=f"{workers} workers with {threads} thread{'s' * (threads != 1)} each share {cores} cores.",
        why="threads that take turns on a core make every step wait for the one whose turn is last",
        change=f"use `--threads {cores // workers}`" if workers <= cores else f"use at most `-n {cores}`",
    )


def _setting(value: object) -> int:
    if isinstance(value, dict):
        value = value.get("value")
    return value if isinstance(value, int) else 0


def _healthy(breakdown: Breakdown) -> Finding:
    return Finding(
        kind="healthy",
        what=f"Nothing stands out: {percent(breakdown.shares.compute)} of the time is computing.",
        change="" if len(breakdown.compared) > 1 else "more workers or threads are what is left to try: `-n auto`",
    )


RULES: tuple[Callable[[Breakdown], Iterable[Finding]], ...] = (
    input_bound,
    pipeline_bubble,
    uneven_steps,
    much_else,
    late_start,
    long_warmup,
    rare_long_steps,
    bad_loss,
)
