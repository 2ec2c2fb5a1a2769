"""A run as a small piece of HTML, with its loss as a picture in it: SVG, without a script. Pure."""

import math
from collections.abc import Mapping, Sequence
from html import escape

from shoal.observe.runs import RunInfo
from shoal.observe.status import duration, number

WIDTH, HEIGHT = 560, 200
LEFT, RIGHT, TOP, BOTTOM = 56, 8, 8, 24
MAX_POINTS = WIDTH - LEFT - RIGHT
Numbers = Sequence[int] | Sequence[float] | Sequence[float | None]


def run_html(run: RunInfo, columns: Mapping[str, Numbers], now: float) -> str:
    """What became of a run and how its loss went; of what has no loss, the first number there is."""
    ended = now if run.status == "running" else run.ended
    facts = [
        f"status <b>{_text(run.status)}</b>",
        *([f"{run.num_workers} workers"] if run.num_workers else []),
        *([duration(ended - run.created)] if ended is not None else []),
        *([f"{len(columns['step'])} steps"] if columns["step"] else []),
    ]
    name = "loss" if "loss" in columns else next((each for each in columns if each not in ("step", "time")), None)
    picture = plot(name, columns["step"], columns[name]) if name is not None else ""
    return (
        f'<div class="shoal-run"><div><b>{_text(run.name)}</b> &middot; {" &middot; ".join(facts)}</div>'
        f"<div><code>{_text(run.command)}</code></div>{picture}</div>"
    )


def _text(text: str) -> str:
    """Text of others: no markup, and nothing that turns the direction of what stands around it."""
    from shoal.observe.clean import one_line

    return f"<bdi>{escape(one_line(text))}</bdi>"


def plot(name: str, steps: Numbers, values: Numbers) -> str:
    """One curve as SVG; a band shows lowest and highest where several steps share a point."""
    points = [
        (float(step), float(value))
        for step, value in zip(steps, values, strict=True)
        if step is not None and value is not None and math.isfinite(value)
    ]
    if not points:
        return f"<div>no {_text(name)} that is a number</div>"
    merged = _merge(points)
    first, last = points[0][0], max(points[-1][0], points[0][0] + 1)
    low, high = min(point[1] for point in merged), max(point[3] for point in merged)
    if high - low < 1e-12 * max(1.0, abs(high)):
        low, high = low - 0.5 * max(abs(low), 1e-9), high + 0.5 * max(abs(high), 1e-9)

    def x(step: float) -> float:
        return LEFT + (step - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM)

    line = " ".join(f"{x(step):.1f},{y(mean):.1f}" for step, _, mean, _ in merged)
    upper = [f"{x(step):.1f},{y(most):.1f}" for step, _, _, most in merged]
    lower = [f"{x(step):.1f},{y(least):.1f}" for step, least, _, _ in reversed(merged)]
    labels = [
        (LEFT - 4, y(high) + 4, "end", number(high)),
        (LEFT - 4, y(low) + 4, "end", number(low)),
        (LEFT, HEIGHT - 6, "start", f"step {first:.0f}"),
        (WIDTH - RIGHT, HEIGHT - 6, "end", f"{last:.0f}"),
    ]
    words = "".join(
        f'<text x="{left:.1f}" y="{top:.1f}" text-anchor="{anchor}" font-size="11" fill="currentColor">'
        f"{escape(text)}</text>"
        for left, top, anchor, text in labels
    )
    about = f"{name} over {len(points)} steps, from {number(points[0][1])} to {number(points[-1][1])}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'role="img" aria-label="{escape(about, quote=True)}"><title>{escape(about)}</title>'
        f'<path d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}" fill="none" stroke="currentColor" opacity="0.4"/>'
        f'<polygon points="{" ".join(upper + lower)}" fill="#2a78d6" opacity="0.25"/>'
        f'<polyline points="{line}" fill="none" stroke="#2a78d6" stroke-width="1.5"/>{words}</svg>'
    )


def _merge(points: Sequence[tuple[float, float]]) -> list[tuple[float, float, float, float]]:
    """At most a point a pixel: step, lowest, mean, highest."""
    size = max(1, math.ceil(len(points) / MAX_POINTS))
    merged = []
    for begin in range(0, len(points), size):
        values = [value for _, value in points[begin : begin + size]]
        merged.append((points[begin][0], min(values), sum(values) / len(values), max(values)))
    return merged
