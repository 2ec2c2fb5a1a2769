"""An explanation as text. Pure: everything is already known."""

import time
from collections.abc import Iterable, Iterator, Mapping
from signal import Signals
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from shoal.observe.breakdown import Breakdown, Shares, median
from shoal.observe.clean import clean, fit
from shoal.observe.equipment import write_equipment
from shoal.observe.finding import WORTH_SAYING, Finding, ms, percent
from shoal.observe.fold import name_ranks
from shoal.observe.spending import PARTS, Spending
from shoal.observe.status import count, duration, number

if TYPE_CHECKING:
    from shoal.observe.explain import Cause, Explanation, Note, Setting

_PARTS = ("compute", "communicate", "wait", "load", "other")
_TITLES = {"communicate": "comm"} | {part: part for part in _PARTS if part != "communicate"}
_BLOCKS = dict(zip(_PARTS, "█▓░▒·", strict=True))
_LETTERS = dict(zip(_PARTS, "#=.~ ", strict=True))
_MAX_RANKS = 16
_MAX_PREDICTIONS = 8


def write_report(explanation: "Explanation", width: int = 80, *, is_ascii: bool = False) -> str:
    """The whole report, ending with a newline."""
    width = max(30, width)
    lines = [*_head(explanation, width)]
    if explanation.cause:
        lines += _section("why it failed", _cause(explanation.cause, width))
    if explanation.breakdown:
        times = [*_times(explanation.breakdown, width, is_ascii), *_noise(explanation)]
        lines += _section("where the time went", times)
    lines += _section("how well its speed was predicted", _predictions(explanation))
    if explanation.spending:
        lines += _section("all of the time", _spending(explanation.spending, width, is_ascii))
    if explanation.history:
        lines += _section("who took part", _history(explanation, width, is_ascii))
    if explanation.equipment:
        lines += _section("what workers compute with", write_equipment(explanation.equipment))
    if explanation.findings:
        lines += _section("what to change", _findings(explanation.findings, width))
    lines += _section("what was diagnosed while it ran", _diagnoses(explanation, width))
    lines += _section("worth knowing", _notes(explanation, width))
    lines += _section("settings", _settings(explanation.settings))
    lines = [fit(line.rstrip(), width) for line in lines]
    # Not cut: people copy the path.
    lines += _section("files", _files(explanation))
    text = "\n".join(lines) + "\n"
    return text.encode("ascii", "replace").decode() if is_ascii else text


def _noise(explanation: "Explanation") -> Iterator[str]:
    if explanation.noise_scale is not None:
        yield f"gradient noise scale {count(explanation.noise_scale)} samples: larger batches gain little"


def _predictions(explanation: "Explanation") -> Iterator[str]:
    for made in explanation.predictions[-_MAX_PREDICTIONS:]:
        size = f"{made.workers} worker{'s' * (made.workers != 1)} on {made.nodes} node{'s' * (made.nodes != 1)}"
        yield (
            f"{size}, {made.micro_batch:g} samples each: expected {ms(made.expected_seconds)} "
            f"± {percent(made.spread)}, measured {ms(made.measured_seconds)}"
        )
    accuracy = explanation.accuracy
    if accuracy is not None:
        yield (
            f"median error {percent(accuracy.median_error)}, {accuracy.num_within} of {accuracy.num_made} "
            "within two standard deviations"
        )


def _section(title: str, body: Iterable[str]) -> list[str]:
    lines = [f"  {line}" for line in body]
    return ["", title, *lines] if lines else []


def _head(explanation: "Explanation", width: int) -> Iterator[str]:
    run = explanation.run
    status = run.status + (f" (exit code {run.exit_code})" if run.exit_code else "")
    took = f" after {duration(explanation.seconds)}" if explanation.seconds is not None else ""
    workers = f", {run.num_workers} worker{'s' * (run.num_workers != 1)}" if run.num_workers else ""
    yield from _wrapped(f"{clean(run.name)}: {status}{took}{workers}", width, "  ")
    if run.status == "lost":
        yield from _wrapped("  its launcher ended without a word (killed, or the machine went down)", width, "  ")
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.created))
    yield f"  started {started}" + (f" on {clean(run.host)}" if run.host else "")
    if run.command:
        yield fit(f"  $ {clean(run.command)}", width)
    if explanation.items is not None:
        yield f"  {_items(explanation.items)}"
    codes = {code for code in explanation.exits.values() if code}
    for code in sorted(codes):
        ranks = name_ranks(rank for rank, its in explanation.exits.items() if its == code)
        yield f"  rank {ranks}: {_ending(code)}"


def _items(items: Mapping[str, Any]) -> str:
    total, retries = items.get("total"), items.get("retries")
    text = f"{items.get('done')} of {total if total is not None else 'unknown'} items done"
    text += f", {count(float(items.get('per_second') or 0.0))} a second"
    return text + (f"; {retries} tried again" if retries else "")


def _ending(code: int) -> str:
    if code > 0:
        return f"exit code {code}"
    try:
        return f"ended by {Signals(-code).name}"
    except ValueError:
        return f"ended by signal {-code}"


def _cause(cause: "Cause", width: int) -> Iterator[str]:
    place = [
        f"rank {cause.rank}" if cause.rank is not None else "",
        f"step {cause.step}" if cause.step is not None else "",
    ]
    yield from _wrapped(f"error: {cause.message}", width - 2, "       ")
    for label, text in (
        ("   at: ", ", ".join(part for part in [*place, cause.where] if part)),
        ("  why: ", cause.why),
        ("   do: ", cause.hint),
    ):
        if text:
            yield from _wrapped(label + text, width - 2, "       ")
    if cause.others:
        yield f"       ({cause.others} more error{'s' * (cause.others > 1)} followed)"


def _times(breakdown: Breakdown, width: int, is_ascii: bool) -> Iterator[str]:
    first = breakdown.warmup_steps
    yield from _wrapped(
        f"{breakdown.num_steps} steps, {ms(breakdown.step_median_seconds)} each (99 % under "
        f"{ms(breakdown.step_p99_seconds)}), {count(breakdown.samples_per_second)} samples/s"
        + (f"; not counting {first} of warm-up ({breakdown.warmup_seconds:.1f} s)" if first else ""),
        width - 2,
    )
    if breakdown.last_loss is not None and breakdown.first_loss is not None:
        yield f"loss {number(breakdown.first_loss)} -> {number(breakdown.last_loss)}"
    yield ""
    marks = _LETTERS if is_ascii else _BLOCKS
    bar = min(40, width - 57) if width >= 66 else 0
    yield " " * 8 + "".join(f"  {marks[part]} {_TITLES[part]}" for part in _PARTS)
    yield _row("all", breakdown.shares, bar, marks)
    if len(breakdown.ranks) > 1:
        yield from _rank_rows(breakdown, bar, marks)
        yield ""
    if breakdown.slowest is not None:
        yield from _wrapped(_slowest(breakdown), width - 2)


def _rank_rows(breakdown: Breakdown, bar: int, marks: dict[str, str]) -> Iterator[str]:
    # With many ranks, those that are waited for most are the ones to see.
    shown = sorted(breakdown.ranks, key=lambda times: -times.own_seconds)[:_MAX_RANKS]
    for times in sorted(shown, key=lambda times: times.rank):
        yield _row(f"rank {times.rank}", times.shares, bar, marks)
    if len(breakdown.ranks) > len(shown):
        yield f"and {len(breakdown.ranks) - len(shown)} ranks that are faster"


def _slowest(breakdown: Breakdown) -> str:
    slow = next(times for times in breakdown.compared if times.rank == breakdown.slowest)
    typical = median([times.own_seconds for times in breakdown.compared if times.rank != slow.rank])
    excess = slow.own_seconds / typical - 1 if typical > 0 else 0.0
    if excess < WORTH_SAYING:
        return f"no rank stands out: all need about {ms(slow.own_seconds)} for their own part of a step"
    text = f"slowest: rank {slow.rank}, {ms(slow.own_seconds)} for its own part of a step; others {ms(typical)}"
    named = sum(times.num_waited_for for times in breakdown.compared)
    return text + (f"; it was the last to arrive in {percent(slow.num_waited_for / named)} of waits" if named else "")


def _row(name: str, shares: Shares, bar: int, marks: dict[str, str]) -> str:
    cells = "".join(f"{round(100 * getattr(shares, part)):{len(_TITLES[part]) + 3}}%" for part in _PARTS)
    return f"{name:8}{cells}  {_bar(shares, bar, marks)}"


def _bar(shares: Shares, bar: int, marks: dict[str, str]) -> str:
    """A stacked bar of exactly `bar` characters; ends of parts are rounded, so the parts always add up."""
    text, end = "", 0.0
    for part in _PARTS:
        end += getattr(shares, part) * bar
        text += marks[part] * (round(end) - len(text))
    return text.ljust(bar)


_SPENT = {
    "compute": "computing",
    "communicate": "communication not hidden",
    "wait": "waiting for others",
    "load": "waiting for data",
    "other": "the rest of steps",
    "checkpoint": "saving checkpoints",
    "recover": "recovering",
    "between": "between steps",
}
_MAX_DIAGNOSES = 12


def _spending(spending: Spending, width: int, is_ascii: bool) -> Iterator[str]:
    """Every part that is worth a word, and then the run from left to right: for each period its largest part."""
    shown = [part for part in PARTS if spending.parts[part] >= 0.005]
    text = ", ".join(f"{_SPENT[part]} {percent(spending.parts[part])}" for part in shown)
    yield from _wrapped(f"{duration(spending.wall_seconds)} from the first step to the last: {text}", width - 2)
    waited = max(spending.waited_for.items(), key=lambda item: item[1], default=None)
    if waited is not None and waited[1] >= 0.01 * spending.wall_seconds:
        yield from _wrapped(f"others waited {waited[1]:.1f} s in all for rank {waited[0]}, the most", width - 2)
    for part in shown:
        most = max(period.parts[part] for period in spending.periods)
        line = "".join(_height(period.parts[part], is_ascii) for period in spending.periods)
        yield f"{_SPENT[part]:25} {line}  at most {percent(most)}"


def _height(share: float, is_ascii: bool) -> str:
    """One character for a part of a period, the fuller the larger."""
    levels = " .:-=+*#%@" if is_ascii else " ▁▂▃▄▅▆▇█"
    return levels[min(len(levels) - 1, round(share * (len(levels) - 1) + (0.4 if share > 0 else 0.0)))]


def _diagnoses(explanation: "Explanation", width: int) -> Iterator[str]:
    for told in explanation.diagnoses[:_MAX_DIAGNOSES]:
        cost = f" [costs {told.cost:.0f} % of the time]" if told.cost else ""
        after = told.time - explanation.run.created
        yield from _wrapped(f"- {duration(max(0.0, after))}: {told.message}{cost}", width - 2, "  ")
        if told.why:
            yield from _wrapped(f"  why: {told.why}", width - 2, "       ")
        if told.hint:
            yield from _wrapped(f"   do: {told.hint}", width - 2, "       ")
    if (rest := len(explanation.diagnoses) - _MAX_DIAGNOSES) > 0:
        yield f"and {rest} more: see `--json`"


def _history(explanation: "Explanation", width: int, is_ascii: bool) -> Iterator[str]:
    from shoal.observe.history_text import write_history

    assert explanation.history is not None
    start = explanation.run.created
    end = start + (explanation.seconds or 0.0)
    for line in write_history(explanation.history, start, end, width, is_ascii=is_ascii):
        yield line if len(line) <= width - 2 else fit(line, width - 2)


def _findings(findings: Iterable[Finding], width: int) -> Iterator[str]:
    for finding in findings:
        gain = f" [up to {percent(finding.gain)} less time]" if finding.gain else ""
        yield from _wrapped(f"- {finding.what}{gain}", width - 2, "  ")
        if finding.why:
            yield from _wrapped(f"  why: {finding.why}", width - 2, "       ")
        if finding.change:
            yield from _wrapped(f"   do: {finding.change}", width - 2, "       ")


def _notes(explanation: "Explanation", width: int) -> Iterator[str]:
    for note in explanation.notes:
        yield from _wrapped(_note(note), width - 2, "  ")
    if not explanation.breakdown and explanation.items is None:
        yield from _wrapped("no steps were recorded: scripts that use `shoal.Trainer` record theirs", width - 2, "  ")
    if explanation.num_damaged:
        yield f"{explanation.num_damaged} damaged lines in journal and metrics were passed over"


def _note(note: "Note") -> str:
    place = [
        f"rank {note.rank}" if note.rank is not None else "",
        f"step {note.step}" if note.step is not None else "",
    ]
    where = ", ".join(part for part in place if part)
    times = f" ({note.count} times, the last" if note.count > 1 else " (" if where else ""
    closing = (f"{' at ' if note.count > 1 and where else ''}{where})") if times else ""
    return f"{note.kind.replace('_', ' ')}{times}{closing}" + (f": {note.text}" if note.text else "")


def _settings(settings: Iterable["Setting"]) -> Iterator[str]:
    rows = list(settings)
    wide = max((len(row.name) for row in rows), default=0)
    for row in rows:
        yield f"{row.name:{wide}}  {row.value}" + (f"  ({row.source})" if row.source else "")


def _files(explanation: "Explanation") -> Iterator[str]:
    yield clean(explanation.run.path)
    if explanation.log_bytes:
        ranks = name_ranks(explanation.log_bytes)
        yield f"logs of rank {ranks}: {count(sum(explanation.log_bytes.values()))} bytes, see `shoal logs`"


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    return wrap(text, max(20, width), subsequent_indent=indent, break_on_hyphens=False) or [""]
