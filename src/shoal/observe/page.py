"""An explanation as one HTML file that needs nothing else: no script, no font, no picture from anywhere. Pure.

Every text that comes from a run is cleaned and escaped on its way in, and the page forbids itself to load anything.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from typing import TYPE_CHECKING

from shoal.observe.breakdown import Breakdown, RankTimes
from shoal.observe.clean import one_line
from shoal.observe.diagnosis import CAUSES
from shoal.observe.finding import ms, percent
from shoal.observe.spending import PARTS, Spending
from shoal.observe.status import count, duration, number

if TYPE_CHECKING:
    from shoal.observe.explain import Explanation

_MEANING = {
    "compute": "computing",
    "communicate": "communication that was not hidden",
    "wait": "waiting for other ranks",
    "load": "waiting for data",
    "other": "the rest of a step",
    "checkpoint": "held up by saving checkpoints",
    "recover": "recovering after losses and joins",
    "between": "between steps",
}
_STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--paper:#fff;--soft:#5b6570;--line:#d7dde3;--card:#f5f7f9;
--compute:#2f6f4f;--communicate:#2b62b0;--wait:#b4511f;--load:#8a5cc2;--other:#8b949e;--checkpoint:#b8860b;
--recover:#b3261e;--between:#c9d1d9}
@media (prefers-color-scheme:dark){:root{--ink:#e6e9ec;--paper:#14171a;--soft:#9aa4ae;--line:#333a41;--card:#1d2125;
--compute:#57a680;--communicate:#6ba3ec;--wait:#e58a55;--load:#b793e6;--other:#7d8690;--checkpoint:#e0b23f;
--recover:#f2766d;--between:#3d454d}}
body{margin:0 auto;padding:1.5rem 1rem 4rem;max-width:70rem;font:16px/1.5 system-ui,sans-serif;color:var(--ink);
background:var(--paper)}
h1{font-size:1.5rem;overflow-wrap:anywhere}h2{font-size:1.15rem;margin-top:2.2rem}
p,li,td,th,dd{overflow-wrap:anywhere}.soft{color:var(--soft)}code{font-family:ui-monospace,monospace}
.card{background:var(--card);border:1px solid var(--line);border-radius:.5rem;padding:.7rem 1rem;margin:.6rem 0}
.card p{margin:.2rem 0}.scroll{overflow-x:auto}table{border-collapse:collapse}
th,td{text-align:left;padding:.25rem .8rem .25rem 0;border-bottom:1px solid var(--line);vertical-align:top}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}svg{display:block;width:100%;height:auto}
svg text{fill:var(--soft);font:11px system-ui,sans-serif}
.key{display:inline-block;width:.8em;height:.8em;margin-right:.4em;border-radius:.15em}
""" + "".join(f".{part}{{fill:var(--{part})}}.key.{part}{{background:var(--{part})}}" for part in PARTS)
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def write_page(explanation: "Explanation") -> str:
    """The whole page."""
    name = _safe(explanation.run.name)
    body = "\n".join(part for part in _body(explanation) if part)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(_POLICY, quote=True)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{name}: where the time went</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _safe(value: object) -> str:
    """Any text, as one that can do nothing but be read."""
    return escape(one_line(value), quote=True)


def _body(explanation: "Explanation") -> Iterator[str]:
    yield from _head(explanation)
    if explanation.cause is not None:
        cause = explanation.cause
        place = "" if cause.rank is None else f"rank {cause.rank}"
        yield _section("Why it failed", _card(cause.message, [("at", place), ("why", cause.why), ("do", cause.hint)]))
    if explanation.spending is not None:
        yield _section("Where the time went", _spending(explanation.spending))
        yield _section("Over time", _over_time(explanation.spending))
    if explanation.breakdown is not None and len(explanation.breakdown.ranks) > 1:
        yield _section("Rank by rank", _ranks(explanation.breakdown, explanation.spending))
    if explanation.findings:
        yield _section("What to change", "".join(map(_finding, explanation.findings)))
    if explanation.diagnoses:
        yield _section("What was diagnosed while it ran", "".join(_told(explanation)))
    if explanation.settings:
        rows = ((row.name, row.value, row.source) for row in explanation.settings)
        yield _section("Settings", _table(("setting", "value", "from"), rows))
    yield f'<p class="soft">{_safe(explanation.run.path)}</p>'


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def _head(explanation: "Explanation") -> Iterator[str]:
    run = explanation.run
    took = f" after {duration(explanation.seconds)}" if explanation.seconds is not None else ""
    yield f"<h1>{_safe(run.name)}</h1>"
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.created))
    workers = f", {run.num_workers} workers" if run.num_workers else ""
    host = f" on {_safe(run.host)}" if run.host else ""
    yield f"<p>{_safe(run.status)}{took}{workers}; started {started}{host}</p>"
    if run.command:
        yield f"<p><code>{_safe(run.command)}</code></p>"
    breakdown = explanation.breakdown
    if breakdown is not None:
        loss = ""
        if breakdown.first_loss is not None and breakdown.last_loss is not None:
            loss = f"; loss {number(breakdown.first_loss)} to {number(breakdown.last_loss)}"
        yield (
            f"<p>{breakdown.num_steps} steps, {ms(breakdown.step_median_seconds)} each, "
            f"{count(breakdown.samples_per_second)} samples/s{escape(loss)}</p>"
        )


def _spending(spending: Spending) -> str:
    bar = _bar(spending.parts, 0, 0, 1000, 28)
    label = ", ".join(f"{_MEANING[part]} {percent(share)}" for part, share in spending.parts.items() if share > 0)
    rows = [
        f'<tr><td><span class="key {part}"></span>{_MEANING[part]}</td><td class="n">{percent(spending.parts[part])}'
        f'</td><td class="n">{_safe(duration(spending.parts[part] * spending.wall_seconds))}</td></tr>'
        for part in PARTS
    ]
    waited = sorted(spending.waited_for.items(), key=lambda item: -item[1])[:8]
    whom = _table(("waited for", "by all others together"), ((f"rank {rank}", f"{s:.1f} s") for rank, s in waited))
    return (
        f'<svg viewBox="0 0 1000 28" role="img" aria-label="{escape(label, quote=True)}">{bar}</svg>'
        f'<table><thead><tr><th>part</th><th class="n">share</th><th class="n">time</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>{whom if waited else ''}"
    )


def _bar(parts: Mapping[str, float], x: float, y: float, width: float, height: float) -> str:
    """Parts side by side, from left to right."""
    drawn, at = [], x
    for part in PARTS:
        wide = width * parts.get(part, 0.0)
        if wide > 0:
            title = f"{_MEANING[part]} {percent(parts[part])}"
            drawn.append(
                f'<rect class="{part}" x="{at:.2f}" y="{y:.2f}" width="{wide:.2f}" height="{height:.2f}">'
                f"<title>{escape(title)}</title></rect>"
            )
        at += wide
    return "".join(drawn)


def _over_time(spending: Spending) -> str:
    """A column a period, its parts on top of each other; below it who was waited for."""
    periods, height = spending.periods, 160.0
    wide = 1000.0 / max(1, len(periods))
    drawn = []
    for index, period in enumerate(periods):
        at = height
        for part in PARTS:
            tall = height * period.parts.get(part, 0.0)
            at -= tall
            if tall > 0:
                title = f"{period.start:.0f} to {period.end:.0f} s: {_MEANING[part]} {percent(period.parts[part])}"
                drawn.append(
                    f'<rect class="{part}" x="{index * wide + 1:.2f}" y="{at:.2f}" width="{wide - 2:.2f}" '
                    f'height="{tall:.2f}"><title>{escape(title)}</title></rect>'
                )
        if period.waited_for is not None and period.waited_seconds > 0.02 * (period.end - period.start):
            drawn.append(f'<text x="{index * wide + 2:.2f}" y="{height + 14:.0f}">{period.waited_for}</text>')
    end = periods[-1].end if periods else 0.0
    drawn.append(f'<text x="0" y="{height + 30:.0f}">0 s; the number is the rank that was waited for most</text>')
    drawn.append(f'<text x="1000" y="{height + 30:.0f}" text-anchor="end">{end:.0f} s</text>')
    return (
        f'<div class="scroll"><svg viewBox="0 0 1000 {height + 34:.0f}" role="img" '
        f'aria-label="parts of the time in {len(periods)} periods">{"".join(drawn)}</svg></div>'
    )


def _ranks(breakdown: Breakdown, spending: Spending | None) -> str:
    rows = "".join(_rank_row(times, spending) for times in breakdown.ranks[:256])
    heads = ("rank", "own part of a step", "compute", "comm", "wait", "load", "other", "waited for", "over time")
    head = "".join(f"<th>{name}</th>" for name in heads)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _rank_row(times: RankTimes, spending: Spending | None) -> str:
    shares = times.shares
    cells = [f"rank {times.rank}", ms(times.own_seconds)]
    cells += [percent(getattr(shares, part)) for part in PARTS[:5]]
    cells.append(f"{times.waited_seconds:.1f} s")
    return f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}<td>{_spark(times.rank, spending)}</td></tr>"


def _spark(rank: int, spending: Spending | None) -> str:
    """The rank's own part of a step over time, against the longest of all ranks."""
    if spending is None:
        return ""
    most = max((max(period.own_seconds.values(), default=0.0) for period in spending.periods), default=0.0)
    drawn = []
    for index, period in enumerate(spending.periods):
        tall = 24 * period.own_seconds.get(rank, 0.0) / most if most > 0 else 0.0
        title = f"{period.start:.0f} s: {ms(period.own_seconds.get(rank, 0.0))}"
        drawn.append(
            f'<rect class="compute" x="{index * 6}" y="{24 - tall:.1f}" width="5" height="{tall:.1f}">'
            f"<title>{escape(title)}</title></rect>"
        )
    return f'<svg viewBox="0 0 144 24" width="144" height="24" aria-hidden="true">{"".join(drawn)}</svg>'


def _finding(finding: object) -> str:
    from shoal.observe.finding import Finding

    assert isinstance(finding, Finding)
    gain = f" [up to {percent(finding.gain)} less time]" if finding.gain else ""
    return _card(finding.what + gain, [("why", finding.why), ("do", finding.change)])


def _told(explanation: "Explanation") -> Iterator[str]:
    for told in explanation.diagnoses:
        cost = f" [costs {told.cost:.0f} % of the time]" if told.cost else ""
        after = f"{told.time - explanation.run.created:.1f} s after the start"
        cause = CAUSES.get(told.cause, told.cause)
        rank = "" if told.rank is None else f"rank {told.rank} "
        lines = [("what", f"{rank}{cause}; {after}"), ("why", told.why), ("do", told.hint)]
        yield _card(told.message + cost, lines)


def _card(title: str, lines: Iterable[tuple[str, str]]) -> str:
    rest = "".join(f'<p class="soft">{word}: {_safe(text)}</p>' for word, text in lines if text)
    return f'<div class="card"><p><strong>{_safe(title)}</strong></p>{rest}</div>'


def _table(heads: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join(f"<tr>{''.join(f'<td>{_safe(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
