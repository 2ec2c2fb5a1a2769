"""`shoal simulate`: what a policy would have made of a trace, on a cluster that need not exist."""

import json
import sys
import time
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

from shoal.observe.status import duration
from shoal.place.described import read_cluster
from shoal.place.policies import POLICIES
from shoal.place.report import summarize
from shoal.place.simulate import Result, Setting, simulate
from shoal.place.traces.opening import KNOWLEDGE, read_trace
from shoal.service.settings import Settings, apply_limits, parse_settings
from shoal.spec.errors import UserError
from shoal.verb_parser import Parser, unknown

WIDTH, HEIGHT, LEFT = 720, 180, 60


def main(argv: list[str]) -> int:
    """What `shoal simulate TRACE` does; returns the exit code."""
    parser = Parser(
        "simulate",
        "Run a trace of jobs through a policy, on a cluster that exists in numbers only.",
        "TRACE --policy P --cluster 16x4:t4 [--json] [--plot FILE]",
    )
    parser.add_argument("trace", metavar="TRACE", help="CSV or JSON; docs/scheduling.md says which forms are known")
    parser.add_argument("--policy", help=f"one of {', '.join(POLICIES)} (default: that of --settings, else goodput)")
    parser.add_argument("--cluster", default="16x4:t4", help="COUNTxGPUS:KIND, several joined by +, or a file")
    parser.add_argument("--settings", metavar="FILE", help="a service.toml: policy, partitions, shares, nodes")
    parser.add_argument("--round", type=float, default=60.0, metavar="SECONDS", help="from decision to decision (60)")
    parser.add_argument("--know", default="known", help=f"what is known of lengths: {', '.join(KNOWLEDGE)} (known)")
    parser.add_argument("--profiles", metavar="DIR", help="of Pollux's applications (default: beside its workloads)")
    parser.add_argument("--throughputs", metavar="FILE", help="of Gavel's or Shockwave's jobs (default: beside)")
    parser.add_argument(
        "--share-gpus",
        action="store_true",
        help="two jobs may share GPUs, where this table has their speeds then",
    )
    parser.add_argument("--skip-unmeasured", action="store_true", help="leave out jobs that this table does not know")
    parser.add_argument("--plot", metavar="FILE", help="write an SVG: GPUs in use, the queue, completion times")
    parser.add_argument("--json", action="store_true", help="as JSON, job by job")
    options = parser.parse_args(argv)
    settings = _settings(Path(options.settings)) if options.settings else Settings()
    policy = options.policy or (settings.policy if options.settings else "goodput")
    if policy not in POLICIES:
        raise unknown(policy, "policy", POLICIES, f"there are {', '.join(POLICIES)}")
    if options.know not in KNOWLEDGE:
        raise unknown(options.know, "kind of knowledge", KNOWLEDGE, f"there are {', '.join(KNOWLEDGE)}")
    setting = Setting(
        nodes=tuple(
            apply_limits(node, settings, {}) if node.name in settings.nodes else node
            for node in read_cluster(options.cluster)
        ),
        round_seconds=options.round,
        partitions=settings.partitions,
        shares=settings.shares,
    )
    work = read_trace(
        Path(options.trace),
        profiles=Path(options.profiles) if options.profiles else None,
        throughputs=Path(options.throughputs) if options.throughputs else None,
        knowledge=options.know,
        skips_unmeasured=options.skip_unmeasured,
        shares_gpus=options.share_gpus,
    )
    result = simulate(work, POLICIES[policy], setting, clock=time.perf_counter, on_round=_progress())
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    facts = {"policy": policy, "cluster": options.cluster, **summarize(result)}
    if options.plot:
        _write(Path(options.plot), picture(result, f"{Path(options.trace).name}, {policy}"))
    if options.json:
        jobs = [{**_fields(outcome), "jct_seconds": outcome.jct_seconds} for outcome in result.outcomes]
        sys.stdout.write(json.dumps({**facts, "jobs": jobs}) + "\n")
    else:
        sys.stdout.write(_told(facts))
    return 0


def _settings(path: Path) -> Settings:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{path} cannot be read.", why=why) from None
    return parse_settings(text, str(path), lambda: POLICIES)


def _fields(outcome: Any) -> dict[str, Any]:
    return {name: getattr(outcome, name) for name in outcome.__slots__}


def _progress() -> Callable[[float, int, int], None]:
    """A line on stderr once a second: how far it is. Where nobody watches, a line every ten seconds."""
    is_watched = sys.stderr.isatty()
    last = [time.monotonic()]

    def show(now: float, ended: int, total: int) -> None:
        if time.monotonic() - last[0] >= (1.0 if is_watched else 10.0):
            last[0] = time.monotonic()
            line = f"{ended} of {total} jobs ended, after {duration(now)} of the trace"
            sys.stderr.write(f"\r\x1b[K{line}" if is_watched else f"{line}\n")
            sys.stderr.flush()

    return show


def _told(facts: dict[str, Any]) -> str:
    rows = [
        ("jobs", f"{facts['num_ended']} of {facts['num_jobs']} ended"),
        ("completion", f"{duration(facts['average_jct_seconds'])} on average"),
        ("", ", ".join(f"p{p} {duration(facts[f'p{p}_jct_seconds'])}" for p in (50, 90, 99))),
        ("waiting", f"{duration(facts['average_wait_seconds'])} on average until the start"),
        ("makespan", duration(facts["makespan_seconds"])),
        ("in use", f"{facts['utilisation']:.1%}"),
        ("queue", f"{facts['average_queue']:.1f} on average, {facts['longest_queue']} at most"),
        ("changes", f"{facts['num_changes']} starts and changes, {facts['num_stops']} stops"),
        ("decisions", f"{facts['num_decisions']}, {facts['decision_p50_seconds'] * 1e3:.1f} ms each (median)"),
    ]
    return "".join(f"{name:12}{text}\n" for name, text in rows)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise UserError(f"{path} cannot be written.", why=error.strerror or str(error)) from None


def picture(result: Result, title: str) -> str:
    """Three panels as SVG: what is in use, who waits, and how many jobs had ended after which time."""
    hours = [moment.at / 3600 for moment in result.moments]
    times = sorted(o.jct_seconds / 3600 for o in result.outcomes if o.jct_seconds is not None)
    parts = [(number + 1) / len(times) for number in range(len(times))]
    panels = [
        ("in use, by hours", hours, [moment.used for moment in result.moments], result.capacity),
        ("jobs waiting, by hours", hours, [float(moment.num_waiting) for moment in result.moments], None),
        ("part of the jobs done within so many hours", times, parts, 1.0),
    ]
    drawn = "".join(_panel(number, *panel) for number, panel in enumerate(panels))
    height = 30 + len(panels) * HEIGHT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="{LEFT}" y="18" font-weight="bold">{escape(title)}</text>{drawn}</svg>\n'
    )


def _panel(number: int, name: str, xs: list[float], ys: list[float], top: float | None) -> str:
    upper = 30 + number * HEIGHT
    lower, right = upper + HEIGHT - 50, WIDTH - 20
    most_x, most_y = max([*xs, 1e-9]), max([*ys, top or 0.0, 1e-9])
    step = max(len(xs) // (2 * WIDTH), 1)
    places = [
        f"{LEFT + x / most_x * (right - LEFT):.1f},{lower - y / most_y * (lower - upper):.1f}"
        for x, y in list(zip(xs, ys, strict=True))[::step]
    ]
    return (
        f'<path d="M{LEFT} {upper}V{lower}H{right}" fill="none" stroke="#888"/>'
        f'<polyline points="{" ".join(places)}" fill="none" stroke="#2a78d6" stroke-width="1.5"/>'
        f'<text x="{LEFT - 4}" y="{upper + 10}" text-anchor="end">{most_y:.4g}</text>'
        f'<text x="{LEFT - 4}" y="{lower}" text-anchor="end">0</text>'
        f'<text x="{right}" y="{lower + 14}" text-anchor="end">{most_x:.4g}</text>'
        f'<text x="{LEFT}" y="{lower + 14}">{escape(name)}</text>'
    )
